"""The base of the CPU engines: models on lanes, and a runner over one lane's models."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from bertserve.serving.engine.base import ANY_BATCH, BatchOutput, LaneKind, lanes_for
from bertserve.serving.engine.batches import finite_rows
from bertserve.serving.errors import EngineFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.engine.base import Batch, Runner
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array
    from bertserve.serving.scheduling.cost import CostPoint


class LaneModel(Protocol):
    def run(self, batch: Batch) -> Sequence[Array]:
        """Returns the graph's outputs; raises EngineFault if the library fails."""

    def trim(self) -> None:
        """Releases memory that only larger batches need, as far as the library can."""


class CpuBackend:
    """Models on one wide lane, and on narrow lanes too if they use them (`ModelSpec.narrow`)."""

    largest_batch = ANY_BATCH
    padded_to: Sequence[int] = ()

    def __init__(
        self,
        models: Sequence[ModelSpec],
        threads: int,
        load: Callable[[ModelSpec, Sequence[int]], Sequence[LaneModel]],
    ) -> None:
        """Loads every model; raises BundleError if one cannot be served."""
        self._lanes = lanes_for(models, threads)
        self._models: list[list[LaneModel | None]] = []
        for model in models:
            lanes = self._lanes if model.narrow else self._lanes[:1]
            loaded = load(model, [threads if lane is LaneKind.WIDE else 1 for lane in lanes])
            self._models.append([*loaded, *[None] * (len(self._lanes) - len(loaded))])

    def labelled(self, costs: list[list[CostPoint]]) -> list[list[CostPoint]]:
        """Returns the costs, with the library that computes each if scheduling or a later start needs it."""
        return costs

    def trim(self) -> None:
        """Releases what only the largest batches of the warm-up needed; narrow lanes share it."""
        for lanes in self._models:
            for model in lanes[:2]:
                if model is not None:
                    model.trim()

    def lanes(self) -> Sequence[LaneKind]:
        return self._lanes

    def runner(self, lane: int) -> Runner:
        return _Runner([lanes[lane] for lanes in self._models])


class _Runner:
    def __init__(self, models: Sequence[LaneModel | None]) -> None:
        self._models = models

    def run(self, batch: Batch) -> BatchOutput:
        model = self._models[batch.model]
        if model is None:
            raise EngineFault("a model was sent to a lane that does not hold it")
        started = time.perf_counter()
        arrays = model.run(batch)
        finite = finite_rows(arrays, len(batch.texts))
        return BatchOutput(arrays, finite, (time.perf_counter() - started) * 1e6)
