"""`inference.GRPCInferenceService`: the Open Inference Protocol v2, as tritonclient speaks it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from serving.errors import InvalidRequest, ModelNotFound
from serving.records import DEFAULT_PRIORITY, EmbedOptions, InferRequest
from serving.transport import oip
from serving.transport.grpc import inference_pb2 as pb
from serving.transport.grpc.calls import Method
from serving.transport.priority import priority_of

if TYPE_CHECKING:
    from serving.lifecycle import Lifecycle
    from serving.pipeline import Pipeline
    from serving.records import Outcome
    from serving.repository import Repository
    from serving.settings import Settings
    from serving.transport.grpc.calls import Call

SERVICE = "inference.GRPCInferenceService"
_US_PER_MS = 1000


class InferenceService:
    """The calls of the service, each a plain coroutine from message to message."""

    def __init__(self, pipeline: Pipeline, repository: Repository, lifecycle: Lifecycle, settings: Settings) -> None:
        self._pipeline = pipeline
        self._repository = repository
        self._lifecycle = lifecycle
        self._settings = settings

    def methods(self) -> dict[str, Method]:
        """Its methods, by path."""
        methods: dict[str, tuple[Any, Any]] = {
            "ModelInfer": (self.model_infer, pb.ModelInferRequest),
            "ServerLive": (self.server_live, pb.ServerLiveRequest),
            "ServerReady": (self.server_ready, pb.ServerReadyRequest),
            "ModelReady": (self.model_ready, pb.ModelReadyRequest),
            "ServerMetadata": (self.server_metadata, pb.ServerMetadataRequest),
            "ModelMetadata": (self.model_metadata, pb.ModelMetadataRequest),
        }
        return {f"/{SERVICE}/{name}": Method(kind, unary=method) for name, (method, kind) in methods.items()}

    async def server_live(self, _: pb.ServerLiveRequest, __: object) -> pb.ServerLiveResponse:
        """Whether the server runs."""
        return pb.ServerLiveResponse(live=self._lifecycle.live)

    async def server_ready(self, _: pb.ServerReadyRequest, __: object) -> pb.ServerReadyResponse:
        """Whether it takes requests."""
        return pb.ServerReadyResponse(ready=self._lifecycle.ready)

    async def model_ready(self, request: pb.ModelReadyRequest, _: object) -> pb.ModelReadyResponse:
        """Whether a model takes requests; an unknown model does not."""
        try:
            self._repository.find(request.name, request.version)
        except ModelNotFound:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._lifecycle.ready)

    async def server_metadata(self, _: pb.ServerMetadataRequest, __: object) -> pb.ServerMetadataResponse:
        """What this server is."""
        return pb.ServerMetadataResponse(name=oip.SERVER_NAME, version=oip.SERVER_VERSION, extensions=oip.EXTENSIONS)

    async def model_metadata(self, request: pb.ModelMetadataRequest, _: object) -> pb.ModelMetadataResponse:
        """What a model takes and gives."""
        model = self._repository.find(request.name, request.version, "embed")
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=model.name,
            versions=[model.version],
            platform=oip.PLATFORM,
            inputs=[tensor(name=oip.INPUT, datatype=oip.BYTES, shape=oip.input_shape())],
            outputs=[tensor(name=oip.OUTPUT, datatype=oip.FP32, shape=oip.output_shape(model))],
        )

    async def model_infer(self, request: pb.ModelInferRequest, call: Call) -> pb.ModelInferResponse:
        """Embeds the texts of `text`; the vectors come back in `raw_output_contents`."""
        arrival = time.perf_counter()
        outcome = await self._pipeline.infer(
            InferRequest(
                inputs=_texts(request),
                options=EmbedOptions(),
                arrival=arrival,
                request_id=request.id,
                max_inputs=self._settings.max_v2_batch_size,
                model=request.model_name,
                version=request.model_version,
                truncate=_truncate(request),
                timeout_ms=_timeout_ms(request, call),
                priority=_priority(request),
            )
        )
        call.set_trailing_metadata(_trailers(outcome))
        tensor = pb.ModelInferResponse.InferOutputTensor
        return pb.ModelInferResponse(
            model_name=outcome.model,
            model_version=outcome.version,
            id=request.id,
            outputs=[tensor(name=oip.OUTPUT, datatype=oip.FP32, shape=outcome.answer.shape)],
            raw_output_contents=[outcome.answer.astype("<f4", copy=False).tobytes()],
        )


def _texts(request: pb.ModelInferRequest) -> list[str]:
    if len(request.inputs) != 1:
        raise InvalidRequest(f"{len(request.inputs)} inputs; the model takes one, {oip.INPUT!r}")
    tensor = request.inputs[0]
    count = oip.check_input(tensor.name, tensor.datatype, tensor.shape)
    oip.check_outputs([output.name for output in request.outputs])
    raw = request.raw_input_contents
    if not raw:
        elements = tensor.contents.bytes_contents
        oip.check_count(count, len(elements))
        return [oip.decode_text(element) for element in elements]
    if tensor.HasField("contents"):
        raise InvalidRequest(f"contents field must not be specified when using raw_input_contents for {oip.INPUT!r}")
    if len(raw) != 1:
        raise InvalidRequest(f"{len(raw)} raw_input_contents for 1 input")
    return oip.split_bytes(memoryview(raw[0]), count)


def _truncate(request: pb.ModelInferRequest) -> bool | None:
    if "truncate" not in request.parameters:
        return None
    parameter = request.parameters["truncate"]
    if parameter.WhichOneof("parameter_choice") != "bool_param":
        raise InvalidRequest("the parameter `truncate` must be a bool")
    return parameter.bool_param


def _timeout_ms(request: pb.ModelInferRequest, call: Call) -> float | None:
    """The smaller of the call's deadline and v2's parameter `timeout` (microseconds)."""
    limits = []
    remaining_s = call.time_remaining()
    if remaining_s is not None:
        limits.append(max(remaining_s, 1e-6) * 1e3)
    if "timeout" in request.parameters:
        parameter = request.parameters["timeout"]
        choice = parameter.WhichOneof("parameter_choice")
        if choice not in {"int64_param", "uint64_param"} or getattr(parameter, choice) < 0:
            raise InvalidRequest("the parameter `timeout` must be a whole number of microseconds")
        if timeout_us := getattr(parameter, choice):
            limits.append(timeout_us / _US_PER_MS)
    return min(limits, default=None)


def _priority(request: pb.ModelInferRequest) -> int:
    if "priority" not in request.parameters:
        return DEFAULT_PRIORITY
    parameter = request.parameters["priority"]
    choice = parameter.WhichOneof("parameter_choice")
    return priority_of(getattr(parameter, choice) if choice else None, "the parameter `priority`")


def _trailers(outcome: Outcome[Any]) -> tuple[tuple[str, str], ...]:
    times = outcome.timings
    return (
        ("bertserve-tokenize-us", str(round(times.tokenize_us))),
        ("bertserve-queue-us", str(round(times.queue_us))),
        ("bertserve-compute-us", str(round(times.compute_us))),
        ("bertserve-total-us", str(round(times.total_us))),
        ("bertserve-tokens", str(outcome.tokens)),
        ("bertserve-truncated-tokens", str(outcome.truncated_tokens)),
    )
