"""Inference by the Open Inference Protocol v2 over HTTP, as tritonclient speaks it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from serving.errors import BertserveError, InvalidRequest, MalformedRequest
from serving.http.apis.oip_messages import InferMessage, InferReply, InputTensor
from serving.http.decoding import JsonDecoder
from serving.http.exchange import OCTETS, HttpReply, Operation, outcome_head
from serving.net.requests import priority_of
from serving.oip.service import refuse_unsupported
from serving.oip.tensors import BYTES, PAIR, TEXT, Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.exchange import HttpRequest
    from serving.inference.pipeline import Pipeline
    from serving.oip.service import V2Service
    from serving.oip.tensors import Output
    from serving.oip.views import View
    from serving.records import Outcome

TAG = "Open Inference Protocol v2"
MODEL, VERSION = "/v2/models/{model}", "/versions/{version}"

_LENGTH_HEADER = b"inference-header-content-length"
_US_PER_MS = 1000
_ENCODINGS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
"""What replies are compressed with, as zlib's `wbits`."""

Binary = Mapping[str, bool] | bool
"""Which outputs go behind the JSON: by name, or all or none of them."""

_QUICK = 1
"""The level of compression: vectors hardly shrink, whatever is spent on them."""


def operations(service: V2Service, pipeline: Pipeline) -> list[Operation]:
    """The routes of this protocol that infer."""
    decoder = JsonDecoder(InferMessage)

    async def infer(http: HttpRequest) -> HttpReply:
        message, tail = _split(http, decoder)
        parameters = message.parameters
        names = [output.name for output in message.outputs]
        view, request = service.request(
            http.parameters["model"],
            http.parameters.get("version"),
            _tensors(message.inputs, tail),
            names,
            truncate=_flag(parameters, "truncate") if parameters else None,
            timeout_ms=_timeout_ms(parameters, http) if parameters else http.timeout_ms(),
            priority=_priority(parameters, http),
            arrival=http.arrival,
            trace=http.trace,
            request_id=http.request_id,
        )
        binary = _wants_binary(message)
        try:
            outcome = await pipeline.infer(request)
        except BertserveError:
            service.failed(view, http.arrival)
            raise
        width = 0 if view.takes_text else message.inputs[0].shape[-1]
        reply = _reply(view, message, outcome, view.answer(outcome.answer, names, width), binary)
        accepted = http.headers.get(b"accept-encoding")
        return await asyncio.to_thread(_compressed, reply, accepted) if accepted in _ENCODINGS else reply

    names = service.names
    versions = sorted({service.view(name).model.version for name in names})
    return [
        Operation(
            "POST",
            f"{MODEL}{version}/infer",
            infer,
            summary,
            TAG,
            InferMessage,
            InferReply,
            _example(service),
            values={"model": names, "version": versions},
            binary=True,
        )
        for version, summary in (("", "Infer."), (VERSION, "Infer with a version."))
    ]


def _example(service: V2Service) -> dict[str, Any]:
    """A request that the first model answers."""
    view = next(view for view in map(service.view, service.names) if view.takes_text)
    texts = {TEXT: "What is a T4?", PAIR: "A T4 is a graphics card."}
    if view.model.manifest.task == "fill_mask":
        texts[TEXT] = "A T4 is a graphics [MASK]."
    return {
        "inputs": [
            {"name": info.name, "datatype": BYTES, "shape": [1, 1], "data": [texts[info.name]]} for info in view.inputs
        ]
    }


def _split(http: HttpRequest, decoder: JsonDecoder[InferMessage]) -> tuple[InferMessage, memoryview]:
    """The JSON and the binary tail; without the length header the whole body is JSON."""
    body = memoryview(http.body)
    header = http.headers.get(_LENGTH_HEADER)
    if header is None:
        return decoder.decode(body), body[len(body) :]
    if not header.isdigit() or not 0 < int(header) <= len(body):
        raise MalformedRequest(f"the header Inference-Header-Content-Length must be between 1 and {len(body)}")
    return decoder.decode(body[: int(header)]), body[int(header) :]


def _tensors(inputs: Sequence[InputTensor], tail: memoryview) -> list[Tensor]:
    """The inputs, each with its part of what lies behind the JSON."""
    tensors = []
    at = 0
    for tensor in inputs:
        blob = None
        if tensor.parameters:
            refuse_unsupported(tensor.parameters)
            size = tensor.parameters.get("binary_data_size")
            if size is not None:
                if tensor.data is not None:
                    raise InvalidRequest("an input has both `data` and `binary_data_size`")
                if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(tail) - at:
                    raise InvalidRequest(f"`binary_data_size` must be a part of the {len(tail)} bytes behind the JSON")
                blob = tail[at : at + size]
                at += size
        if blob is None and tensor.data is None:
            raise InvalidRequest("an input has neither `data` nor `binary_data_size`")
        tensors.append(Tensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, blob))
    if at != len(tail):
        raise InvalidRequest(f"{len(tail) - at} bytes behind the JSON belong to no input")
    return tensors


def _wants_binary(message: InferMessage) -> Binary:
    """Which outputs go behind the JSON."""
    binary = bool(_flag(message.parameters, "binary_data_output")) if message.parameters else False
    choices = {}
    for output in message.outputs:
        refuse_unsupported(output.parameters)
        own = _flag(output.parameters, "binary_data")
        choices[output.name] = binary if own is None else own
    return choices or binary


def _flag(parameters: dict[str, Any], name: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"the parameter `{name}` must be true or false")
    return value


def _timeout_ms(parameters: dict[str, Any], http: HttpRequest) -> float | None:
    """The smaller of the header's limit and the parameter's."""
    limits = [limit for limit in (http.timeout_ms(),) if limit is not None]
    value = parameters.get("timeout")
    if value is not None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InvalidRequest("the parameter `timeout` must be a whole number of microseconds")
        limits += [value / _US_PER_MS] if value else []
    return min(limits, default=None)


def _priority(parameters: dict[str, Any], http: HttpRequest) -> int:
    if "priority" in parameters:
        return priority_of(parameters["priority"], "the parameter `priority`")
    return http.priority()


def _reply(
    view: View, message: InferMessage, outcome: Outcome[Any], outputs: Sequence[Output], binary: Binary
) -> HttpReply:
    tensors: list[dict[str, Any]] = []
    blobs = []
    for output in outputs:
        tensor: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": output.shape}
        if binary if isinstance(binary, bool) else binary.get(output.name, False):
            blobs.append(output.blob())
            tensor["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            tensor["data"] = output.flat()
        tensors.append(tensor)
    reply = {"model_name": view.name, "model_version": outcome.version, "outputs": tensors}
    if message.id is not None:
        reply["id"] = message.id
    head = orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)
    if not blobs:
        return HttpReply(head, head=outcome_head(outcome))
    length = b"%b: %d\r\n" % (_LENGTH_HEADER, len(head))
    return HttpReply(b"".join((head, *blobs)), content_type=OCTETS, head=outcome_head(outcome) + length)


def _compressed(reply: HttpReply, encoding: bytes) -> HttpReply:
    """A reply for a client that asks for this encoding and no other.

    Libraries that list every encoding they know do not mean it: vectors hardly shrink, and it takes its time.
    """
    packer = zlib.compressobj(_QUICK, wbits=_ENCODINGS[encoding])
    reply.body = packer.compress(reply.body) + packer.flush()
    reply.head += b"content-encoding: %b\r\n" % encoding
    return reply
