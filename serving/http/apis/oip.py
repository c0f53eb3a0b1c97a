"""The Open Inference Protocol v2 over HTTP, compatible with tritonclient."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from bertserve.serving.errors import InvalidRequest, MalformedRequest, Unsupported
from bertserve.serving.fields.rule import Ignored
from bertserve.serving.http.apis.oip_messages import (
    V2_ERRORS,
    ControlRequest,
    IndexRequest,
    InferMessage,
    InferReply,
    InputTensor,
    Liveness,
    ModelReadiness,
    Readiness,
)
from bertserve.serving.http.apis.vectors import rows_json
from bertserve.serving.http.decoding import JsonDecoder
from bertserve.serving.http.exchange import OCTETS, HttpReply, json_reply, outcome_head
from bertserve.serving.http.routes import Docs, Router, v2_names
from bertserve.serving.inference.pipeline import INLINE_NUMBERS
from bertserve.serving.net.requests import COMPRESSIONS
from bertserve.serving.oip.parameters import CONTROL, INPUT, OUTPUT, REQUEST, typed
from bertserve.serving.oip.service import (
    SETTINGS,
    SHARED_MEMORY,
    ModelState,
    ServerMetadata,
    StatisticsReply,
    refuse_region,
    refuse_unsupported,
)
from bertserve.serving.oip.tensors import BYTES, PAIR, TEXT, Tensor
from bertserve.serving.oip.views import ModelConfig, ModelMetadata
from bertserve.serving.tasks.base import with_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.http.app_context import AppContext, Endpoint
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.inference.requests import Outcome
    from bertserve.serving.oip.tensors import Output
    from bertserve.serving.oip.views import View
    from bertserve.serving.tasks.base import Check

router = Router("Open Inference Protocol v2", V2_ERRORS, "/v2/")

_MODEL, _VERSION = "/v2/models/{model}", "/versions/{version}"
_LENGTH_HEADER = b"inference-header-content-length"
_LENGTH_DIGITS = 18
_BAD_REQUEST = 400
_NOT_READY = b'{"error":"the model is not ready, or its name or version is unknown"}'

_INFER, _INDEX, _CONTROL = JsonDecoder(InferMessage), JsonDecoder(IndexRequest), JsonDecoder(ControlRequest)

_RAW = InferMessage([], parameters={"binary_data_output": True})
"""A raw request has no JSON, and gets all outputs in binary."""

Binary = Mapping[str, bool] | bool
"""The outputs to send in binary: by name, or all or none."""

_QUICK = 1
"""Compression level: vectors hardly shrink at any level."""

_PACKED_BYTES = 1 << 16
"""Bytes of a reply that are compressed at once."""


def _example(context: AppContext) -> dict[str, Any]:
    """An example request for the first model."""
    view = next(view for view in map(context.v2.view, context.v2.names) if view.takes_text)
    given = view.model.task.example.get("inputs")
    texts = {TEXT: given if isinstance(given, str) else "What is a T4?", PAIR: "A T4 is a graphics card."}
    return {
        "inputs": [
            {"name": info.name, "datatype": BYTES, "shape": [1, 1], "data": [texts[info.name]]} for info in view.inputs
        ]
    }


_infer_docs = Docs(
    InferMessage,
    InferReply,
    _example,
    v2_names,
    statuses={501: "Shared memory and `classification` of outputs are not supported."},
    takes_headers=["Inference-Header-Content-Length"],
    gives_headers=["Inference-Header-Content-Length", "Content-Encoding"],
    binary=True,
)


@router.post(f"{_MODEL}/infer", _infer_docs, summary="Infer.", infers=True)
@router.post(f"{_MODEL}{_VERSION}/infer", _infer_docs, summary="Infer, with a version.", infers=True)
async def model_infer(context: AppContext, http: HttpRequest) -> HttpReply:
    message, tensors = await _read(context, http)
    _pass_over(http, message)
    names = [output.name for output in message.outputs]
    model, version = _named(http)
    view, request = context.v2.request(model, version, tensors, names, message.parameters)
    http.stamp(request)
    binary = _wants_binary(message)
    request.as_bytes = binary is True
    width = 0 if view.takes_text else tensors[0].shape[-1]

    def write(outcome: Outcome[Any], check: Check) -> HttpReply:
        return _reply(view, message, outcome, view.answer(outcome.answer, names, width), binary, check)

    outcome, reply = await context.v2.answer(view, request, width, write)
    accepted = http.headers.get(b"accept-encoding", b"")
    if accepted not in COMPRESSIONS:
        return reply
    return await context.pipeline.write(outcome, len(reply.body), partial(_compress, reply, accepted))


@router.get("/v2", Docs(gives=ServerMetadata))
async def server(context: AppContext, _: HttpRequest) -> HttpReply:
    """Get server metadata."""
    return json_reply(context.v2.server_metadata())


@router.get(
    "/v2/health/live", Docs(gives=Liveness, statuses={_BAD_REQUEST: "The server is not live; restart it."}), public=True
)
async def live(context: AppContext, _: HttpRequest) -> HttpReply:
    """Check whether the server is live."""
    return json_reply(Liveness(context.lifecycle.live), 200 if context.lifecycle.live else _BAD_REQUEST)


@router.get(
    "/v2/health/ready",
    Docs(gives=Readiness, statuses={_BAD_REQUEST: "The server is not ready; send requests to another replica."}),
    public=True,
)
async def ready(context: AppContext, _: HttpRequest) -> HttpReply:
    """Check whether the server is ready."""
    return json_reply(Readiness(context.lifecycle.ready), 200 if context.lifecycle.ready else _BAD_REQUEST)


@router.get("/v2/models/stats", Docs(gives=StatisticsReply), of_core=True)
async def all_statistics(context: AppContext, _: HttpRequest) -> HttpReply:
    """Get statistics of all models."""
    return json_reply(context.v2.statistics(None))


def _of_model(
    path: str,
    summary: str,
    gives: type,
    statuses: Mapping[int, str] = MappingProxyType({}),
    *,
    of_core: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Adds a model's route, with and without a version."""
    docs = Docs(gives=gives, models=v2_names, statuses=statuses)

    def add(endpoint: Endpoint) -> Endpoint:
        router.get(_MODEL + path, docs, summary=f"{summary}.", of_core=of_core)(endpoint)
        summarized = f"{summary}, with a version."
        return router.get(_MODEL + _VERSION + path, docs, summary=summarized, of_core=of_core)(endpoint)

    return add


