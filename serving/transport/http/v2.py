"""The Open Inference Protocol v2 over HTTP, as tritonclient speaks it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson

from serving.errors import InvalidRequest, MalformedRequest, ModelNotFound
from serving.records import EmbedOptions, InferRequest
from serving.transport import oip
from serving.transport.http.decoding import JsonDecoder
from serving.transport.http.exchange import HttpReply, Operation, outcome_headers
from serving.transport.priority import priority_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from serving.lifecycle import Lifecycle
    from serving.pipeline import Pipeline
    from serving.records import Outcome
    from serving.repository import Repository
    from serving.settings import Settings
    from serving.transport.http.exchange import HttpRequest

_LENGTH_HEADER = b"inference-header-content-length"
_US_PER_MS = 1000


class InputTensor(msgspec.Struct, forbid_unknown_fields=True):
    """An input: its `data` is here, or behind the JSON with its size in `parameters.binary_data_size`."""

    name: str
    datatype: str
    shape: list[int]
    data: list[str | list[str]] | None = None
    parameters: dict[str, Any] = {}


class OutputChoice(msgspec.Struct, forbid_unknown_fields=True):
    """An output that is asked for; `parameters.binary_data` wants it behind the JSON."""

    name: str
    parameters: dict[str, Any] = {}


class InferMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A request; parameters read: `timeout` (microseconds), `priority`, `truncate`, `binary_data_output`."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: dict[str, Any] = {}
    outputs: list[OutputChoice] = []


class OutputTensor(msgspec.Struct):
    """An output, row-major."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float]


