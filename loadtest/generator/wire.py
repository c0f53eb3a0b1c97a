"""What the clients of both protocols have in common: bytes to send, and replies in the bytes that came.

A wire has no socket and no clock, so the same one serves a closed loop, an open loop and a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Served(NamedTuple):
    """What a server says of a request that it answered; -1 where it says nothing.

    Attributes:
        tokens: Tokens computed, special tokens included.
        tokenize_us: Time in its tokenizer, in microseconds.
        queue_us: Time waiting for an engine.
        compute_us: Time on the engine.
        total_us: Time from the request's arrival to its answer.
    """

    tokens: int = -1
    tokenize_us: float = -1.0
    queue_us: float = -1.0
    compute_us: float = -1.0
    total_us: float = -1.0


class Reply(NamedTuple):
    """A whole reply.

    Attributes:
        tag: What its request was sent with.
        fault: Why there is no answer, in a few words that are equal for equal reasons; empty where there is one.
        head: The header that tells of the request's processing (of HTTP/1.1 in small letters); see `Wire.served`.
        body: The answer, or what the server says of its failure.
    """

    tag: Any
    fault: str
    head: bytes
    body: bytes


class Wire(Protocol):
    """One connection of a client, without its socket.

    Attributes:
        is_open: Whether requests are sent at once: not while TLS is being agreed on.
    """

    is_open: bool

    def opening(self) -> bytes:
        """What is sent before everything else."""

    def room(self) -> int:
        """How many more requests the connection takes now."""

    def request(self, message: bytes, tag: object) -> bytes:
        """What is sent for a request; its reply carries the tag.

        Args:
            message: As the protocol's `request_bytes` made it.
            tag: Whatever tells the caller which request this was.
        """

    def feed(self, data: bytes) -> Sequence[Reply]:
        """Takes what came and returns the replies that are whole now.

        Raises:
            BenchError: The connection ended or broke the protocol; no request on it will be answered any more.
        """

    def owed(self) -> bytes:
        """What the protocol asks to be sent now, apart from requests; empty for nothing."""

    def served(self, head: bytes) -> Served:
        """What a reply's head says of its processing."""
