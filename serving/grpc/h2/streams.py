"""What a connection of HTTP/2 and the protocol spoken on its streams know of one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from serving.grpc.h2.frames import DEFAULT_WINDOW

if TYPE_CHECKING:
    import asyncio

    from serving.grpc.h2.connection import Http2Connection
    from serving.grpc.h2.headers import Fields
    from serving.settings import Settings


class Application(Protocol):
    """What is spoken on the streams of a port's connections."""

    settings: Settings
    connections: set[Http2Connection]

    def read_head(self, fields: Fields) -> Any:  # noqa: ANN401  the connection only hands it back
        """What a request's fields become; depends on nothing else. Raises StreamFault where they are malformed."""

    def open(self, connection: Http2Connection, number: int, head: Any) -> Stream:  # noqa: ANN401  as above
        """A new stream."""


class Stream:
    """One stream, from its headers to the last byte of its reply.

    Attributes:
        number: Its number.
        ended: Whether the client has said all it will say.
        receivable: Bytes that the client may still send.
        wanted: Bytes for which it waits to be granted.
        granted: Bytes granted beyond the first window.
        window: Bytes that the client takes.
        unsent: What waits for that.
        trailers: The header block that ends the reply, once it is known.
        waited_s: How long the client has kept the server waiting for its request, or for its window.
        idle: Whether it need not send anything now: it is between two messages.
    """

    __slots__ = (
        *(
            "ended",
            "granted",
            "idle",
            "number",
            "receivable",
            "taken",
            "trailers",
            "unsent",
            "waited_s",
            "wanted",
            "window",
        ),
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = self.idle = False
        self.receivable = DEFAULT_WINDOW
        self.wanted = self.granted = 0
        self.window = 0
        self.unsent: memoryview | None = None
        self.trailers: bytes | None = None
        self.taken: asyncio.Future[None] | None = None
        self.waited_s = 0.0

    def opened(self) -> None:
        """The stream is registered: it can be answered."""

    def received(self, data: bytes) -> None:
        """The client sent data, or its end."""

    def lost(self) -> None:
        """Nobody waits for this stream any more."""

    def draining(self) -> None:
        """The server ends: what waits for nothing but its client must end too."""

    def keys_changed(self) -> None:
        """The API keys are others now."""

    def too_slow(self) -> None:
        """The client did not finish its request in time."""
