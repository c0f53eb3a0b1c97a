"""How long a scheduling decision takes: `python -m loadtest.capacity.decision_bench`.

Fills a scheduler with texts of all lengths, classes and deadlines and times what happens for each batch and each
request: `next` with its batch taken out, admission with `submit` beside a full queue, and the refusal of a request.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from typing import TYPE_CHECKING

from serving.errors import Overloaded
from serving.options import OptionParser
from serving.records import PRIORITIES, EncodedText, ModelIndex
from serving.scheduling.admission import AdmissionLimits, Permit
from serving.scheduling.batcher import GROUP_TOKENS, PREFETCH_TOKENS, Policy
from serving.scheduling.cost import CostPoint, LaneKindName, ModelCosts
from serving.scheduling.queue import WorkItem
from serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

_MODEL = ModelIndex(0)
_FAR_S = 60.0
_US_PER_TOKEN, _US_PER_BATCH = 30.0, 300.0
_KINDS: tuple[tuple[LaneKindName, float], ...] = (("wide", 1.0), ("narrow", 1.7))
_LENGTHS = (8, 16, 32, 64, 128, 256, 512)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def _scheduler(lanes: int) -> Scheduler:
    """A scheduler for one batch-invariant model, with costs similar to a small model's on a CPU."""
    narrow = lanes > 1
    policy = Policy(1024, [True], [narrow], group_tokens=GROUP_TOKENS, prefetch_tokens=PREFETCH_TOKENS)
    points = [
        CostPoint(kind, tokens, size, _US_PER_BATCH + _US_PER_TOKEN * factor * tokens * size)
        for kind, factor in _KINDS
        for tokens in _LENGTHS
        for size in _SIZES
    ]
    scheduler = Scheduler(policy, AdmissionLimits(1 << 30), lambda _: None)
    scheduler.engine_up(lanes, [ModelCosts(points, narrow_lanes=lanes - 1, group_tokens=GROUP_TOKENS)])
    return scheduler


def _item(chance: random.Random) -> WorkItem:
    tokens = min(512, 6 + int(chance.expovariate(1 / 60)))
    return WorkItem(_MODEL, EncodedText(array("i", range(tokens))), tokens, None, 0)


def measure(
    waiting: int, lanes: int, runs: int, seed: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Times of scheduling decisions in microseconds, by kind, with `waiting` items in the queue."""
    chance = random.Random(seed)
    scheduler = _scheduler(lanes)
    times: dict[str, list[float]] = {"next": [], "submit": [], "refuse": []}

    def timed(kind: str, act: Callable[[], object]) -> object:
        started = clock()
        result = act()
        times[kind].append((clock() - started) * 1e6)
        return result

    now = 0.0
    _submit(scheduler, _item(chance), PRIORITIES[1], now)  # otherwise the first item would start immediately
    while scheduler.queue.items < waiting:
        _submit(scheduler, _item(chance), chance.choice(PRIORITIES), now)
    scheduler.engine_up(lanes, scheduler.costs)
    for _ in range(runs):
        now += 1e-3
        assignment = timed("next", lambda: scheduler.next(now))  # noqa: B023  called immediately
        if assignment is not None:
            scheduler.engine_up(lanes, scheduler.costs)  # as if the batch had ended
        while scheduler.queue.items < waiting:
            item = _item(chance)
            timed("submit", lambda: _submit(scheduler, item, PRIORITIES[1], now))  # noqa: B023
        timed("refuse", lambda: _refused(scheduler, now))  # noqa: B023
    return times


def _submit(scheduler: Scheduler, item: WorkItem, priority: int, now: float) -> None:
    permit = Permit(scheduler.admission, _MODEL, priority, now + _FAR_S)
    permit.confirm([item.tokens], now)
    scheduler.submit([item], permit, now)


def _refused(scheduler: Scheduler, now: float) -> None:
    least_us = scheduler.costs[_MODEL].least_us(40)
    try:
        Permit(scheduler.admission, _MODEL, PRIORITIES[-1], now + 1.05 * least_us / 1e6).confirm([40], now)
    except Overloaded:
        return
    raise AssertionError("a full queue rejected nothing")


def main() -> None:
    parser = OptionParser(prog="python -m loadtest.capacity.decision_bench", description=__doc__)
    parser.add_argument("--waiting", type=int, default=1000, help="items in the queue (default: 1000)")
    parser.add_argument("--runs", type=int, default=2000, help="decisions of each kind (default: 2000)")
    arguments = parser.parse_args()
    for lanes, name in ((1, "one lane"), (3, "a wide lane and two narrow ones")):
        times = measure(arguments.waiting, lanes, arguments.runs)
        words = ", ".join(
            f"{kind} {statistics.median(values):.1f} us (p99 {statistics.quantiles(values, n=100)[98]:.1f})"
            for kind, values in times.items()
        )
        print(f"{arguments.waiting} waiting, {name}: median {words}")


if __name__ == "__main__":
    main()
