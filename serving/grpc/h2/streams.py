"""Streams, and the events that a connection reports of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from serving.grpc.h2.frames import DEFAULT_WINDOW

if TYPE_CHECKING:
    from serving.grpc.h2.frames import ErrorCode
    from serving.grpc.h2.headers import Headers


class Stream(msgspec.Struct, eq=False):
    """One stream. Its caller only reads it, but for `context`.

    Attributes:
        content_length: How long the peer said that the body would be.
        window: Bytes that the peer accepts.
        ended: Whether the peer has sent all it will send.
        work: What its request has cost, which its answer gives back.
        context: For the caller: whatever handles this stream; dropped when the reply has ended. An answer to a stream
            that nothing handles gives no credit back.
        closed: Whether it is over: answered to the end, or reset.
        delivered: Bytes of the body so far.
        receivable: Bytes that the peer may still send.
        wanted: Bytes that wait to be granted.
        granted: Bytes granted beyond the first window.
        unsent: Data that waits for the peer's window; None if there is none.
        trailers: The header block that follows it, if that ends the stream.
    """

    number: int
    content_length: int | None
    window: int
    ended: bool
    work: int
    closed: bool = False
    context: Any = None
    delivered: int = 0
    receivable: int = DEFAULT_WINDOW
    wanted: int = 0
    granted: int = 0
    unsent: memoryview | None = None
    trailers: bytes | None = None


# The garbage collector does not follow events: they are dropped at once.


class RequestReceived(msgspec.Struct, eq=False, gc=False):
    """The headers of a request; `ended` if it has no body."""

    stream: Stream
    headers: Headers
    ended: bool


class DataReceived(msgspec.Struct, eq=False, gc=False):
    """A part of the body; `ended` if it is the last, in which case it may be empty."""

    stream: Stream
    data: bytes
    ended: bool


class DataSent(msgspec.Struct, eq=False, gc=False):
    """The peer's window has taken all that was held back on a stream that is not at its end."""

    stream: Stream


class StreamReset(msgspec.Struct, eq=False, gc=False):
    """The peer gave a stream up, or broke a rule on it: nobody waits for an answer."""

    stream: Stream
    code: ErrorCode | int


class ConnectionFailed(msgspec.Struct, eq=False, gc=False):
    """The peer broke a rule, and the connection is over; a `StreamReset` of each open stream came before."""

    code: ErrorCode
    reason: str


Event = RequestReceived | DataReceived | DataSent | StreamReset | ConnectionFailed
