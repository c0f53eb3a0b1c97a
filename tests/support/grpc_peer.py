"""A server's gRPC connection without a network, and the client's view of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from google.protobuf.wrappers_pb2 import BytesValue

from bertserve.loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, prefixed
from bertserve.serving.errors import Overloaded
from bertserve.serving.grpc.calls import Method
from bertserve.serving.grpc.connection import GrpcConnection
from bertserve.serving.grpc.dispatch import CallDispatch
from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.settings import Settings
from tests.support.http2 import Replies, Reply, request_fields, split
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hpack import Encoder
    from hyperframe.frame import Frame

    from bertserve.serving.errors import BertserveError
    from bertserve.serving.grpc.calls import Call


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.buffered = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The end of what is written."""

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        """Everything is taken at once, unless a test says otherwise."""
        return self.buffered

    def pause_reading(self) -> None:
        """Not asked for here."""

    resume_reading = pause_reading


async def echo(request: BytesValue, call: Call, _: object = None) -> BytesValue:
    """Answers what it is asked, with the deadline behind it."""
    remaining_ms = call.timeout_ms()
    call.set_trailing_metadata((("x-deadline", "" if remaining_ms is None else f"{remaining_ms / 1e3:.0f}"),))
    if request.value == b"refuse":
        raise Overloaded("too much: 100% — ünd\n", retry_after_s=1.5)
    if request.value == b"large":
        return BytesValue(value=bytes(15_000))
    if request.value == b"huge":
        return BytesValue(value=bytes(3 << 20))
    if request.value.startswith(b"wait"):
        await asyncio.get_running_loop().create_future()
    if request.value == b"fail":
        raise RuntimeError("a secret")
    return request


async def watch(request: BytesValue, _: Call) -> AsyncIterator[BytesValue]:
    """Answers what it is asked, and never ends."""
    yield request
    await asyncio.get_running_loop().create_future()


class Peer:
    """A server's connection and the client's view of it; made inside an event loop."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.errors: list[BertserveError] = []
        methods = {
            "/echo": Method(BytesValue, unary=echo),
            "/talk": Method(BytesValue, duplex=echo),
            "/watch": Method(BytesValue, streaming=watch),
        }
        settings = settings or Settings()
        self.budget = BufferBudget.of(settings)
        self.calls = CallDispatch(methods, settings, lambda error, *_: self.errors.append(error), self.budget)
        self.connection = GrpcConnection(self.calls)
        self.wire = Wire()
        self.connection.connection_made(self.wire)

    async def say(self, *parts: bytes) -> None:
        """Hands bytes to the connection, and lets it work."""
        for part in parts:
            self.connection.data_received(part)
        for _ in range(5):
            await asyncio.sleep(0)

    async def inflated(self, *parts: bytes) -> None:
        """The same where a thread has to work."""
        await self.say(*parts)
        await until(lambda: b"grpc-status" in self.wire.written, "the end of the call")

    def frames(self) -> list[Frame]:
        return split(self.wire.written)

    def replies(self) -> dict[int, Reply]:
        replies = Replies()
        for arrived in self.frames():
            if arrived.stream_id:
                replies.take(arrived)
        return replies.streams


def said(value: bytes) -> bytes:
    """A message of a method, as it is framed."""
    return prefixed(BytesValue(value=value).SerializeToString())


def call(encoder: Encoder, stream: int, value: bytes, **changes: str | None) -> bytes:
    """A call of `echo`."""
    fields = encoder.encode(request_fields("/echo", **changes))
    data = said(value)
    return frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, END_STREAM, stream, data)


def talk(encoder: Encoder, stream: int, *values: bytes, flags: int = 0) -> bytes:
    fields = encoder.encode(request_fields("/talk"))
    data = b"".join(said(value) for value in values)
    return frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, flags, stream, data)
