"""What v2's routes take and answer over HTTP; `serving/oip` has what both wires answer."""

from __future__ import annotations

from typing import Any

import msgspec


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """An input: its `data` is here, or behind the JSON with its size in `parameters.binary_data_size`."""

    name: str
    datatype: str
    shape: list[int]
    data: list[str | int | list[str | int]] | None = None
    parameters: dict[str, Any] = {}


class OutputChoice(msgspec.Struct, forbid_unknown_fields=True):
    """An output that the client wants; with `parameters.binary_data` it goes behind the JSON."""

    name: str
    parameters: dict[str, Any] = {}


class InferMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A request.

    Parameters read: `timeout` (microseconds), `priority`, `truncate`, `prompt_name`, `input_type`,
    `binary_data_output`.
    """

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[OutputChoice] = []


class OutputTensor(msgspec.Struct):
    """An output, row-major; where it lies behind the JSON, `parameters.binary_data_size` in place of `data`."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float | str] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class InferReply(msgspec.Struct):
    """The answer."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | msgspec.UnsetType = msgspec.UNSET


class Liveness(msgspec.Struct):
    """Whether the server runs."""

    live: bool


class Readiness(msgspec.Struct):
    """Whether the server takes requests."""

    ready: bool


class ModelReadiness(msgspec.Struct):
    """Whether a model takes requests."""

    name: str
    ready: bool


class IndexRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Which models: `ready` asks for those alone that take requests."""

    ready: bool = False


class ControlRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing, or parameters: `version` of a model to be loaded; `unload_dependents` does nothing."""

    parameters: dict[str, Any] = {}
