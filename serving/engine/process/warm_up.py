"""Warm-up: runs every lane on representative batches, and measures their costs.

A lane's first runs of a length allocate memory and choose kernels; no client should wait for that. The same runs
measure the cost table: first single texts of every length, then batches, doubled while that lowers the cost per text.
Narrow lanes are measured all at once, as in service, because they share caches and memory. Measurements have a time
limit; missing costs are extrapolated. A model that outputs NaN or infinity is refused.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.engine.base import Batch, LaneKind
from bertserve.serving.engine.batches import OneByOne, sample_text
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.records import ModelIndex
from bertserve.serving.scheduling.cost import BUCKETS, CostPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.engine.base import Backend, Runner
    from bertserve.serving.engine.specs import ModelSpec

log = logging.getLogger("bertserve.engine")

LIMIT_S = 2.5
"""Time limit per model in seconds. A cell (one length and batch size) that has begun is finished within about 0.1 s."""

_SHORTEST = 8
"""Tokens of the shortest realistic texts; the other lengths are the buckets."""

_MIN_RUNS, _MAX_RUNS = 6, 25
_CELL_S, _LONG_CELL_S = 0.025, 0.1
"""A cell ends after `_MIN_RUNS` runs that took `_CELL_S` seconds, or after two runs that took `_LONG_CELL_S`. Short
texts are measured often, since disturbances last as long as they do; long texts are measured seldom."""

_WORTH, _SMALL_TOKENS = 0.95, 128
"""A doubling beyond `_SMALL_TOKENS` that does not cut the cost per text to `_WORTH` of the last is the final one: from
there on, cost is proportional to size. Smaller batches never end the doubling, because busy narrow lanes get them."""


def warm_up(
    backend: Backend, models: Sequence[ModelSpec], measured: Sequence[Sequence[CostPoint]], max_batch_tokens: int
) -> list[list[CostPoint]]:
    """Warms up every lane and returns the costs of each model.

    A model's earlier costs on this node, in `measured`, are reused: it is warmed up but not measured.

    Raises:
        BundleError: A model fails, or its outputs are not finite.
    """
    costs = []
    for index, model in enumerate(models):
        started = time.perf_counter()
        before = list(measured[index]) if index < len(measured) else []
        points = _Model(backend, models, ModelIndex(index), max_batch_tokens).measured(measure=not before)
        how = f"{len(before)} costs from the cache" if before else f"{len(points)} costs measured"
        log.info("warm-up of %s: %.2f s, %s", model.name, time.perf_counter() - started, how)
        costs.append(before or points)
    return costs


class _Model:
    """One model on its lanes."""

    def __init__(self, backend: Backend, models: Sequence[ModelSpec], index: ModelIndex, max_batch_tokens: int) -> None:
        self._spec = spec = models[index]
        self._index = index
        self._max_batch_tokens = max_batch_tokens
        self._largest_batch = backend.largest_batch
        kinds = backend.lanes() if spec.narrow else backend.lanes()[:1]
        runners = [OneByOne(backend.runner(lane), models) for lane in range(len(kinds))]
        self._groups = {kind: [r for r, k in zip(runners, kinds, strict=True) if k is kind] for kind in kinds}
        self._lengths = sorted({min(length, spec.max_length) for length in (_SHORTEST, *BUCKETS, spec.max_length)})

    def measured(self, *, measure: bool) -> list[CostPoint]:
        """Measures single texts of every length, then batches as long as there is time.

        Narrow lanes come first, because they carry most of the load; short texts come first, because they gain most.
        """
        limit = time.perf_counter() + LIMIT_S
        runs = _MAX_RUNS if measure else 1
        points = [
            self._cell(kind, tokens, 1, runs if time.perf_counter() < limit else 1)
            for tokens in self._lengths
            for kind in self._groups
        ]
        singles = {(point.kind, point.tokens): point for point in points}
        for single in sorted(points, key=lambda point: point.kind == "wide") if measure else ():
            last = single
            while self._may_grow(last):
                size = 2 * last.batch
                if time.perf_counter() < limit:
                    grown = self._cell(LaneKind(last.kind), last.tokens, size, runs)
                elif as_long := singles.get((last.kind, size * last.tokens)):
                    grown = msgspec.structs.replace(as_long, tokens=last.tokens, batch=size)
                else:
                    break
                points.append(grown)
                if size * last.tokens > _SMALL_TOKENS and grown.us / size > _WORTH * last.us / last.batch:
                    break
                last = grown
        return points

    def _may_grow(self, point: CostPoint) -> bool:
        size = 2 * point.batch
        fits = size <= self._largest_batch and size * point.tokens <= self._max_batch_tokens
        return self._spec.batch_invariant and fits

    def _cell(self, kind: LaneKind, tokens: int, size: int, runs: int) -> CostPoint:
        batch = Batch(self._index, [sample_text(self._spec, tokens)] * size)
        times = side_by_side(self._spec.name, self._groups[kind], batch, runs)
        quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [0.0, times[0], 0.0]
        return CostPoint(kind.value, tokens, size, statistics.median(times), quarters[2] - quarters[0])


def side_by_side(name: str, runners: Sequence[Runner], batch: Batch, runs: int) -> list[float]:
    """Returns the times of a model's batch on each runner while all of them work, in microseconds."""
    times: list[float] = []
    faults: list[EngineFault] = []
    start = threading.Barrier(len(runners))

    def work(runner: Runner) -> None:
        own: list[float] = []
        start.wait()
        started = time.perf_counter()
        try:
            for _ in range(runs):
                output = runner.run(batch)
                if not all(output.finite):
                    faults.append(EngineFault(f"the output for {batch.padded_length} tokens contains NaN or infinity"))
                    break
                own.append(output.compute_us)
                seconds = time.perf_counter() - started
                if (len(own) >= _MIN_RUNS and seconds > _CELL_S) or (len(own) > 1 and seconds > _LONG_CELL_S):
                    break
        except EngineFault as fault:
            faults.append(fault)
        times.extend(own[1:] or own)  # the first run is cold

    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners[1:]]
    for thread in threads:
        thread.start()
    work(runners[0])
    for thread in threads:
        thread.join()
    if faults:
        raise BundleError(f"warm-up of {name} failed: {faults[0].message}") from faults[0]
    return times
