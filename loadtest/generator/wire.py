"""Common interface of the protocol clients: bytes to send, and replies in received bytes.

A wire has no socket and no clock, so the same one works in a closed loop, an open loop and a test.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence


class Served(NamedTuple):
    """Statistics that the server reports for an answered request; -1 if not reported.

    Attributes:
        tokens: Tokens computed, special tokens included.
        tokenize_us: Tokenization time, in microseconds.
        queue_us: Queue time.
        compute_us: Compute time.
        total_us: Time from the request's arrival to its answer.
    """

    tokens: int = -1
    tokenize_us: float = -1.0
    queue_us: float = -1.0
    compute_us: float = -1.0
    total_us: float = -1.0


class Reply(NamedTuple):
    """A complete reply.

    Attributes:
        tag: The tag of its request.
        fault: A short reason for a failure, equal for equal reasons; empty on success.
        head: The header with the request's statistics (lowercase in HTTP/1.1); see `Wire.served`.
        body: The answer, or the server's error message.
    """

    tag: Any
    fault: str
    head: bytes
    body: bytes


class Wire(Protocol):
    """One client connection, without its socket.

    Attributes:
        is_open: Whether requests are sent immediately; false during a TLS handshake.
    """

    is_open: bool

    def opening(self) -> bytes:
        """Bytes that precede everything else."""

    def room(self) -> int:
        """Number of further requests that the connection accepts now."""

    def request(self, message: bytes, tag: object) -> bytes:
        """The bytes to send for a request; its reply carries the tag.

        Args:
            message: From the protocol's `request_bytes`.
            tag: Identifies the request to the caller.
        """

    def feed(self, data: bytes) -> Sequence[Reply]:
        """Takes received bytes and returns the complete replies.

        Raises:
            BenchError: The connection ended or violated the protocol; none of its requests will be answered.
        """

    def owed(self) -> bytes:
        """Protocol bytes to send now, apart from requests; empty for none."""

    def served(self, head: bytes) -> Served:
        """Parses the statistics in a reply's head."""
