"""One stream, as a connection and its caller see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.grpc.h2.frames import DEFAULT_WINDOW

if TYPE_CHECKING:
    from serving.grpc.h2.headers import Headers


class Stream:
    """One stream. Its caller only reads it, but for `context`.

    Attributes:
        number: Its number.
        context: For the caller: whatever handles this stream; dropped when the reply has ended.
        content_length: How long the peer said that the body would be.
        ended: Whether the peer has sent all it will send.
        closed: Whether it is over: answered to the end, or reset.
        delivered: Bytes of the body so far.
        receivable: Bytes that the peer may still send.
        wanted: Bytes that wait to be granted.
        granted: Bytes granted beyond the first window.
        window: Bytes that the peer accepts.
        unsent: Data that waits for the peer's window; None if there is none.
        trailers: The header block that follows it, if that ends the stream.
    """

    __slots__ = (
        *("closed", "content_length", "context", "delivered", "ended", "granted", "number", "receivable"),
        *("trailers", "unsent", "wanted", "window"),
    )

    def __init__(self, number: int, headers: Headers, window: int) -> None:
        self.number = number
        self.context: Any = None
        self.content_length = headers.content_length
        self.ended = self.closed = False
        self.delivered = 0
        self.receivable = DEFAULT_WINDOW
        self.wanted = self.granted = 0
        self.window = window
        self.unsent: memoryview | None = None
        self.trailers: bytes | None = None
