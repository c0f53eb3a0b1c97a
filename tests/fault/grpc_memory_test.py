"""Large messages of calls that are refused, cancelled or lost: resident memory is afterwards what it was."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import pytest
from h2.errors import ErrorCodes
from hyperframe.frame import WindowUpdateFrame
from tritonclient.grpc import service_pb2 as pb

from loadtest.benchmarks.processes import resident_bytes
from loadtest.generator import frames as wire
from loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, prefixed, reset
from tests.support.clients import MODEL_INFER, bytes_tensor, metric
from tests.support.http2 import RawHttp2, request_fields
from tests.support.models import NAME
from tests.support.server import FAKE, Server
from tests.support.short_form import in_short
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZE = 2 << 20
CALLS, WARM_UP = 32, 10
ALLOWED = SIZE // 4
"""Of each message; the rest is what allocators keep."""

FRAME_BYTES = 16_384
FIRST_WINDOW = 65_535
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    """A server whose batches take long enough to leave while they run, with all that observes requests."""
    with Server(models, *FAKE, "--fake-ms", "100", "--access-log", "true", "--log-level", "error") as running:
        yield running


def request(text: str = "small", model: str = NAME, padding: int = SIZE) -> bytes:
    """A request of so many bytes more than it needs, whose text may not be cut."""
    message = pb.ModelInferRequest(model_name=model)
    message.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
    message.raw_input_contents.append(bytes_tensor([text]))
    message.parameters["padding"].string_param = "x" * padding
    message.parameters["truncate"].bool_param = False
    return message.SerializeToString()


def tensor(name: str, datatype: str, shape: list[int], **contents: list[int]) -> bytes:
    """A request with one tensor; without contents it is a blob of empty texts."""
    message = pb.ModelInferRequest(model_name=NAME)
    added = message.inputs.add(name=name, datatype=datatype, shape=shape)
    for field, values in contents.items():
        getattr(added.contents, field).extend(values)
    if not contents:
        message.raw_input_contents.append(bytes(SIZE))
    return message.SerializeToString()


GOOD = request()
RESET = ErrorCodes.CANCEL.to_bytes(4, "big")


class Client(RawHttp2):
    stream = -1
    window = 0

    def upload(self, message: bytes, path: str = MODEL_INFER, *, flags: int = END_STREAM, **fields: str) -> int:
        """Begins a call with a large message, as far as the server lets it; returns its stream."""
        self.stream += 2
        self.window = FIRST_WINDOW
        errors = [("triton_grpc_error", fields.pop("errors"))] if "errors" in fields else []
        self.send(frame(HEADERS, END_HEADERS, self.stream, self.block(request_fields(path, **fields) + errors)))
        self.message(message, flags=flags, compressed="grpc_encoding" in fields)
        return self.stream

    def message(self, message: bytes, *, flags: int, compressed: bool = False) -> None:
        """A message of the last call, or as much as is taken of it before the call is refused."""
        rest = memoryview(prefixed(message, compressed=compressed))
        while rest:
            while not self.window:
                if self._is_over():
                    return
                self._await_window()
            part, rest = rest[: min(FRAME_BYTES, self.window)], rest[min(FRAME_BYTES, self.window) :]
            self.window -= len(part)
            self.send(frame(DATA, 0 if rest else flags, self.stream, bytes(part)))

    def _await_window(self) -> None:
        for arrived in self.frames():
            self.replies.take(arrived)
            if isinstance(arrived, WindowUpdateFrame) and arrived.stream_id == self.stream:
                self.window += arrived.window_increment
                return
            if self._is_over():
                return

    def _is_over(self) -> bool:
        reply = self.replies.streams.get(self.stream)
        return reply is not None and reply.ended


def refused(message: bytes, status: int, path: str = MODEL_INFER, **fields: str) -> Callable[[Server, int], None]:
    def run(server: Server, count: int) -> None:
        with Client(server.grpc) as client:
            for _ in range(count):
                assert client.reply(client.upload(message, path, **fields)).status == status

    return run


def begin(server: Server, client: Client, path: str) -> int:
    """A call of which the server has everything; returns its stream."""
    before = metric(server, "bertserve_admitted_tokens")
    stream = client.upload(GOOD, path, flags=END_STREAM if path == MODEL_INFER else 0)
    wait_for(lambda: metric(server, "bertserve_admitted_tokens") > before, "the call to be admitted")
    return stream


def cancelled(path: str) -> Callable[[Server, int], None]:
    """Calls that are given up while they are computed."""

    def run(server: Server, count: int) -> None:
        with Client(server.grpc) as client:
            for _ in range(count):
                client.send(frame(wire.RST_STREAM, 0, begin(server, client, path), RESET))
                wait_for(lambda: metric(server, "bertserve_admitted_tokens") == 0, "the call to be forgotten")

    return run


def lost(path: str) -> Callable[[Server, int], None]:
    """Calls whose connections go while they are computed."""

    def run(server: Server, count: int) -> None:
        for _ in range(count):
            with Client(server.grpc) as client:
                begin(server, client, path)
            wait_for(lambda: metric(server, "bertserve_admitted_tokens") == 0, "the call to be forgotten")

    return run


def half(server: Server, count: int) -> None:
    """Calls that are given up before their message is whole."""
    with Client(server.grpc) as client:
        for _ in range(count):
            client.upload(GOOD, flags=0)
            client.send(reset(client.stream))


def several(server: Server, count: int) -> None:
    """Streams that a refusal ends while other messages of theirs are there."""
    message = request(model="nobody")
    with Client(server.grpc) as client:
        for _ in range(count // 4):
            client.upload(GOOD, STREAM_INFER, flags=0, errors="true")
            for _ in range(3):
                client.message(message, flags=0)
            assert client.reply(client.stream).status == 5


def told(server: Server, count: int) -> None:
    """Messages of one stream, each refused in a message."""
    message = request(model="nobody")
    with Client(server.grpc) as client:
        client.upload(message, STREAM_INFER, flags=0)
        for _ in range(count - 1):
            client.message(message, flags=0)
        client.send(frame(DATA, END_STREAM, client.stream))
        assert client.reply(client.stream).status == 0


WAYS: dict[str, Callable[[], Callable[[Server, int], None]]] = {
    "an unknown model": lambda: refused(request(model="nobody"), 5),
    "no message": lambda: refused(b"\xff" * SIZE, 3),
    "many tensors": lambda: refused(b"\x2a\0" * (SIZE // 2), 3),
    "many outputs": lambda: refused(b"\x32\0" * (SIZE // 2), 3),
    "many parameters": lambda: refused(b"".join(b"\x22\x06\x0a\x04%04x" % number for number in range(1 << 16)) * 4, 3),
    "many texts": lambda: refused(tensor("text", "BYTES", [SIZE // 4, 1]), 3),
    "many numbers": lambda: refused(tensor("input_ids", "INT32", [1, SIZE - 99], int_contents=[5] * (SIZE - 99)), 3),
    "many rows": lambda: refused(tensor("input_ids", "INT64", [SIZE // 8, 1], int64_contents=[5] * (SIZE // 8)), 3),
    "many dimensions": lambda: refused(tensor("input_ids", "INT64", [5] * (SIZE // 2), int64_contents=[5]), 3),
    "too many characters": lambda: refused(request("x" * SIZE, padding=0), 3),
    "too late": lambda: refused(GOOD, 4, grpc_timeout="1u"),
    "too late to be computed": lambda: refused(GOOD, 4, grpc_timeout="30m"),
    "inflated and refused": lambda: refused(gzip.compress(request(model="nobody")), 5, grpc_encoding="gzip"),
    "inflated beyond the limit": lambda: refused(gzip.compress(request(padding=3 * SIZE)), 8, grpc_encoding="gzip"),
    "stream, refused": lambda: refused(request(model="nobody"), 5, STREAM_INFER, errors="true"),
    "stream, refused among others": lambda: several,
    "stream, told": lambda: told,
    "cancelled": lambda: cancelled(MODEL_INFER),
    "stream, cancelled": lambda: cancelled(STREAM_INFER),
    "lost": lambda: lost(MODEL_INFER),
    "stream, lost": lambda: lost(STREAM_INFER),
    "half a message": lambda: half,
}
"""How each is made: of all together the messages are large, and most processes run none of these tests."""

SHORT = ("no message", "many rows", "too late", "inflated and refused", "stream, refused", "cancelled", "lost")
"""One of each kind: unread, read, queued, inflated, of a stream, given up and cut off."""


@pytest.mark.parametrize("way", in_short(WAYS, *SHORT))
def test_large_messages_leave_nothing(server: Server, way: str) -> None:
    """However their calls end. What leaks grows each time; the allocator may once keep more than before."""
    call = WAYS[way]()
    call(server, WARM_UP)

    def growth() -> int:
        before = resident_bytes(server.pid)
        call(server, CALLS)
        return resident_bytes(server.pid) - before

    assert growth() < CALLS * ALLOWED or growth() < CALLS * ALLOWED
