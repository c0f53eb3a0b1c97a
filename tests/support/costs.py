"""Cost tables for schedulers under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.serving.scheduling.cost import CostPoint, ModelCosts

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
SIZES = (1, 2, 4, 8, 16, 32, 64)


def model_costs(
    wide: Callable[[int, int], float],
    narrow: Callable[[int, int], float] | None = None,
    *,
    narrow_lanes: int = 2,
    corners: bool = False,
    library: str = "",
    **options: Any,
) -> ModelCosts:
    """Costs from functions of (tokens, texts) to microseconds; `options` go to `ModelCosts`.

    With `corners` only those of the table are measured: all the same for `constant` and `per_token`, and made at once.
    """
    kinds = [("wide", wide), *([("narrow", narrow)] if narrow else [])]
    lengths, sizes = [[of[0], of[-1]] if corners else of for of in (LENGTHS, SIZES)]
    points = [
        CostPoint(kind, tokens, size, cost(tokens, size), library=library)
        for kind, cost in kinds
        for tokens in lengths
        for size in sizes
    ]
    return ModelCosts(points, narrow_lanes=narrow_lanes if narrow else 0, **options)


def constant(us: float) -> Callable[[int, int], float]:
    """A batch costs the same whatever it holds: every text more is free."""
    return lambda _tokens, _texts: us


def per_token(us: float, fixed_us: float = 0.0) -> Callable[[int, int], float]:
    """A batch costs so much for each padded token, and something for being a batch."""
    return lambda tokens, texts: fixed_us + us * tokens * texts
