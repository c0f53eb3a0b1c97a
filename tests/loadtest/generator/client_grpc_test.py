from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.client import GRPC, Clients
from bertserve.loadtest.generator.grpc_messages import METHOD, ReplyCheck, request_bytes
from tests.support.grpc_server import SERVICE, grpc_server

if TYPE_CHECKING:
    from collections.abc import Callable

HIDDEN = 4
VECTOR = [0.5, -0.5, 0.5, -0.5]


def reply(vector: list[float]) -> bytes:
    output = pb.ModelInferResponse.InferOutputTensor(name="embedding", datatype="FP32", shape=[1, len(vector)])
    raw = struct.pack(f"<{len(vector)}f", *vector)
    message = pb.ModelInferResponse(model_name="minilm", model_version="1", outputs=[output], raw_output_contents=[raw])
    return bytes(message.SerializeToString())


def opened(target: str) -> Clients:
    """A client with two requests for that target."""
    clients = Clients()
    clients.open("way", GRPC, int(target.rpartition(":")[2]), "minilm", HIDDEN, {"8": ["one", "two"]})
    return clients


@pytest.mark.parametrize("text", ["", "a text", "ü" * 200, "x" * 70_000])
def test_a_request_is_what_the_protocol_says(text: str) -> None:
    """The bytes written by hand parse as a request of one text, short or long."""
    request = pb.ModelInferRequest.FromString(request_bytes("minilm", text))
    data = text.encode()
    assert request.model_name == "minilm"
    [tensor] = request.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("text", "BYTES", [1, 1])
    assert list(request.raw_input_contents) == [struct.pack("<I", len(data)) + data]


def test_the_method_is_the_one_that_the_server_offers() -> None:
    """The client calls the service under its public name."""
    assert f"/{SERVICE}/ModelInfer" == METHOD


@pytest.mark.parametrize("wrong", [b"", reply(VECTOR[:3]), reply(VECTOR * 2), reply(VECTOR)[:-1]])
def test_a_wrong_reply_is_an_error(wrong: bytes) -> None:
    """Another number of components, or no vector at all, is not taken for a reply."""
    with pytest.raises(BenchError, match="wrong gRPC reply"):
        ReplyCheck(HIDDEN).check_message(wrong)


def test_every_reply_has_the_first_one_s_size() -> None:
    """Its vector is read from the raw contents at the end; with anything more around it a reply is not taken."""
    check = ReplyCheck(HIDDEN)
    check.check_message(reply(VECTOR))
    assert check.vector(reply(VECTOR)) == VECTOR
    with pytest.raises(BenchError, match="wrong gRPC reply"):
        check.check_message(b"\x0a\x00" + reply(VECTOR))


@pytest.mark.parametrize("connections", [1, 6])
def test_replies_are_counted(connections: int) -> None:
    """One call at a time or several: each reply is counted once and takes its time."""
    calls: list[bytes] = []

    def answer(request: bytes, _: object) -> bytes:
        calls.append(request)
        return reply(VECTOR)

    with grpc_server(answer) as target:
        client = opened(target)
        assert client.vectors("way", 8, 1) == [VECTOR]
        sample = client.measure("way", connections, 8, 0.02, 0.3)
    assert 0 < sample["requests"] < sample["exchanges"]
    assert sample["exchanges"] + 1 + min(connections, 4) == len(calls)
    assert 0 < sample["p50_ms"] <= sample["p99_ms"]
    assert sample["client_cpu_us"] > 0


def refuse(context: Any) -> bytes:
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")
    return b""


@pytest.mark.parametrize("connections", [1, 6])
@pytest.mark.parametrize(
    ("fail", "sentence"), [(refuse, "too much"), (lambda _: reply(VECTOR[:3]), "wrong gRPC reply")]
)
def test_a_failing_call_stops_the_measurement(connections: int, fail: Callable[[Any], bytes], sentence: str) -> None:
    """An error or a wrong reply in the middle of a run is reported, with what the server said."""
    calls: list[bytes] = []

    def answer(request: bytes, context: Any) -> bytes:
        calls.append(request)
        return reply(VECTOR) if len(calls) <= 20 else fail(context)

    with grpc_server(answer) as target, pytest.raises(BenchError, match=sentence):
        opened(target).measure("way", connections, 8, 0.0, 5.0)