@_of_model("", "Get a model's metadata", ModelMetadata)
async def metadata(context: AppContext, http: HttpRequest) -> HttpReply:
    return json_reply(context.v2.view(*_named(http)).metadata())


@_of_model(
    "/ready",
    "Check whether a model is ready",
    ModelReadiness,
    {_BAD_REQUEST: "The model is not ready, or its name or version is unknown."},
)
async def model_ready(context: AppContext, http: HttpRequest) -> HttpReply:
    if context.v2.model_ready(*_named(http)):
        return json_reply(ModelReadiness(http.parameters["model"], ready=True))
    return HttpReply(_NOT_READY, _BAD_REQUEST)


@_of_model("/config", "Get a model's Triton configuration", ModelConfig)
async def config(context: AppContext, http: HttpRequest) -> HttpReply:
    return json_reply(context.v2.config(*_named(http)))


@_of_model("/stats", "Get a model's statistics", StatisticsReply, of_core=True)
async def statistics(context: AppContext, http: HttpRequest) -> HttpReply:
    return json_reply(context.v2.statistics(*_named(http)))


@router.post(
    "/v2/repository/index", Docs(IndexRequest, list[ModelState], {"ready": True}, body_optional=True), of_core=True
)
async def index(context: AppContext, http: HttpRequest) -> HttpReply:
    """List the models of the repository."""
    message = await _INDEX.decode_in_turn(http.body, context.large_body_lock, http) if http.body else IndexRequest()
    return json_reply(context.v2.index(ready=message.ready))


def _controlled(context: AppContext) -> list[str]:
    return context.v2.names if context.v2.control else []


_control_docs = Docs(
    ControlRequest,
    dict[str, int],
    {},
    _controlled,
    statuses={400: "The version cannot be served.", 403: "Model control is off (--model-control)."},
    body_optional=True,
    reply={},
)


@router.post("/v2/repository/models/{model}/load", _control_docs, of_core=True)
async def load(context: AppContext, http: HttpRequest) -> HttpReply:
    """Load a model of the repository."""
    await context.v2.load(http.parameters["model"], await _control_parameters(context, http))
    return HttpReply(b"{}")


@router.post("/v2/repository/models/{model}/unload", _control_docs, of_core=True)
async def unload(context: AppContext, http: HttpRequest) -> HttpReply:
    """Unload a model of the repository."""
    await _control_parameters(context, http)
    context.v2.unload(http.parameters["model"])
    return HttpReply(b"{}")


async def _control_parameters(context: AppContext, http: HttpRequest) -> Mapping[str, object]:
    """The parameters of a load or unload request."""
    if not http.body:
        return {}
    parameters = (await _CONTROL.decode_in_turn(http.body, context.large_body_lock, http)).parameters
    ignored = Ignored()
    CONTROL.apply_rule(parameters, ignored)
    if ignored:
        http.pass_over(ignored)
    return parameters


# Triton routes that are not supported, with errors that tell its clients so.


async def refuse_shared_memory(_: AppContext, __: HttpRequest) -> HttpReply:
    raise Unsupported(SHARED_MEMORY)


async def refuse_settings(_: AppContext, __: HttpRequest) -> HttpReply:
    raise Unsupported(SETTINGS)


for _kind in ("system", "cuda"):
    _memory, _region = f"/v2/{_kind}sharedmemory", f"/v2/{_kind}sharedmemory/region/{{region}}"
    for _path in (f"{_memory}/status", f"{_region}/status"):
        router.get(_path)(refuse_shared_memory)
    for _path in (f"{_memory}/unregister", f"{_region}/register", f"{_region}/unregister"):
        router.post(_path)(refuse_shared_memory)