class InferReply(msgspec.Struct):
    """The answer."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | None = None


class ServerMetadata(msgspec.Struct):
    """What this server is."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(msgspec.Struct):
    """A tensor; -1 is a dimension that varies."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


def operations(pipeline: Pipeline, repository: Repository, lifecycle: Lifecycle, settings: Settings) -> list[Operation]:
    """The routes of this protocol."""
    decoder = JsonDecoder(InferMessage)
    example = {"inputs": [{"name": oip.INPUT, "datatype": oip.BYTES, "shape": [1, 1], "data": ["What is a T4?"]}]}

    async def server(_: HttpRequest) -> HttpReply:
        return _json(ServerMetadata(oip.SERVER_NAME, oip.SERVER_VERSION, list(oip.EXTENSIONS)))

    async def live(_: HttpRequest) -> HttpReply:
        return HttpReply(b'{"live":true}') if lifecycle.live else HttpReply(b'{"live":false}', 400)

    async def ready(_: HttpRequest) -> HttpReply:
        return HttpReply(b'{"ready":true}') if lifecycle.ready else HttpReply(b'{"ready":false}', 400)

    async def model_ready(http: HttpRequest) -> HttpReply:
        name = http.path_parameter("model")
        try:
            repository.find(name, http.path_parameter("version"))
        except ModelNotFound:
            return HttpReply(orjson.dumps({"error": "no such model or version"}), 400)
        status = 200 if lifecycle.ready else 400
        return HttpReply(orjson.dumps({"name": name, "ready": lifecycle.ready}), status)

    async def model(http: HttpRequest) -> HttpReply:
        found = repository.find(http.path_parameter("model"), http.path_parameter("version"), "embed")
        return _json(
            ModelMetadata(
                name=found.name,
                versions=[found.version],
                platform=oip.PLATFORM,
                inputs=[TensorMetadata(oip.INPUT, oip.BYTES, oip.input_shape())],
                outputs=[TensorMetadata(oip.OUTPUT, oip.FP32, oip.output_shape(found))],
            )
        )

    async def infer(http: HttpRequest) -> HttpReply:
        message, tail = _split(http, decoder)
        outcome = await pipeline.infer(
            InferRequest(
                inputs=_texts(message, tail),
                options=EmbedOptions(),
                arrival=http.arrival,
                request_id=http.request_id,
                max_inputs=settings.max_v2_batch_size,
                model=http.path_parameter("model"),
                version=http.path_parameter("version"),
                truncate=_flag(message.parameters, "truncate"),
                timeout_ms=_timeout_ms(message.parameters, http),
                priority=_priority(message.parameters, http),
            )
        )
        return _reply(message, outcome)

    versioned = "/v2/models/{model}/versions/{version}"
    tag = "Open Inference Protocol v2"
    return [
        Operation("POST", "/v2/models/{model}/infer", infer, "Infer.", tag, InferMessage, InferReply, example),
        Operation("POST", f"{versioned}/infer", infer, "Infer with a version.", tag, InferMessage, InferReply, example),
        Operation("GET", "/v2", server, "What this server is.", tag, reply=ServerMetadata),
        Operation("GET", "/v2/health/live", live, "Whether the server runs.", tag),
        Operation("GET", "/v2/health/ready", ready, "Whether it takes requests.", tag),
        Operation("GET", "/v2/models/{model}", model, "What a model takes and gives.", tag, reply=ModelMetadata),
        Operation("GET", versioned, model, "The same of a version.", tag, reply=ModelMetadata),
        Operation("GET", "/v2/models/{model}/ready", model_ready, "Whether a model takes requests.", tag),
        Operation("GET", f"{versioned}/ready", model_ready, "The same of a version.", tag),
    ]


def _json(message: msgspec.Struct) -> HttpReply:
    return HttpReply(msgspec.json.encode(message))


def _split(http: HttpRequest, decoder: JsonDecoder[InferMessage]) -> tuple[InferMessage, memoryview]:
    """The JSON and the binary tail; without the length header the whole body is JSON."""
    body = memoryview(http.body)
    header = http.header(_LENGTH_HEADER)
    if header is None:
        return decoder.decode(body), body[len(body) :]
    if not header.isdigit() or not 0 < int(header) <= len(body):
        raise MalformedRequest(f"the header Inference-Header-Content-Length must be between 1 and {len(body)}")
    return decoder.decode(body[: int(header)]), body[int(header) :]


def _texts(message: InferMessage, tail: memoryview) -> list[str]:
    if len(message.inputs) != 1:
        raise InvalidRequest(f"{len(message.inputs)} inputs; the model takes one, {oip.INPUT!r}")
    tensor = message.inputs[0]
    count = oip.check_input(tensor.name, tensor.datatype, tensor.shape)
    oip.check_outputs([output.name for output in message.outputs])
    size = tensor.parameters.get("binary_data_size")
    if size is None and tensor.data is None:
        raise InvalidRequest(f"input {oip.INPUT!r} has neither `data` nor `binary_data_size`")
    if size is not None:
        if tensor.data is not None:
            raise InvalidRequest(f"input {oip.INPUT!r} has both `data` and `binary_data_size`")
        if size != len(tail):
            raise InvalidRequest(f"`binary_data_size` differs from the {len(tail)} bytes behind the JSON")
        return oip.split_bytes(tail, count)
    if len(tail):
        raise InvalidRequest(f"{len(tail)} bytes behind the JSON belong to no input")
    texts = [text for row in tensor.data or [] for text in ([row] if isinstance(row, str) else row)]
    oip.check_count(count, len(texts))
    return texts


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


def _reply(message: InferMessage, outcome: Outcome[NDArray[np.float32]]) -> HttpReply:
    tensor: dict[str, Any] = {"name": oip.OUTPUT, "datatype": oip.FP32, "shape": outcome.answer.shape}
    reply = {"model_name": outcome.model, "model_version": outcome.version, "outputs": [tensor]}
    if message.id is not None:
        reply["id"] = message.id
    headers = outcome_headers(outcome)
    binary = _flag(message.parameters, "binary_data_output")
    for output in message.outputs:
        own = _flag(output.parameters, "binary_data")
        binary = binary if own is None else own
    if not binary:
        tensor["data"] = np.ravel(outcome.answer)
        return HttpReply(orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY), headers=headers)
    blob = outcome.answer.astype("<f4", copy=False).tobytes()
    tensor["parameters"] = {"binary_data_size": len(blob)}
    head = orjson.dumps(reply)
    headers.append((_LENGTH_HEADER, b"%d" % len(head)))
    return HttpReply(head + blob, content_type=b"application/octet-stream", headers=headers)
