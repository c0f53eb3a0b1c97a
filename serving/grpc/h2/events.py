"""What a connection tells its caller. The garbage collector does not follow events: they are dropped at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from serving.grpc.h2.frames import ErrorCode
    from serving.grpc.h2.headers import Headers
    from serving.grpc.h2.streams import Stream


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
