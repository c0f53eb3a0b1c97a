"""Which lanes a CPU offers for a set of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.base import LaneKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.base import ModelSpec


MOST_LANES = 64
"""Each lane is a thread and a socket; beyond this many cores, narrow lanes gain nothing on one machine."""


def lanes_for(models: Sequence[ModelSpec], threads: int) -> list[LaneKind]:
    """One wide lane, and a narrow one per core where a model is run text by text."""
    side_by_side = threads > 1 and not all(model.batch_invariant for model in models)
    narrow = min(threads, MOST_LANES - 1) if side_by_side else 0
    return [LaneKind.WIDE, *[LaneKind.NARROW] * narrow]
