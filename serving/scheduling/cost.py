"""What a text costs: microseconds of the idle engine by its length, from what warm-up measured."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class CostTable:
    """Linear between measured lengths, in proportion beyond them; never falling with length."""

    def __init__(self, points: Iterable[tuple[int, float]]) -> None:
        """Takes pairs of (tokens, microseconds); at least one, none at 0 tokens.

        Raises:
            ValueError: No point, or one that is not positive.
        """
        highest = 0.0
        self._tokens: list[int] = []
        self._us: list[float] = []
        for tokens, us in sorted(points):
            if tokens <= 0 or us < 0:
                raise ValueError("a cost point needs a positive length and a time")
            highest = max(highest, us)
            self._tokens.append(tokens)
            self._us.append(highest)
        if not self._tokens:
            raise ValueError("a cost table needs at least one point")

    def alone_us(self, tokens: int) -> float:
        """Predicted microseconds of one text of so many tokens on an idle engine."""
        at = bisect_left(self._tokens, tokens)
        if at == len(self._tokens):
            return self._us[-1] * tokens / self._tokens[-1]
        if at == 0:
            return self._us[0]
        left, right = self._tokens[at - 1], self._tokens[at]
        share = (tokens - left) / (right - left)
        return self._us[at - 1] + share * (self._us[at] - self._us[at - 1])
