"""A call of gRPC on a stream of HTTP/2: its message, its metadata, its deadline, its status (PROTOCOL-HTTP2.md).

A call takes one message and answers one or several. It is handed to its method once the message and the end of
the client's half have arrived.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from serving.errors import BertserveError, BodyTooLarge, ClientGone, MalformedRequest, SlowRequest, UnsupportedMediaType
from serving.grpc.details import retry_details
from serving.grpc.guard import answer
from serving.grpc.h2.headers import block, status_field
from serving.grpc.h2.streams import Stream
from serving.net.requests import request_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from google.protobuf.message import Message

    from serving.grpc.h2.connection import Http2Connection
    from serving.grpc.port import Port
    from serving.records import RequestTrace

_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
STATUS = {name: number for number, name in enumerate(_NAMES)}
"""gRPC's status codes."""

PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""

OK_STATUS = 200
CONTENT_TYPE = block([("content-type", "application/grpc")])
HEAD = status_field(OK_STATUS) + CONTENT_TYPE
_OK = block([("grpc-status", "0")])
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MESSAGE_CHARACTERS = 2000

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
class Head:
    """What the headers of a call say.

    Attributes:
        method: What is called.
        body_limit: Bytes that a message may have.
        timeout_s: How long the client waits.
        fields: All of them; of those that come twice, the first.
    """

    method: Method
    body_limit: int
    timeout_s: float | None = None
    fields: Mapping[bytes, bytes] = field(default_factory=dict)


class Call(Stream):
    """One call, as its method and the guard see it.

    Attributes:
        trace: What is noted of it for the access log and for spans; None where both are off.
    """

    __slots__ = (
        *("_body", "_connection", "_deadline", "_head", "_headed", "_method", "_port", "_task", "_trailing"),
        "trace",
    )

    def __init__(self, port: Port, connection: Http2Connection, number: int, head: Head) -> None:
        super().__init__(number)
        self._port = port
        self._connection = connection
        self._method = head.method
        self._head = head
        timeout_s = head.timeout_s
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._body: bytearray | None = None
        self._task: asyncio.Task[None] | None = None
        self._trailing: Metadata = ()
        self._headed = False
        self.trace: RequestTrace | None = None

    # What methods use.

    def time_remaining(self) -> float | None:
        """Seconds until the client stops waiting, below zero once it has; None if it waits for ever."""
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """What goes behind the reply."""
        self._trailing = metadata

    def metadata(self, name: bytes) -> bytes | None:
        """A field of the request's headers."""
        return self._head.fields.get(name)

    def record(self, error: BertserveError, given: str = "", trace: RequestTrace | None = None) -> None:
        """Counts an error that does not end the call, of the message that has this id and this trace."""
        identity = self.identity(given)
        self._port.record_error(error, identity)
        _note_error(trace, error, identity)

    def identity(self, given: str = "") -> str:
        """What a request is called in the log: by the call's metadata, by its own message, or by us."""
        return request_id(self.metadata(b"x-request-id") or given.encode("utf-8", "replace"))

    # What the guard uses.

    @property
    def body_limit(self) -> int:
        """Bytes that a message may have."""
        return self._head.body_limit

    async def send(self, message: bytes) -> None:
        """Sends one message of several; waits until the client takes it."""
        self._send(message, None)
        await self._connection.taken(self)

    def finish(self, message: bytes | None = None) -> None:
        """Ends the call well, with its message if it has not been sent."""
        self._send(message, _OK + block(self._trailing) if self._trailing else _OK)

    def refuse(self, error: BertserveError, identity: str = "") -> None:
        """Ends the call with an error; `identity` is what its request is called, where its message said so."""
        identity = identity or self.identity()
        self._port.record_error(error, identity)
        _note_error(self.trace, error, identity)
        refusal = trailers_of(error, identity)
        self._connection.refuse(self, refusal if self._headed else HEAD + refusal)

    # What the connection calls.

    def received(self, data: bytes) -> None:
        """Collects the message; starts its method once all is there."""
        if self._body is not None:
            self._body += data
        size = len(data if self._body is None else self._body)
        compressed = 0
        if size < PREFIX.size:
            length = None
        else:
            compressed, length = PREFIX.unpack_from(data if self._body is None else self._body)
            limit = self._head.body_limit
            if length > limit:
                self.refuse(BodyTooLarge(f"the message has {length} bytes; at most {limit} are read"))
                return
            size -= PREFIX.size
        if length is not None and size > length:
            self.refuse(MalformedRequest("more than one message"))
        elif not self.ended:
            if self._body is None:
                self._body = bytearray(data)
            missing = 0 if length is None else length - size - self.receivable
            if missing > 0:
                self._connection.want(self, missing)
        elif size != length:
            self.refuse(MalformedRequest("the call ends before its message does"))
        else:
            message = data[PREFIX.size :] if self._body is None else bytes(self._body[PREFIX.size :])
            self._body = None
            encoding = self._encoding if compressed else b""
            work = answer(self._method, message, self, encoding, self._port.observer)
            self._task = asyncio.get_running_loop().create_task(work)

    def lost(self) -> None:
        """Ends the method: nobody waits for it."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self.record(ClientGone("the client cancelled the call"), trace=self.trace)

    def too_slow(self) -> None:
        """Refuses a message that does not arrive."""
        limit_s = self._port.settings.body_timeout_s
        self.refuse(SlowRequest(f"the call's message did not arrive within {limit_s:g} s"))

    @property
    def _encoding(self) -> bytes:
        """What compressed messages are compressed with."""
        return self.metadata(b"grpc-encoding") or b"identity"

    def _send(self, message: bytes | None, trailers: bytes | None) -> None:
        data = b"" if message is None else PREFIX.pack(0, len(message)) + message
        headed, self._headed = self._headed, True
        self._connection.reply(self, None if headed else HEAD, data, trailers)


def _note_error(trace: RequestTrace | None, error: BertserveError, identity: str) -> None:
    if trace is not None:
        trace.failed(error.reason, error.http_status, error.grpc_code)
        trace.request_id = identity


def trailers_of(error: BertserveError, identity: str) -> bytes:
    """The trailers of an error, of the request called `identity`."""
    fields = [
        ("grpc-status", str(STATUS[error.grpc_code])),
        ("grpc-message", quote(error.message[:_MESSAGE_CHARACTERS], safe=_PLAIN)),
        ("bertserve-reason", error.reason),
        ("x-request-id", identity),
    ]
    if (after_ms := error.retry_after_ms) is not None:
        details = retry_details(STATUS[error.grpc_code], error.message, after_ms)
        fields += [("retry-after-ms", str(after_ms)), ("grpc-status-details-bin", details)]
    if isinstance(error, UnsupportedMediaType):
        fields.append(("grpc-accept-encoding", "identity,deflate,gzip"))
    return block(fields)
