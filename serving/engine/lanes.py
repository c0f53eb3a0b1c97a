"""Which lanes a CPU offers for a set of models."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from serving.engine.base import LaneKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.records import ModelSpec

Session = TypeVar("Session")

MOST_LANES = 64
"""Each lane is a thread and a socket; beyond this many cores, narrow lanes gain nothing on one machine."""


def lanes_for(models: Sequence[ModelSpec], threads: int) -> list[LaneKind]:
    """One wide lane, and a narrow one per core where a model is run on them."""
    side_by_side = threads > 1 and any(model.narrow for model in models)
    narrow = min(threads, MOST_LANES - 1) if side_by_side else 0
    return [LaneKind.WIDE, *[LaneKind.NARROW] * narrow]


def on_lanes(
    model: ModelSpec,
    lanes: Sequence[LaneKind],
    threads: int,
    load: Callable[[ModelSpec, Sequence[int]], Sequence[Session]],
) -> list[Session | None]:
    """A model's sessions, lane by lane; None where it is not run.

    Args:
        model: The model.
        lanes: As `lanes_for` gave them.
        threads: Cores of the wide lane.
        load: Makes a session for each of some numbers of threads.
    """
    used = lanes if model.narrow else lanes[:1]
    loaded = load(model, [threads if lane is LaneKind.WIDE else 1 for lane in used])
    return [*loaded, *[None] * (len(lanes) - len(loaded))]
