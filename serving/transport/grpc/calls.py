"""gRPC on HTTP/2's streams: messages, metadata, deadlines and statuses (gRPC's PROTOCOL-HTTP2.md).

A call takes one message and answers one or several. It is handed to its method once the message and the end of
the client's half have arrived. A conversation takes several and answers each with one, in their order.
"""

from __future__ import annotations

import asyncio
import re
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from serving.errors import (
    BertserveError,
    BodyTooLarge,
    ClientGone,
    HeadersTooLarge,
    MalformedRequest,
    MethodNotAllowed,
    NotReady,
    RouteNotFound,
    SlowRequest,
    UnsupportedMediaType,
)
from serving.transport.grpc.details import retry_details
from serving.transport.grpc.frames import Code, StreamFault
from serving.transport.grpc.guard import answer, answer_one
from serving.transport.grpc.headers import block, size_of, status_field
from serving.transport.grpc.streams import Stream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from google.protobuf.message import Message

    from serving.settings import Settings
    from serving.transport.grpc.headers import Fields
    from serving.transport.grpc.http2 import Http2Connection

_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
STATUS = {name: number for number, name in enumerate(_NAMES)}
"""gRPC's status codes."""

_PREFIX = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""

_MOST_ANSWERS = 64
"""Messages of one conversation that are worked on at a time; further ones wait where flow control holds them."""

_OK_STATUS = 200
_CONTENT_TYPE = block([("content-type", "application/grpc")])
_HEAD = status_field(_OK_STATUS) + _CONTENT_TYPE
_OK = block([("grpc-status", "0")])
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_MESSAGE_CHARACTERS = 2000

_CONTENT = re.compile(rb"application/grpc(\+proto)?( *;.*)?")
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb":?[!-9;-@[-~]+")  # no capitals
_BAD_VALUE = re.compile(rb"[\0\r\n]")
_PSEUDO = {b":method", b":scheme", b":path", b":authority"}

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True, frozen=True)
class Method:
    """A method of a service.

    Attributes:
        kind: The message that it takes.
        unary: From the message and its call to the reply; or
        streaming: to several, one after another; or
        duplex: from each message of a stream, and the call of all of them, to its reply.
    """

    kind: type[Message]
    unary: Callable[[Any, Any], Awaitable[Message]] | None = None
    streaming: Callable[[Any, Any], AsyncIterator[Message]] | None = None
    duplex: Callable[[Any, Any], Awaitable[Message]] | None = None


@dataclass(slots=True, frozen=True)
class Head:
    """What a request's headers say.

    Attributes:
        method: What is called, or why nothing is.
        timeout_s: How long the client waits.
        fields: All of them; of those that come twice, the first.
    """

    method: Method | BertserveError
    timeout_s: float | None = None
    fields: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Port:
    """What the calls of one port share.

    Attributes:
        methods: By path; an error in place of what is known and not offered.
        settings: Limits.
        record_error: Told of each error.
        connections: All that are open.
    """

    methods: Mapping[str, Method | BertserveError]
    settings: Settings
    record_error: Callable[[BertserveError], None]
    connections: set[Http2Connection] = field(default_factory=set)

    def open(self, connection: Http2Connection, number: int, head: Head) -> Stream:
        """A new call."""
        if isinstance(head.method, Method):
            kind = Conversation if head.method.duplex else Call
            return kind(self, connection, number, head.method, head)
        return _Refused(self, connection, number, head.method)

    def read_head(self, fields: Fields) -> Head:
        """What a request's fields say.

        Raises:
            StreamFault: They are malformed, as RFC 9113, 8.1.1 has it.
        """
        values = dict(reversed(fields))  # of fields that come twice, the first
        _check_fields(fields, values)
        try:
            return self._head(fields, values)
        except (HeadersTooLarge, MalformedRequest, MethodNotAllowed, RouteNotFound, UnsupportedMediaType) as error:
            return Head(error.with_traceback(None))

    def _head(self, fields: Fields, values: dict[bytes, bytes]) -> Head:
        settings = self.settings
        if size_of(fields) > settings.header_limit_bytes:
            raise HeadersTooLarge(f"the metadata exceeds {settings.header_limit_bytes} bytes")
        if len(fields) > settings.header_limit_count:
            raise HeadersTooLarge(f"more than {settings.header_limit_count} headers")
        if not _CONTENT.fullmatch(values.get(b"content-type", b"")):
            raise UnsupportedMediaType("the content-type must be application/grpc")
        if values[b":method"] != b"POST":
            raise MethodNotAllowed("calls are made with POST", allowed="POST")
        method = self.methods.get(values[b":path"].decode("latin-1"))
        if method is None:
            raise RouteNotFound("no such method")
        given = values.get(b"grpc-timeout")
        if given is None:
            return Head(method, None, values)
        match = _TIMEOUT.fullmatch(given)
        if match is None:
            raise MalformedRequest("grpc-timeout must be up to eight digits and one of H, M, S, m, u, n")
        return Head(method, int(match[1]) * _SECONDS[match[2]], values)


