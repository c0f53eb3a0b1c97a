"""`inference.GRPCInferenceService`: the Open Inference Protocol v2, as tritonclient speaks it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
from google.protobuf.json_format import ParseDict

from bertserve.serving.errors import BertserveError, InvalidRequest, Unsupported, too_many_inputs
from bertserve.serving.fields.rule import Ignored
from bertserve.serving.grpc.calls import Method
from bertserve.serving.grpc.services import inference_pb2 as pb
from bertserve.serving.oip.parameters import CONTROL, INPUT, OUTPUT, REQUEST
from bertserve.serving.oip.service import SETTINGS, SHARED_MEMORY, refuse_region, refuse_unsupported
from bertserve.serving.oip.tensors import BYTES, Tensor, decode_text
from bertserve.serving.tasks.base import with_checks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from google.protobuf.message import Message

    from bertserve.serving.grpc.calls import Call, Metadata
    from bertserve.serving.inference.requests import Outcome, RequestTrace
    from bertserve.serving.oip.service import V2Service
    from bertserve.serving.tasks.base import Check

SERVICE = "inference.GRPCInferenceService"

_MAX_TENSORS = 64
_STREAM_ERRORS = b"triton_grpc_error"
"""Metadata key with which a client asks for the errors of a stream as the call's status."""

_FINAL_WANTED, _FINAL = "triton_enable_empty_final_response", "triton_final_response"
_IGNORED = "bertserve_ignored_fields"
"""Parameter of a stream's replies that replaces trailing metadata."""


class InferenceService:
    """The methods of the service, each a coroutine from message to message."""

    def __init__(self, service: V2Service) -> None:
        self._service = service

    def methods(self) -> dict[str, Method | BertserveError]:
        """The methods by path. An error stands for a Triton method that is not offered."""
        methods: dict[str, Method | BertserveError] = {
            "ModelInfer": Method(pb.ModelInferRequest, unary=self.model_infer),
            "ModelStreamInfer": Method(pb.ModelInferRequest, duplex=self.stream_infer),
            "ServerLive": Method(pb.ServerLiveRequest, unary=self.server_live, open=True),
            "ServerReady": Method(pb.ServerReadyRequest, unary=self.server_ready, open=True),
            "ModelReady": Method(pb.ModelReadyRequest, unary=self.model_ready),
            "ServerMetadata": Method(pb.ServerMetadataRequest, unary=self.server_metadata),
            "ModelMetadata": Method(pb.ModelMetadataRequest, unary=self.model_metadata),
            "ModelConfig": Method(pb.ModelConfigRequest, unary=self.model_config),
            "ModelStatistics": Method(pb.ModelStatisticsRequest, unary=self.model_statistics, of_core=True),
            "RepositoryIndex": Method(pb.RepositoryIndexRequest, unary=self.repository_index, of_core=True),
            "RepositoryModelLoad": Method(pb.RepositoryModelLoadRequest, unary=self.load, of_core=True),
            "RepositoryModelUnload": Method(pb.RepositoryModelUnloadRequest, unary=self.unload, of_core=True),
        }
        for kind in ("System", "Cuda"):
            for verb in ("Status", "Register", "Unregister"):
                methods[f"{kind}SharedMemory{verb}"] = Unsupported(SHARED_MEMORY)
        methods |= {name: Unsupported(SETTINGS) for name in ("TraceSetting", "LogSettings")}
        return {f"/{SERVICE}/{name}": method for name, method in methods.items()}

    async def server_live(self, _: pb.ServerLiveRequest, __: object) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=self._service.lifecycle.live)

    async def server_ready(self, _: pb.ServerReadyRequest, __: object) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.lifecycle.ready)

    async def model_ready(self, request: pb.ModelReadyRequest, _: object) -> pb.ModelReadyResponse:
        """Whether a model accepts requests; False for an unknown model."""
        return pb.ModelReadyResponse(ready=self._service.model_ready(request.name, request.version))

    async def server_metadata(self, _: pb.ServerMetadataRequest, __: object) -> Message:
        return _message(self._service.server_metadata(), pb.ServerMetadataResponse())

    async def model_metadata(self, request: pb.ModelMetadataRequest, _: object) -> Message:
        return _message(self._service.view(request.name, request.version).metadata(), pb.ModelMetadataResponse())

    async def model_config(self, request: pb.ModelConfigRequest, _: object) -> pb.ModelConfigResponse:
        """A model's configuration, in Triton's form."""
        reply = pb.ModelConfigResponse()
        _message(self._service.config(request.name, request.version), reply.config)
        return reply

    async def model_statistics(self, request: pb.ModelStatisticsRequest, _: object) -> Message:
        return _message(self._service.statistics(request.name, request.version), pb.ModelStatisticsResponse())

    async def repository_index(self, request: pb.RepositoryIndexRequest, _: object) -> pb.RepositoryIndexResponse:
        states = self._service.index(ready=request.ready)
        index = pb.RepositoryIndexResponse.ModelIndex
        return pb.RepositoryIndexResponse(models=[index(**msgspec.structs.asdict(state)) for state in states])

    async def load(self, request: pb.RepositoryModelLoadRequest, call: Call) -> pb.RepositoryModelLoadResponse:
        values, ignored = _values(request.parameters), Ignored()
        CONTROL.apply_rule(values, ignored)
        await self._service.load(request.model_name, values)
        call.set_trailing_metadata(_ignored_metadata(ignored))
        return pb.RepositoryModelLoadResponse()

    async def unload(self, request: pb.RepositoryModelUnloadRequest, call: Call) -> pb.RepositoryModelUnloadResponse:
        ignored = Ignored()
        CONTROL.apply_rule(_values(request.parameters), ignored)
        self._service.unload(request.model_name)
        call.set_trailing_metadata(_ignored_metadata(ignored))
        return pb.RepositoryModelUnloadResponse()

    async def model_infer(
        self, request: pb.ModelInferRequest, call: Call, trace: RequestTrace | None = None
    ) -> pb.ModelInferResponse:
        """Answers a request. The outputs are in `raw_output_contents`. `trace` is given for one of a stream."""
        arrival = time.perf_counter()
        if len(request.outputs) > _MAX_TENSORS:
            raise InvalidRequest(f"the request has {len(request.outputs)} outputs, more than any model")
        parameters = _values(request.parameters)
        ignored = _find_ignored(request, parameters)
        names = [choice.name for choice in request.outputs]
        view, infer_request = self._service.request(
            request.model_name, request.model_version, _tensors(request, self._service.max_inputs), names, parameters
        )
        infer_request.as_bytes = True
        infer_request.stamp(arrival, request.id, trace or call.trace, call.timeout_ms())
        width = 0 if view.takes_text else request.inputs[0].shape[-1]

        def write(outcome: Outcome[Any], check: Check) -> pb.ModelInferResponse:
            response = pb.ModelInferResponse(model_name=view.name, model_version=outcome.version, id=request.id)
            for output in with_checks(view.answer(outcome.answer, names, width), check, 1):
                response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
                response.raw_output_contents.append(output.blob())
            return response

        outcome, response = await self._service.answer(view, infer_request, width, write)
        if call.head.method.duplex is None:
            call.set_trailing_metadata(_metadata(outcome, ignored))
        elif ignored:
            response.parameters[_IGNORED].string_param = str(ignored)
        return response

    async def stream_infer(
        self, request: pb.ModelInferRequest, call: Call, trace: RequestTrace
    ) -> pb.ModelStreamInferResponse:
        """Answers one request of a stream. An error becomes a message, unless the client asks for a status."""
        try:
            response = await self.model_infer(request, call, trace)
        except BertserveError as error:
            if call.metadata(_STREAM_ERRORS) == b"true":
                raise
            call.record(error.without_traceback(), request.id, trace)
            return pb.ModelStreamInferResponse(
                error_message=error.message, infer_response=pb.ModelInferResponse(id=request.id)
            )
        if request.parameters and request.parameters[_FINAL_WANTED].bool_param:
            response.parameters[_FINAL].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response)


