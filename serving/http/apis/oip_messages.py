"""Request and reply types of the v2 routes over HTTP; `serving/oip` has the types that gRPC shares."""

from __future__ import annotations

from typing import Any

import msgspec

from bertserve.serving.http.faults import ErrorFormat


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """An input, with values in `data`, or in binary after the JSON with their size in `parameters.binary_data_size`."""

    name: str
    datatype: str
    shape: list[int]
    data: list[str | int | list[str | int]] | None = None
    parameters: dict[str, Any] = {}


class OutputChoice(msgspec.Struct, forbid_unknown_fields=True):
    """A requested output; `parameters.binary_data` returns it in binary after the JSON."""

    name: str
    parameters: dict[str, Any] = {}


class InferMessage(msgspec.Struct, forbid_unknown_fields=True):
    """An inference request.

    Supported parameters: `timeout` (microseconds), `priority`, `truncate`, `prompt_name`, `input_type`,
    `binary_data_output`; `top_k` and `threshold` for sparse vectors.
    """

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[OutputChoice] = []


class OutputTensor(msgspec.Struct):
    """An output, row-major. A binary output has `parameters.binary_data_size` instead of `data`."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float | str] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class InferReply(msgspec.Struct):
    """An inference reply."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | msgspec.UnsetType = msgspec.UNSET


class Liveness(msgspec.Struct):
    """Whether the server is alive."""

    live: bool


class Readiness(msgspec.Struct):
    """Whether the server is ready for requests."""

    ready: bool


class ModelReadiness(msgspec.Struct):
    """Whether a model is ready for requests."""

    name: str
    ready: bool


class IndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to list the repository; `ready` lists only models that are ready."""

    ready: bool = False


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Optional parameters of a load or unload: `version` to load; `unload_dependents` has no effect."""

    parameters: dict[str, Any] = {}


class V2Error(msgspec.Struct):
    """An error of the Open Inference Protocol v2."""

    error: str


V2_ERRORS = ErrorFormat(V2Error, lambda _, message, __: V2Error(message), invalid_status=400)