class Call(Stream):
    """One call, as its method and the guard see it."""

    __slots__ = ("_body", "_connection", "_deadline", "_head", "_headed", "_method", "_port", "_task", "_trailing")

    def __init__(self, port: Port, connection: Http2Connection, number: int, method: Method, head: Head) -> None:
        super().__init__(number)
        self._port = port
        self._connection = connection
        self._method = method
        self._head = head
        timeout_s = head.timeout_s
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._body: bytearray | None = None
        self._task: asyncio.Task[None] | None = None
        self._trailing: Metadata = ()
        self._headed = False

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

    def record(self, error: BertserveError) -> None:
        """Counts an error that does not end the call."""
        self._port.record_error(error)

    # What the guard uses.

    @property
    def body_limit(self) -> int:
        """Bytes that a message may have."""
        return self._port.settings.body_limit_bytes

    async def send(self, message: bytes) -> None:
        """Sends one message of several; waits until the client takes it."""
        self._send(message, None)
        await self._connection.taken(self)

    def finish(self, message: bytes | None = None) -> None:
        """Ends the call well, with its message if it has not been sent."""
        self._send(message, _OK + block(self._trailing) if self._trailing else _OK)

    def refuse(self, error: BertserveError) -> None:
        """Ends the call with an error."""
        self._port.record_error(error)
        self._connection.refuse(self, _refusal(error) if self._headed else _HEAD + _refusal(error))

    # What the connection calls.

    def received(self, data: bytes) -> None:
        """Collects the message; starts its method once all is there."""
        if self._body is not None:
            self._body += data
        size = len(data if self._body is None else self._body)
        compressed = 0
        if size < _PREFIX.size:
            length = None
        else:
            compressed, length = _PREFIX.unpack_from(data if self._body is None else self._body)
            if length > self._port.settings.body_limit_bytes:
                limit = self._port.settings.body_limit_bytes
                self.refuse(BodyTooLarge(f"the message has {length} bytes; at most {limit} are read"))
                return
            size -= _PREFIX.size
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
            message = data[_PREFIX.size :] if self._body is None else bytes(self._body[_PREFIX.size :])
            self._body = None
            work = answer(self._method, message, self, self._encoding if compressed else b"")
            self._task = asyncio.get_running_loop().create_task(work)

    def lost(self) -> None:
        """Ends the method: nobody waits for it."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._port.record_error(ClientGone("the client cancelled the call"))

    def too_slow(self) -> None:
        """Refuses a message that does not arrive."""
        limit_s = self._port.settings.body_timeout_s
        self.refuse(SlowRequest(f"the call's message did not arrive within {limit_s:g} s"))

    @property
    def _encoding(self) -> bytes:
        """What compressed messages are compressed with."""
        return self.metadata(b"grpc-encoding") or b"identity"

    def _send(self, message: bytes | None, trailers: bytes | None) -> None:
        data = b"" if message is None else _PREFIX.pack(0, len(message)) + message
        headed, self._headed = self._headed, True
        self._connection.reply(self, None if headed else _HEAD, data, trailers)


class Conversation(Call):
    """A call in which each message of the client's is answered by one, in their order."""

    __slots__ = ("_answers", "_buffer", "_draining", "_over")

    def __init__(self, port: Port, connection: Http2Connection, number: int, method: Method, head: Head) -> None:
        super().__init__(port, connection, number, method, head)
        self._buffer = bytearray()
        self._answers: deque[asyncio.Task[bytes | BertserveError]] = deque()
        self._draining = self._over = False
        self.idle = True

    def received(self, data: bytes) -> None:
        """Starts the messages that are there."""
        self._buffer += data
        self._advance()

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        """Nothing: what belongs to one message cannot go behind all of them."""

    def draining(self) -> None:
        """Ends once what has been started is answered."""
        self._draining = True
        self._advance()

    def lost(self) -> None:
        """Ends what has been started: nobody waits for it."""
        if self._answers:
            self._port.record_error(ClientGone("the client cancelled the call"))
        self._stop()

    def refuse(self, error: BertserveError) -> None:
        """Ends the call with an error."""
        self._stop()
        super().refuse(error)

    def _stop(self) -> None:
        self._over = True
        for answer_task in self._answers:
            answer_task.cancel()
        self._answers.clear()
        self._buffer.clear()

    def _advance(self, _: object = None) -> None:
        """Sends the answers that are next, starts the messages that are whole, ends what has ended."""
        if self._over:
            return
        try:
            self._send_answers()
            while not self._draining and len(self._answers) < _MOST_ANSWERS and (message := self._next()):
                compressed, data = message
                work = answer_one(self._method, data, self, self._encoding if compressed else b"")
                self._answers.append(asyncio.get_running_loop().create_task(work))
                self._answers[-1].add_done_callback(self._advance)
        except BertserveError as error:
            self.refuse(error)
            return
        self.idle = not self._buffer or len(self._answers) >= _MOST_ANSWERS
        if self._answers or self.unsent is not None:
            return
        if self._draining:
            self.refuse(NotReady("the server ends"))
        elif self.ended and self._buffer:
            self.refuse(MalformedRequest("the call ends before its message does"))
        elif self.ended:
            self._over = True
            self.finish()

    def _next(self) -> tuple[int, bytes] | None:
        """The next message, if it is whole: whether it is compressed, and what it holds."""
        if len(self._buffer) < _PREFIX.size:
            return None
        compressed, length = _PREFIX.unpack_from(self._buffer)
        if length > self.body_limit:
            raise BodyTooLarge(f"the message has {length} bytes; at most {self.body_limit} are read")
        missing = _PREFIX.size + length - len(self._buffer)
        if missing > 0:
            if missing > self.receivable and not self.ended:
                self._connection.want(self, missing - self.receivable)
            return None
        data = bytes(self._buffer[_PREFIX.size : _PREFIX.size + length])
        del self._buffer[: _PREFIX.size + length]
        self.waited_s = 0.0
        self._connection.renew(self, len(self._buffer))
        return compressed, data

    def _send_answers(self) -> None:
        while self._answers and self._answers[0].done() and self.unsent is None:
            found = self._answers.popleft().result()
            if isinstance(found, BertserveError):
                raise found
            self._send(found, None)
            if self.unsent is not None:
                # The client takes no more for now: when it does, the next one follows.
                self.taken = asyncio.get_running_loop().create_future()
                self.taken.add_done_callback(self._advance)