def _message(struct: msgspec.Struct, message: Message) -> Message:
    return ParseDict(msgspec.to_builtins(struct), message)


def _tensors(request: pb.ModelInferRequest, max_inputs: int) -> list[Tensor]:
    """The input tensors, from `raw_input_contents` or from the `contents` of each."""
    raw = request.raw_input_contents
    if len(request.inputs) > _MAX_TENSORS:
        raise InvalidRequest(f"the request has {len(request.inputs)} input tensors, more than any model takes")
    if raw and len(raw) != len(request.inputs):
        raise InvalidRequest(f"the request has {len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    tensors = []
    for index, tensor in enumerate(request.inputs):
        if raw:
            if tensor.HasField("contents"):
                raise InvalidRequest("contents field must not be specified when using raw_input_contents")
            blob = memoryview(raw[index])
            tensors.append(Tensor(tensor.name, tensor.datatype, tensor.shape, None, blob))
        else:
            tensors.append(Tensor(tensor.name, tensor.datatype, tensor.shape, _contents(tensor, max_inputs)))
    return tensors


def _contents(tensor: pb.ModelInferRequest.InferInputTensor, max_inputs: int) -> Sequence[Any]:
    contents = tensor.contents
    if tensor.datatype == BYTES:
        if len(contents.bytes_contents) > max_inputs:
            raise too_many_inputs(len(contents.bytes_contents), max_inputs)
        return [decode_text(element) for element in contents.bytes_contents]
    return contents.int_contents or contents.int64_contents


def _find_ignored(request: pb.ModelInferRequest, parameters: dict[str, Any]) -> Ignored:
    """The ignored parameters of a request, which are already read, and of its tensors."""
    ignored = Ignored()
    if parameters:
        REQUEST.apply_rule(parameters, ignored)
    for tensor in request.inputs:
        if tensor.parameters:
            values = _values(tensor.parameters)
            refuse_region(values)
            INPUT.apply_rule(values, ignored)
    for output in request.outputs:
        if output.parameters:
            values = _values(output.parameters)
            refuse_unsupported(values)
            OUTPUT.apply_rule(values, ignored)
    return ignored


def _ignored_metadata(ignored: Ignored) -> Metadata:
    return (("bertserve-ignored-fields", str(ignored)),) if ignored else ()


def _metadata(outcome: Outcome[Any], ignored: Ignored) -> Metadata:
    """The trailing metadata of an answer."""
    times = outcome.timings
    return (
        ("bertserve-tokenize-us", str(round(times.tokenize_us))),
        ("bertserve-queue-us", str(round(times.queue_us))),
        ("bertserve-compute-us", str(round(times.compute_us))),
        ("bertserve-total-us", str(round(times.total_us))),
        ("bertserve-tokens", str(outcome.tokens)),
        ("bertserve-truncated-tokens", str(outcome.truncated_tokens)),
        *((("bertserve-cache", "hit"),) if outcome.cached else ()),
        *(_ignored_metadata(ignored) if ignored else ()),
    )


def _values(parameters: Mapping[str, Message]) -> dict[str, Any]:
    return {name: _value(parameter) for name, parameter in parameters.items()} if parameters else {}


def _value(parameter: Message) -> bool | int | float | str | bytes | None:
    """A parameter's value, in the type in which it was sent; None if it has none."""
    return getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)
