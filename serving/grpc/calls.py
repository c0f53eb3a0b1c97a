"""A call of gRPC on a stream of HTTP/2: its metadata, its deadline, its replies and its status."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from serving.errors import BertserveError, BodyTooLarge, SlowRequest
from serving.grpc.connection import StreamHandler
from serving.grpc.h2 import encode_fields
from serving.grpc.status import OK_TRAILERS, REPLY_HEADERS, error_trailers
from serving.net.requests import request_id

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from google.protobuf.message import Message

    from serving.grpc.connection import GrpcConnection
    from serving.grpc.h2 import Stream
    from serving.net.observer import RequestObserver
    from serving.net.requests import RecordError
    from serving.records import RequestTrace
    from serving.security.keys import ApiKeys
    from serving.settings import Settings

_PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""

PREFIX_BYTES = _PREFIX.size

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True, frozen=True)
class Method:
    """A method of a service.

    Attributes:
        kind: The message that it takes.
        unary: From the message and its call to the reply; or
        streaming: to several, one after another; or
        duplex: from each message of a stream, the call of all of them and the message's trace, to its reply.
        open: Whether it needs no API key where the server has some.
    """

    kind: type[Message]
    unary: Callable[[Any, Any], Awaitable[Message]] | None = None
    streaming: Callable[[Any, Any], AsyncIterator[Message]] | None = None
    duplex: Callable[[Any, Any, RequestTrace | None], Awaitable[Message]] | None = None
    open: bool = False


@dataclass(slots=True, frozen=True)
class CallHead:
    """What the headers of a call say.

    Attributes:
        method: What is called.
        body_limit: Bytes that a message may have.
        timeout_s: How long the client waits.
        metadata: All fields; of those that come twice, the first.
    """

    method: Method
    body_limit: int
    timeout_s: float | None
    metadata: Mapping[bytes, bytes]


@dataclass(slots=True, frozen=True)
class CallEnvironment:
    """What the calls of one port share.

    Attributes:
        settings: Limits.
        record_error: Counts and logs an error.
        keys: What all but the open methods need one of.
        observer: Traces requests; None where nothing reads the traces.
    """

    settings: Settings
    record_error: RecordError
    keys: ApiKeys | None
    observer: RequestObserver | None


class Call(StreamHandler):
    """One call, as its method and the boundary see it.

    Attributes:
        head: What its headers say.
        environment: What it shares with the other calls of its port.
        trace: What is noted of its only message for the access log and for spans; None where both are off.
    """

    __slots__ = ("_deadline", "_headed", "_taken", "_trailing", "environment", "head", "trace")

    def __init__(
        self, connection: GrpcConnection, stream: Stream, head: CallHead, environment: CallEnvironment
    ) -> None:
        super().__init__(connection, stream)
        self.head = head
        self.environment = environment
        timeout_s = head.timeout_s
        self._deadline = None if timeout_s is None else connection.loop.time() + timeout_s
        self._trailing: Metadata = ()
        self._taken: asyncio.Future[None] | None = None
        self._headed = False
        self.trace: RequestTrace | None = None

    # What methods use.

    def time_remaining(self) -> float | None:
        """Seconds until the client stops waiting, below zero once it has; None if it waits for ever."""
        return None if self._deadline is None else self._deadline - self.connection.loop.time()

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Sends metadata behind the reply."""
        self._trailing = metadata

    def metadata(self, name: bytes) -> bytes | None:
        """A field of the request's headers."""
        return self.head.metadata.get(name)

    def record(self, error: BertserveError, message_id: str = "", trace: RequestTrace | None = None) -> None:
        """Counts an error that does not end the call, of the message that has this id and this trace."""
        self._record(error, self.request_id(message_id), trace)

    def request_id(self, message_id: str = "") -> str:
        """The id in logs: from the call's metadata, else from its message, else one of the server's."""
        return request_id(self.metadata(b"x-request-id") or message_id.encode("utf-8", "replace"))

    # What the boundary uses.

    def reply(self, message: bytes | None, trailers: bytes | None = None) -> None:
        """Sends a message, the end of the call, or both."""
        headers = None if self._headed else REPLY_HEADERS
        self._headed = True
        self.send(headers, b"" if message is None else _PREFIX.pack(0, len(message)) + message, trailers)

    async def reply_one(self, message: bytes) -> None:
        """Sends one message of several; waits until the client takes it."""
        self.reply(message)
        if self.stream.unsent is not None:
            self._taken = self.connection.loop.create_future()
            await self._taken

    def finish(self, message: bytes | None = None) -> None:
        """Ends the call well, with its message if it has not been sent."""
        self.reply(message, OK_TRAILERS + encode_fields(self._trailing) if self._trailing else OK_TRAILERS)

    def refuse(self, error: BertserveError, request_id: str = "") -> None:
        """Ends the call with an error; `request_id` is for a request whose message had an id."""
        request_id = request_id or self.request_id()
        self._record(error, request_id, self.trace)
        trailers = error_trailers(error, request_id)
        self.send(None, b"", trailers if self._headed else REPLY_HEADERS + trailers)

    # What the connection calls.

    def sent(self) -> None:
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)

    def too_slow(self) -> None:
        limit_s = self.environment.settings.body_timeout_s
        self.refuse(SlowRequest(f"the call's message did not arrive within {limit_s:g} s"))

    def _record(self, error: BertserveError, request_id: str, trace: RequestTrace | None) -> None:
        self.environment.record_error(error, request_id)
        if trace is not None:
            trace.failed(error.reason, error.http_status, error.grpc_code)
            trace.request_id = request_id


def read_prefix(buffer: bytes | bytearray, limit: int) -> tuple[int, int] | None:
    """Whether the message at the start of a buffer is compressed, and where it ends; None while that is unknown.

    Raises:
        BodyTooLarge: The message has more bytes than `limit`.
    """
    if len(buffer) < PREFIX_BYTES:
        return None
    compressed, size = _PREFIX.unpack_from(buffer)
    if size > limit:
        raise BodyTooLarge(f"the message has {size} bytes; at most {limit} are read")
    return compressed, PREFIX_BYTES + size
