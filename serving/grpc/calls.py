"""A gRPC call on an HTTP/2 stream: its metadata, deadline, replies and status."""

from __future__ import annotations

import asyncio
import struct
import time
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.errors import (
    BertserveError,
    BodyTooLarge,
    BuffersFull,
    DeadlineExceeded,
    InvalidCompression,
    MethodNotAllowed,
    SlowRequest,
    UnsupportedMediaType,
    setting_of,
)
from bertserve.serving.grpc.h2 import ErrorCode, encode_fields
from bertserve.serving.grpc.status import OK_TRAILERS, REPLY_HEADERS, error_trailers, reply_headers
from bertserve.serving.inference.requests import RequestTrace
from bertserve.serving.net.lingering_close import SendProgress
from bertserve.serving.net.requests import request_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from google.protobuf.message import Message

    from bertserve.serving.grpc.connection import GrpcConnection
    from bertserve.serving.grpc.h2 import Stream
    from bertserve.serving.inference.requests import InferRequest
    from bertserve.serving.tasks.base import A

_PREFIX = struct.Struct(">BI")
"""Precedes each message: the compressed flag and the length."""

PREFIX_BYTES = _PREFIX.size

UNCOUNTED_BYTES = 4096
"""Size in bytes up to which a message that arrives at once is not counted in the buffer budget."""

Metadata = tuple[tuple[str, str], ...]


class Method(msgspec.Struct, frozen=True, eq=False):
    """A method of a service: one of the first three attributes is set.

    Attributes:
        unary: Takes a message and its call; returns the reply.
        streaming: Takes a message and its call; yields several replies.
        duplex: Takes each message of a stream, the call and the message's trace; returns its reply.
        open: Whether it needs no API key even if the server has keys.
        of_core: Whether only the core process can answer it.
    """

    kind: type[Message]
    unary: Callable[[Any, Any], Awaitable[Message]] | None = None
    streaming: Callable[[Any, Any], AsyncIterator[Message]] | None = None
    duplex: Callable[[Any, Any, RequestTrace | None], Awaitable[Message]] | None = None
    open: bool = False
    of_core: bool = False


class CallHead(msgspec.Struct, frozen=True, eq=False):
    """The headers of a call, decoded.

    It is cached for later calls with the same headers, so no call may change it.

    Attributes:
        route: The method's path; `?` if there is no such method.
        body_limit: Maximum size of a message in bytes.
        timeout_s: How long the client waits; None if it sets no timeout.
        metadata: All fields. Repeated ones are joined, see `serving.net.requests.gathered`.
        error: The error with which such calls are refused, whatever their messages.
    """

    method: Method
    route: str
    body_limit: int
    timeout_s: float | None
    metadata: Mapping[bytes, bytes]
    error: BertserveError | None = None


