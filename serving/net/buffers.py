"""A budget of bytes for what connections hold: bodies on their way, inflated bodies, replies that nobody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.settings import Settings

FREE_BYTES = 16_384
"""What is no larger needs no place in the budget: small requests cost nothing, and work while it is spent."""


class BufferBudget:
    """The bytes that all connections together may hold.

    Attributes:
        used: Bytes held now.
        refusals: How often there was no room.
    """

    __slots__ = ("limit_bytes", "refusals", "share_bytes", "used")

    def __init__(self, limit_bytes: int, share_bytes: int) -> None:
        """`share_bytes` is what one connection may hold of `limit_bytes`."""
        self.limit_bytes = limit_bytes
        self.share_bytes = min(share_bytes, limit_bytes)
        self.used = 0
        self.refusals = 0

    @classmethod
    def of(cls, settings: Settings) -> BufferBudget:
        """The budget that the settings name, half of which one connection may hold."""
        return cls(settings.buffer_limit_bytes, settings.buffer_limit_bytes // 2)

    def share(self, free_bytes: int = 0) -> BufferShare:
        """A connection's; its first `free_bytes` need no place in the budget."""
        return BufferShare(self, free_bytes)


class BufferShare:
    """What one connection holds of the budget.

    Attributes:
        held: Bytes, those included that need no place.
    """

    __slots__ = ("_budget", "_free_bytes", "held")

    def __init__(self, budget: BufferBudget, free_bytes: int) -> None:
        self._budget = budget
        self._free_bytes = free_bytes
        self.held = 0

    def take(self, size: int) -> bool:
        """Holds so many bytes more; False, and as many as before, where that is beyond the budget or the share."""
        budget, held = self._budget, self.held + size
        more = self._counted(held) - self._counted(self.held)
        if more and (budget.used + more > budget.limit_bytes or held > budget.share_bytes):
            budget.refusals += 1
            return False
        self._hold(held)
        return True

    def take_made(self, size: int) -> bool:
        """Holds so many bytes more that are there already, however many, unless the budget is spent."""
        budget = self._budget
        if budget.used >= budget.limit_bytes:
            budget.refusals += 1
            return False
        self._hold(self.held + size)
        return True

    def give(self, size: int) -> None:
        """Gives back so many of the bytes held."""
        self._hold(max(0, self.held - size))

    def _hold(self, held: int) -> None:
        self._budget.used += self._counted(held) - self._counted(self.held)
        self.held = held

    def _counted(self, held: int) -> int:
        return max(0, held - self._free_bytes)

    def close(self) -> None:
        """Gives all back; nothing is taken afterwards."""
        self.give(self.held)