for _path in ("/v2/logging", "/v2/trace/setting", f"{_MODEL}/trace/setting"):
    router.get(_path)(refuse_settings)
    router.post(_path)(refuse_settings)


def _named(http: HttpRequest) -> tuple[str, str | None]:
    return http.parameters["model"], http.parameters.get("version")


async def _read(context: AppContext, http: HttpRequest) -> tuple[InferMessage, list[Tensor]]:
    """The message and its inputs: JSON with optional binary data, or a raw body as the only input."""
    body = memoryview(http.body)
    header = http.headers.get(_LENGTH_HEADER)
    length = len(body) if header is None else _length(header, len(body))
    if length == 0 and header is not None:
        return _RAW, [context.v2.raw_input(http.parameters["model"], body)]
    message = await _INFER.decode_in_turn(body[:length], context.large_body_lock, http)
    return message, _tensors(message.inputs, body[length:])


def _length(header: bytes, most: int) -> int:
    """The size of the JSON in bytes; 0 for a raw request."""
    if not header.isdigit() or len(header) > _LENGTH_DIGITS or int(header) > most:
        raise MalformedRequest(f"the header Inference-Header-Content-Length must be a number from 0 to {most}")
    return int(header)


def _pass_over(http: HttpRequest, message: InferMessage) -> None:
    """Applies the rule for fields to the unread parameters."""
    ignored = Ignored()
    REQUEST.apply_rule(message.parameters, ignored)
    for tensor in message.inputs:
        INPUT.apply_rule(tensor.parameters, ignored)
    for output in message.outputs:
        OUTPUT.apply_rule(output.parameters, ignored)
    if ignored:
        http.pass_over(ignored)


def _tensors(inputs: Sequence[InputTensor], tail: memoryview) -> list[Tensor]:
    """The inputs, each with its part of the binary data after the JSON."""
    tensors = []
    at = 0
    for tensor in inputs:
        blob = None
        if tensor.parameters:
            refuse_region(tensor.parameters)
            size = tensor.parameters.get("binary_data_size")
            if size is not None:
                if tensor.data is not None:
                    raise InvalidRequest("an input has both `data` and `binary_data_size`")
                if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(tail) - at:
                    raise InvalidRequest(
                        f"`binary_data_size` must be 0 to {len(tail) - at}, the bytes left after the JSON"
                    )
                blob = tail[at : at + size]
                at += size
        if blob is None and tensor.data is None:
            raise InvalidRequest("an input has neither `data` nor `binary_data_size`")
        tensors.append(Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, blob))
    if at != len(tail):
        raise InvalidRequest(f"{len(tail) - at} bytes after the JSON belong to no input")
    return tensors


def _wants_binary(message: InferMessage) -> Binary:
    """The outputs to send in binary."""
    binary = bool(_flag(message.parameters, "binary_data_output"))
    choices = {}
    for output in message.outputs:
        refuse_unsupported(output.parameters)
        own = _flag(output.parameters, "binary_data")
        choices[output.name] = binary if own is None else own
    return choices or binary


def _flag(parameters: dict[str, Any], name: str) -> bool | None:
    flag: bool | None = typed(parameters, name, bool, "true or false")
    return flag


def _reply(
    view: View,
    message: InferMessage,
    outcome: Outcome[Any],
    outputs: Sequence[Output],
    binary: Binary,
    check: Check,
) -> HttpReply:
    tensors: list[dict[str, Any]] = []
    blobs = []
    for output in outputs:
        check()
        tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if binary if isinstance(binary, bool) else binary.get(output.name, False):
            blobs.append(output.blob())
            tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            flat = output.flat()
            tensor["data"] = flat if len(flat) <= INLINE_NUMBERS else orjson.Fragment(rows_json(flat, check))
        tensors.append(tensor)
    reply = {"model_name": view.name, "model_version": outcome.version, "outputs": tensors}
    if message.id:
        reply["id"] = message.id
    head = orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
    if not blobs:
        return HttpReply(head, head=outcome_head(outcome))
    length = b"%b: %d\r\n" % (_LENGTH_HEADER, len(head))
    return HttpReply(b"".join((head, *blobs)), content_type=OCTETS, head=outcome_head(outcome) + length)


def _compress(reply: HttpReply, encoding: bytes, check: Check) -> HttpReply:
    """A compressed reply, for a client that accepts this encoding and no other.

    HTTP libraries list all encodings they know by default. These get no compression: vectors hardly shrink, and it is
    slow.
    """
    packer = zlib.compressobj(_QUICK, wbits=COMPRESSIONS[encoding])
    pieces = [
        packer.compress(reply.body[at : at + _PACKED_BYTES])
        for at in with_checks(range(0, len(reply.body), _PACKED_BYTES), check, 1)
    ]
    body = b"".join((*pieces, packer.flush()))
    return msgspec.structs.replace(reply, body=body, head=reply.head + b"content-encoding: %b\r\n" % encoding)