class Call(msgspec.Struct, eq=False):
    """One call, as its connection, its method and the boundary see it.

    Attributes:
        deadline: On the loop's clock; None if there is none.
        idle: Whether the client is between two messages, so that the server does not wait for data.
        trace: The trace of its only message; None if there is no observer.
    """

    connection: GrpcConnection
    stream: Stream
    head: CallHead
    deadline: float | None = None
    idle: bool = False
    trace: RequestTrace | None = None
    _trailing: Metadata = ()
    _headed: bool = False
    _taken: asyncio.Future[None] | None = None
    _sending: SendProgress | None = None
    _waited_s: float = 0.0

    _trailers: bytes | None = None
    _held: int = 0
    _bytes_out: int = 0

    # Used by methods.

    def timeout_ms(self) -> float | None:
        """Milliseconds until the deadline, always above 0; None if there is none."""
        return None if self.deadline is None else max(self.deadline - self.connection.loop.time(), 1e-6) * 1e3

    def stamp(
        self, request: InferRequest[A], arrival: float, trace: RequestTrace | None = None, message_id: str = ""
    ) -> InferRequest[A]:
        """Adds the arrival time, id, trace and remaining time to a request."""
        return request.stamp(arrival, message_id, trace or self.trace, self.timeout_ms())

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def metadata(self, name: bytes) -> bytes | None:
        return self.head.metadata.get(name)

    def record(self, error: BertserveError, message_id: str = "", trace: RequestTrace | None = None) -> None:
        """Counts an error of one message, with its id and trace, that does not end the call."""
        request_id = self.request_id(message_id)
        self.connection.port.record_error(error, request_id, "grpc", trace.model if trace else "")
        if trace is not None:
            trace.failed(error.reason, error.http_status, error.grpc_code)
            trace.request_id = request_id

    def request_id(self, message_id: str = "") -> str:
        """The id in logs: from the call's metadata, else from its message, else generated by the server."""
        return request_id(self.metadata(b"x-request-id") or message_id.encode("utf-8", "replace"))

    # Used by the boundary.

    def reply(self, message: bytes | None, trailers: bytes | None = None) -> None:
        """Sends a message, the end of the call, or both. Every reply goes through here.

        Raises:
            BuffersFull: The client does not read, and there is no room for the data. The stream is reset.
        """
        connection, stream = self.connection, self.stream
        headers = None if self._headed else REPLY_HEADERS
        data = b""
        if message is not None:
            data = _PREFIX.pack(0, len(message)) + message
            self._bytes_out += len(message)
        self._headed = True
        connection.h2.send(stream, headers, data, trailers)
        if stream.unsent is not None:
            self._wait_for_window()
        elif self._held and trailers is not None:
            self._hold(0)
        connection.flush()

    async def reply_all(self, messages: AsyncIterator[Message]) -> None:
        """Sends messages, each after the client has taken the previous one, and ends the call."""
        try:
            async with asyncio.timeout_at(self.deadline):
                async for message in messages:
                    self.reply(message.SerializeToString())
                    if self.stream.unsent is not None:
                        self._taken = self.connection.loop.create_future()
                        await self._taken
        except TimeoutError:
            raise DeadlineExceeded("the call's deadline has passed") from None
        self.finish()

    def finish(self, message: bytes | None = None) -> None:
        """Ends the call with status OK, after its message if there is one left to send."""
        self.reply(message, OK_TRAILERS + encode_fields(self._trailing) if self._trailing else OK_TRAILERS)
        self.tell(self.trace, self._bytes_out)

    def refuse(self, error: BertserveError, request_id: str = "", trace: RequestTrace | None = None) -> None:
        """Ends the call with an error. A request that is not a gRPC call also gets an HTTP status."""
        request_id = request_id or self.request_id()
        trailers = error_trailers(error, request_id)
        if not self._headed:
            no_call = error is self.head.error and isinstance(error, UnsupportedMediaType | MethodNotAllowed)
            trailers = (reply_headers(error.http_status) if no_call else REPLY_HEADERS) + trailers
            self._headed = True
        self.reply(None, trailers)
        trace = trace or self.trace or self.begin_trace(0)
        self.connection.port.record_error(error, request_id, "grpc", trace.model if trace else "")
        if trace is not None:
            trace.request_id = request_id
            self.tell(trace, 0, error)

    def abandon(self) -> None:
        """Resets the stream of a call to which not even an error could be sent."""
        stream = self.stream
        self.connection.h2.reset(stream, ErrorCode.INTERNAL_ERROR)
        stream.context = None
        self.lost()
        self.connection.flush()

    def begin_trace(self, size: int) -> RequestTrace | None:
        """Starts the trace of messages with a total size in bytes; None if there is no observer."""
        observer = self.connection.port.observer
        if observer is None:
            return None
        if not observer.detailed:
            return RequestTrace("grpc", "POST", self.head.route, "", 0.0)
        trace = RequestTrace(
            *("grpc", "POST", self.head.route, self.request_id(), time.perf_counter(), size),
            traceparent=self.metadata(b"traceparent"),
            tracestate=self.metadata(b"tracestate"),
        )
        trace.status = "OK"
        return trace

    def tell(self, trace: RequestTrace | None, size: int, error: BertserveError | None = None) -> None:
        """Ends a trace, at most once. `size` is that of the reply in bytes, 0 if there is none."""
        observer = self.connection.port.observer
        if observer is None or trace is None or trace.ended:
            return
        if error is not None:
            trace.failed(error.reason, error.http_status, error.grpc_code)
        trace.bytes_out = size
        observer.end(trace)

    def grow(self, size: int) -> bool:
        """Counts more bytes of a message in progress. Returns whether there is room for them."""
        return self._hold(self._held + size)

    def _kept(self) -> int:
        """Bytes that the call holds now, without messages in progress."""
        return 0 if self.stream.unsent is None else len(self.stream.unsent)

    def _hold(self, size: int, *, is_made: bool = False) -> bool:
        """Sets the number of bytes that the call holds. Returns False and changes nothing if there is no room.

        A reply that `is_made` may be larger than the connection's share if the connection holds nothing else.
        """
        share, more = self.connection.share, size - self._held
        if more < 0:
            share.give(-more)
        elif not (share.take_made(more) if is_made and share.held <= self._held else share.take(more)):
            return False
        self._held = size
        return True

    # Called by the connection (`StreamHandler`).

    def lost(self) -> None:
        if self._held:
            self._hold(0)

    def draining(self) -> None:
        pass

    def keys_changed(self) -> None:
        pass

    def sent(self) -> None:
        self._hold(self._kept())
        if self._trailers is not None:
            self.connection.h2.send(self.stream, None, b"", self._trailers)
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)

    def tick(self, seconds: float) -> None:
        stream, limit_s = self.stream, self.connection.port.body_timeout_s
        if stream.closed:
            return
        if stream.unsent is not None:
            if self._sending is not None and self._sending.wait(len(stream.unsent), seconds) > limit_s:
                self.connection.h2.reset(stream, ErrorCode.CANCEL)
                stream.context = None
                self.lost()
        elif not (stream.ended or stream.wanted or self.idle):  # otherwise it waits for its answer or a grant
            self._waited_s += seconds
            if self._waited_s > limit_s:
                self.refuse(SlowRequest(f"the call's message did not arrive within {limit_s:g} s"))

    def _wait_for_window(self) -> None:
        """Counts the held-back part of a reply, and keeps the trailers until `sent`.

        If the stream had its trailers already, HTTP/2 would end it without an event.
        """
        stream = self.stream
        self._trailers, stream.trailers = stream.trailers, None
        self._sending = SendProgress(len(stream.unsent or b""))
        if not self._hold(self._kept(), is_made=True):
            self.connection.h2.reset(stream, ErrorCode.ENHANCE_YOUR_CALM)  # gRPC's RESOURCE_EXHAUSTED
            stream.context = None
            self.connection.flush()
            raise BuffersFull


def read_prefix(buffer: bytes | bytearray, limit: int) -> tuple[int, int] | None:
    """The compressed flag and the end of the message at the start of a buffer; None if not enough has arrived."""
    if len(buffer) < PREFIX_BYTES:
        return None
    compressed, size = _PREFIX.unpack_from(buffer)
    if compressed > 1:
        raise InvalidCompression(f"the compressed flag of the message is {compressed}; it must be 0 or 1")
    if size > limit:
        raise BodyTooLarge(f"the message has {size} bytes; at most {limit} are read{setting_of(limit)}")
    return compressed, PREFIX_BYTES + size
