"""Calls in which both sides send messages: `ModelStreamInfer`, and gRPC's reflection."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any, Self

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from tests.support.clients import TIMEOUT_S, Grpc, infer_request, metric
from tests.support.expected import fake_answers
from tests.support.models import NAME
from tests.support.triton_clients import TritonClient
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.server import Server

STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


class Stream:
    """A stream whose messages are sent one by one; use it in a `with` block."""

    def __init__(self, server: Server, method: str = STREAM_INFER, **options: Any) -> None:
        self._channel = grpc.insecure_channel(server.grpc, options=[("grpc.max_receive_message_length", -1)])
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self._channel.stream_stream(method)
        self.replies: Any = call(iter(self._outgoing.get, None), timeout=TIMEOUT_S, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._channel.close()

    def send(self, message: Any) -> None:
        """Sends a message, or bytes as they are."""
        self._outgoing.put(message if isinstance(message, bytes) else message.SerializeToString())

    def end(self) -> None:
        self._outgoing.put(None)

    def next(self) -> pb.ModelStreamInferResponse:
        return pb.ModelStreamInferResponse.FromString(next(self.replies))


@pytest.fixture
def stream(fake_server: Server) -> Iterator[Stream]:
    with Stream(fake_server) as opened:
        yield opened


def vectors(reply: pb.ModelStreamInferResponse) -> np.ndarray[Any, Any]:
    assert not reply.error_message
    output = reply.infer_response
    return np.frombuffer(output.raw_output_contents[0], "<f4").reshape(output.outputs[0].shape)


def test_tritonclients_stream(fake_server: Server, models: Path) -> None:
    """Its streaming client gets an answer to each request, in the order of the requests."""
    found: queue.Queue[tuple[Any, Any]] = queue.Queue()
    texts = [f"text {'x' * (index % 7)} {index}" for index in range(200)]
    with tritonclient.grpc.InferenceServerClient(fake_server.grpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        for index, text in enumerate(texts):
            tensors = TritonClient("grpc", fake_server).inputs({"text": [text]})
            client.async_stream_infer(NAME, tensors, request_id=str(index), enable_empty_final_response=True)
        results = [found.get(timeout=TIMEOUT_S) for _ in texts]
        client.stop_stream()
    assert {error for _, error in results} == {None}
    assert [result.get_response().id for result, _ in results] == list(map(str, range(len(texts))))
    assert all(result.get_response().parameters["triton_final_response"].bool_param for result, _ in results)
    rows = np.concatenate([result.as_numpy("embedding") for result, _ in results])
    np.testing.assert_allclose(rows, fake_answers(models, texts), atol=1e-5)


def test_an_error_is_a_message_of_its_own(stream: Stream, fake_server: Server, models: Path) -> None:
    """What one request does wrong is told in its place, and the stream goes on; the metrics count it."""
    before = metric(fake_server, "bertserve_requests_total", reason="model_not_found")
    for model in (NAME, "nobody", NAME):
        stream.send(infer_request(["a"], "id", model))
    first, second, third = (stream.next() for _ in range(3))
    assert second.error_message.startswith("unknown model; available: ")
    assert second.infer_response.id == "id"
    np.testing.assert_allclose([vectors(first)[0], vectors(third)[0]], fake_answers(models, ["a", "a"]), atol=1e-5)
    assert metric(fake_server, "bertserve_requests_total", reason="model_not_found") == before + 1


WANTED = [("triton_grpc_error", "true")]
ENDS = {
    "an error, where the client wants it": (
        WANTED,
        infer_request(["a"], model="nobody"),
        "NOT_FOUND",
        "model_not_found",
    ),
    "bytes that are no message": ([], b"\xff" * 10, "INVALID_ARGUMENT", "malformed_request"),
    "a message beyond the limit": ([], b"x" * ((4 << 20) + 1), "RESOURCE_EXHAUSTED", "body_too_large"),
}
"""Metadata, a message, and the status and reason of the call."""


@pytest.mark.parametrize("case", ENDS)
def test_what_ends_a_stream(fake_server: Server, case: str) -> None:
    """As for a call of one message; what came before it is answered."""
    asked, message, code, reason = ENDS[case]
    with Stream(fake_server, metadata=asked) as stream:
        stream.send(infer_request(["a"]))
        assert vectors(stream.next()).shape == (1, 384)
        stream.send(message)
        with pytest.raises(grpc.RpcError) as refused:
            stream.next()
    assert refused.value.code().name == code
    assert dict(refused.value.trailing_metadata())["bertserve-reason"] == reason


def test_messages_larger_than_a_window(stream: Stream, models: Path) -> None:
    """Many messages of more than 64 KiB pass one after another: what was granted for one is given back."""
    large, texts = infer_request(["x" * (1 << 20)]), ["word " * 1500] * 20
    large.parameters["truncate"].bool_param = False
    for _ in range(20):  # 20 MiB, more than all streams of a connection are granted at a time
        stream.send(large)
        assert "characters" in stream.next().error_message
    stream.send(infer_request(texts))
    np.testing.assert_allclose(vectors(stream.next()), fake_answers(models, texts), atol=1e-5)


def test_more_requests_than_are_worked_on_at_a_time(fake_server: Server) -> None:
    """A client that sends thousands and reads later gets each answer; none is lost and none overtakes."""
    count = 3000
    with Stream(fake_server) as stream:
        for index in range(count):
            stream.send(infer_request(["a"], str(index)))
        stream.end()
        identities = [pb.ModelStreamInferResponse.FromString(reply).infer_response.id for reply in stream.replies]
    assert identities == list(map(str, range(count)))


def test_a_stream_whose_client_leaves(fake_server: Server) -> None:
    """What it had asked for is forgotten, and nothing of it stays admitted."""
    stream = Stream(fake_server)
    for _ in range(50):
        stream.send(infer_request(["a " * 100] * 20))
    stream.next()
    stream.replies.cancel()
    wait_for(lambda: metric(fake_server, "bertserve_admitted_tokens") == 0, "no token under way")
    with Grpc(fake_server) as client:
        assert client.embed(["a"]).vectors.shape == (1, 384)


def test_a_server_that_ends_answers_what_streams_had_asked(serve: Callable[..., Server]) -> None:
    """The answers under way arrive, then the stream ends as UNAVAILABLE, and the server within its drain limit."""
    server = serve("--engine", "fake", "--precision", "fp32", "--fake-ms", "300", "--drain-s", "20")
    with Stream(server) as quiet, Stream(server) as busy:
        quiet.send(infer_request(["a"]))
        quiet.next()
        busy.send(infer_request(["a"]))
        wait_for(lambda: metric(server, "bertserve_admitted_tokens") > 0, "a request under way")
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 15
        assert vectors(busy.next()).shape == (1, 384)
        for stream in (quiet, busy):
            with pytest.raises(grpc.RpcError) as ended:
                stream.next()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection_describes_what_is_served(fake_server: Server, version: str) -> None:
    """A client that knows nothing but the name of a service can ask it: reflection brings its messages."""
    method = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    pool = descriptor_pool.DescriptorPool()

    with Stream(fake_server, method) as stream:

        def asked(**request: str) -> ServerReflectionResponse:
            stream.send(ServerReflectionRequest(**request))
            return ServerReflectionResponse.FromString(next(stream.replies))

        services = asked(list_services="*").list_services_response.service
        assert "inference.GRPCInferenceService" in {service.name for service in services}
        found = asked(file_containing_symbol="inference.GRPCInferenceService.ModelInfer").file_descriptor_response
        assert "unknown file, symbol" in asked(file_containing_symbol="no.such.Symbol").error_response.error_message
        assert asked(file_by_filename="serving/grpc/services/inference.proto").file_descriptor_response == found
    (file,) = found.file_descriptor_proto
    pool.Add(descriptor_pb2.FileDescriptorProto.FromString(file))
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    infer = service.methods_by_name["ModelInfer"]
    kinds = [message_factory.GetMessageClass(kind) for kind in (infer.input_type, infer.output_type)]
    request = kinds[0].FromString(infer_request(["a"]).SerializeToString())
    with grpc.insecure_channel(fake_server.grpc) as channel:
        reply = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", None, kinds[1].FromString)(
            request.SerializeToString(), timeout=TIMEOUT_S
        )
    assert list(reply.outputs[0].shape) == [1, 384]


def test_exceptions_of_tritonclient_on_a_stream(fake_server: Server) -> None:
    """Its callback gets the error of a request as its own exception."""
    found: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(fake_server.grpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer("nobody", TritonClient("grpc", fake_server).inputs({"text": ["a"]}))
        _, error = found.get(timeout=TIMEOUT_S)
    assert isinstance(error, InferenceServerException)
    assert "unknown model" in str(error)
