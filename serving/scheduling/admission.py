"""Admission control: a bound on the tokens in flight, taken before any work and always given back.

A permit is first taken for an estimate, because overload must be refused before a text is tokenised, and
then corrected to the exact count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from serving.errors import InvalidRequest, Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable

_BYTES_PER_TOKEN = 4
"""Of English text in WordPiece, about; the exact count replaces the estimate."""


def estimate_tokens(size_bytes: int, inputs: int) -> int:
    """Tokens that texts of so many bytes will have, special tokens included: an estimate, not a bound."""
    return size_bytes // _BYTES_PER_TOKEN + 2 * inputs


class Admission:
    """The bound on admitted tokens, over all models of a device slot.

    Attributes:
        capacity: Tokens that may be in flight at once (`max_queue_tokens`).
        in_flight: Tokens admitted and not yet answered.
    """

    def __init__(self, capacity: int, refusal: Callable[[str], Overloaded] = Overloaded) -> None:
        """Starts with nothing in flight.

        Args:
            capacity: See the attribute.
            refusal: Makes the error of a request that finds no room, with a hint when to come back.
        """
        self.capacity = capacity
        self.in_flight = 0
        self._refusal = refusal

    def acquire(self, tokens: int) -> Permit:
        """Admits so many tokens.

        Raises:
            InvalidRequest: More than the server ever holds; splitting the request helps.
            Overloaded: No room now; `retry_after_s` says when there should be.
        """
        permit = Permit(self)
        permit.resize(tokens)
        return permit

    def _take(self, tokens: int, held: int) -> None:
        if tokens > self.capacity:
            raise InvalidRequest(
                f"the request has about {tokens} tokens; the server holds {self.capacity} in all: send fewer at once"
            )
        if self.in_flight - held + tokens > self.capacity:
            raise self._refusal(f"the queue holds {self.in_flight} of {self.capacity} tokens; try again later")
        self.in_flight += tokens - held


class Permit:
    """The right to hold tokens; use it in a `with` block."""

    __slots__ = ("_admission", "tokens")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.tokens = 0

    def resize(self, tokens: int) -> None:
        """Replaces the estimate by the exact count, or keeps the estimate and raises as `acquire` does."""
        self._admission._take(tokens, self.tokens)  # noqa: SLF001  two halves of one thing
        self.tokens = tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.in_flight -= self.tokens
        self.tokens = 0