class _Refused(Stream):
    """A call whose headers are enough to refuse it."""

    __slots__ = ("_connection", "_error", "_port")

    def __init__(self, port: Port, connection: Http2Connection, number: int, error: BertserveError) -> None:
        super().__init__(number)
        self._port = port
        self._connection = connection
        self._error = error

    def opened(self) -> None:
        """Refuses; what is no call of gRPC at all also gets HTTP's status."""
        error = self._error
        self._port.record_error(error)
        status = error.http_status if isinstance(error, UnsupportedMediaType | MethodNotAllowed) else _OK_STATUS
        self._connection.refuse(self, status_field(status) + _CONTENT_TYPE + _refusal(error))


def _refusal(error: BertserveError) -> bytes:
    """The trailers of an error."""
    fields = [
        ("grpc-status", str(STATUS[error.grpc_code])),
        ("grpc-message", quote(error.message[:_MESSAGE_CHARACTERS], safe=_PLAIN)),
        ("bertserve-reason", error.reason),
    ]
    if (after_ms := error.retry_after_ms) is not None:
        details = retry_details(STATUS[error.grpc_code], error.message, after_ms)
        fields += [("retry-after-ms", str(after_ms)), ("grpc-status-details-bin", details)]
    if isinstance(error, UnsupportedMediaType):
        fields.append(("grpc-accept-encoding", "identity,deflate,gzip"))
    return block(fields)


def _check_fields(fields: Fields, values: dict[bytes, bytes]) -> None:
    """Checks a request's fields (RFC 9113, 8.2 and 8.3).

    Raises:
        StreamFault: They are malformed.
    """
    pseudo = [name for name, _ in fields if name.startswith(b":")]
    well = (
        len(set(pseudo)) == len(pseudo)
        and _PSEUDO.issuperset(pseudo)
        and values.keys() >= {b":method", b":scheme", b":path"}
        and all(name.startswith(b":") for name, _ in fields[: len(pseudo)])
        and _CONNECTION_FIELDS.isdisjoint(values)
        and all(_NAME.fullmatch(name) for name, _ in fields)
        and not any(_BAD_VALUE.search(value) for _, value in fields)
    )
    if not well:
        raise StreamFault(Code.PROTOCOL_ERROR)
