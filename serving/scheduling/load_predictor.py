"""The state of one device slot and predictions from it: queue, running work, and the cost of a request."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.records import BULK, DEFAULT_PRIORITY
from bertserve.serving.scheduling.batcher import WIDE, Lanes
from bertserve.serving.scheduling.queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import ModelIndex
    from bertserve.serving.scheduling.batcher import Policy
    from bertserve.serving.scheduling.cost import ModelCosts

_CROWDED_US = 100_000
"""Waiting work below which tokenizing costs less than predicting everything twice."""

_OVERTAKING = 0.5
"""Share of the time up to an item's key that later arrivals with smaller keys take, while others wait. Most arrivals
are shorter than the longest ones, so this is cautious, and matters for long texts."""

_CAUTION = 1.2
"""Factor on the predicted wait of a request that is not alone: accepting a request that is late wastes the engine's
work. Without it, one accepted request in twenty was late at twice the load."""


FAIRNESS = 6.0
"""Later texts may overtake a text for this multiple of its own cost. From 1 to 10, at 0.6 of the capacity, p99 of all
texts grows from 63 to 70 ms, and p99 of short ones falls from 47 to 28 ms."""

BULK_SHARE = 0.05
"""Minimum share of device time for waiting bulk work."""


class Demand(msgspec.Struct, frozen=True):
    """The work of a request, in microseconds.

    Attributes:
        cost_us: From start to end on an idle device.
        least_us: The same without the present slowdown.
        busy_us: From start to end while others wait.
        work_us: Its share of the device while others wait.
    """

    cost_us: float
    least_us: float
    busy_us: float
    work_us: float


class LoadPredictor:
    """The state of a device slot, and predictions from it; times are in seconds of the driver's clock.

    Attributes:
        queue: Waiting requests, without bulk work.
        bulk: Waiting bulk work.
        costs: Costs of each model; empty before the first engine.
        expected_us: Work of admitted requests whose texts wait for the tokenizer, without bulk work.
        back_at: When a crashed engine is probably replaced; None if there is an engine, or none comes.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queue = WorkQueue()
        self.bulk = WorkQueue()
        self.lanes = Lanes.idle(0)
        self.costs: Sequence[ModelCosts] = ()
        self.expected_us = 0
        self.back_at: float | None = None

    @property
    def crowded(self) -> bool:
        """Whether so much waits that a rejection is likely: then it should come before tokenization."""
        return self.back_at is not None or self.queue.backlog.total_us > _CROWDED_US

    @property
    def idle(self) -> bool:
        return not self.queue.items and not any(self.lanes.load) and self.back_at is None

    def demand(self, model: ModelIndex, lengths: Sequence[int]) -> Demand:
        costs = self.costs[model]
        least_us, cost_us, busy_us, work_us = costs.one_us(max(lengths))
        if len(lengths) == 1:
            return Demand(cost_us, least_us, busy_us, work_us)
        counts = Counter(lengths).items()
        work_us = sum([count * costs.share_us(tokens) for tokens, count in counts])
        least_work_us = sum([count * costs.least_share_us(tokens) for tokens, count in counts])
        return Demand(max(cost_us, work_us), max(least_us, least_work_us), max(busy_us, work_us), work_us)

    def key(self, demand: Demand, deadline: float, now: float) -> float:
        """A request's position within its class. It is static: aging follows from later requests having larger keys."""
        cost_s = demand.cost_us / 1e6
        return min(deadline - cost_s, now + FAIRNESS * cost_s)

    def is_early(self, demand: Demand, priority: int, deadline: float, now: float) -> bool:
        """Whether the deadline is kept even behind all present work: faster to compute than `finish_at`."""
        waiting_us = self.queue.backlog.total_us + self.expected_us
        if priority == BULK:
            waiting_us += self.bulk.backlog.total_us
        own_us = demand.busy_us + FAIRNESS * demand.cost_us
        free_at = self.lanes.free_at if self.back_at is None else [self.back_at]
        latest = max(now, *free_at) if free_at else now
        return now + _CAUTION * (latest - now + self._slowness(priority) * (waiting_us + own_us) / 1e6) <= deadline

    def finish_at(self, demand: Demand, priority: int, deadline: float, now: float) -> float:
        """When a request's answer can be promised if it is queued now.

        Before it come running work, queued work with a smaller key or in a higher class, and some of what will arrive
        before its own key's time. For bulk work it is the earliest time: an unknown number of other requests goes
        first.
        """
        key = self.key(demand, deadline, now)
        ahead_us = self.queue.backlog.ahead_us(priority, key) + self.expected_us
        if priority == BULK:
            ahead_us += self.bulk.backlog.ahead_us(priority, key)
        overtaken_s = _OVERTAKING * max(0.0, key - now) if self.queue.items else 0.0
        work_s = self._slowness(priority) * (ahead_us + demand.busy_us) / 1e6
        return now + _CAUTION * (self._occupied_s(now) + work_s + overtaken_s)

    def drain_s(self, now: float, priority: int = DEFAULT_PRIORITY) -> float:
        """Seconds until all present work is done; includes bulk work only if asked about bulk work."""
        waiting_us = self.queue.backlog.total_us + self.expected_us
        if priority == BULK:
            waiting_us += self.bulk.backlog.total_us
        return self._occupied_s(now) + self._slowness(priority) * waiting_us / 1e6

    def restart_s(self, now: float) -> float:
        """Seconds until a crashed engine is probably replaced; 0 if there is an engine, or none comes."""
        return 0.0 if self.back_at is None else max(0.0, self.back_at - now)

    def _slowness(self, priority: int) -> float:
        """The slowdown of other work by the share of bulk work."""
        return 1 / (1 - BULK_SHARE) if self.bulk.items and priority != BULK else 1.0

    def _occupied_s(self, now: float) -> float:
        """Seconds until the device has finished its running work, or is back: for narrow lanes, on average."""
        if self.back_at is not None:
            return self.restart_s(now)
        free_at = self.lanes.free_at
        if len(free_at) == 1 or (free_at and self.lanes.load[WIDE] and not self.policy.apart):
            return max(0.0, free_at[WIDE] - now)
        # If lanes are GPUs, the wide lane is another name of one of them.
        return sum([max(0.0, free - now) for free in free_at]) / max(1, len(free_at) - 1)
