"""The state of one device slot and predictions from it: what waits, what runs, what a request would cost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from serving.records import BULK, DEFAULT_PRIORITY
from serving.scheduling.batcher import WIDE, Lanes
from serving.scheduling.queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.records import ModelIndex
    from serving.scheduling.batcher import Policy
    from serving.scheduling.cost import ModelCosts

_CROWDED_US = 100_000
"""Of work that waits. Below it tokenising costs less than predicting everything twice."""

_OVERTAKING = 0.5
"""Share of the time up to an item's key that is taken by what arrives in it with smaller keys, while others wait.
Of all that arrives the smaller part is shorter than the longest, so this is for the long ones, and cautious."""

_CAUTION = 1.2
"""Times the predicted wait of a request that is not alone: a promise that is broken costs more than one not made,
since then the engine has worked for nobody. Without it one accepted request in twenty was late at twice the load."""


class Demand(msgspec.Struct, frozen=True):
    """What a request asks of the device, in microseconds.

    Attributes:
        cost_us: From its start to its end on an idle device.
        least_us: The same without what slows it down at present.
        busy_us: From its start to its end while others wait.
        work_us: The share of the device that it takes while others wait.
    """

    cost_us: float
    least_us: float
    busy_us: float
    work_us: float


class Outlook:
    """The state of a device slot, and predictions from it; times are in seconds of the driver's clock.

    Attributes:
        queue: What waits, but for bulk work.
        costs: Of each model; empty while there has been no engine.
        expected_us: Work of requests that are admitted and still being tokenised, but for bulk work.
        back_at: When an engine that has ended is probably replaced; None while there is one, or none comes.
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
        """Whether so much waits that a refusal is likely: then it should come before anything is tokenised."""
        return self.back_at is not None or self.queue.backlog.total_us > _CROWDED_US

    @property
    def idle(self) -> bool:
        return not self.queue.items and not any(self.lanes.load) and self.back_at is None

    def alone_us(self, model: ModelIndex, tokens: int) -> tuple[float, float]:
        """The least and the probable time of one text on an idle device."""
        costs = self.costs[model]
        table_us = costs.wide.batch_us(tokens, 1)
        correction = costs.corrections[WIDE]
        factor = correction.at(tokens)
        return (table_us * factor if factor < 1 else table_us), table_us * factor + correction.overhead_us

    def demand(self, model: ModelIndex, lengths: Sequence[int]) -> Demand:
        costs = self.costs[model]
        longest = max(lengths)
        cost_us, least_us, busy_us = costs.alone_us(longest), costs.least_us(longest), costs.busy_us(longest)
        if len(lengths) == 1:
            return Demand(cost_us, least_us, busy_us, costs.share_us(longest))
        counts = Counter(lengths).items()
        work_us = sum([count * costs.share_us(tokens) for tokens, count in counts])
        least_work_us = sum([count * costs.least_share_us(tokens) for tokens, count in counts])
        return Demand(max(cost_us, work_us), max(least_us, least_work_us), max(busy_us, work_us), work_us)

    def key(self, demand: Demand, deadline: float, now: float) -> float:
        """A request's position within its class: static, so that waiting makes it older than whatever comes later."""
        cost_s = demand.cost_us / 1e6
        return min(deadline - cost_s, now + self.policy.fairness * cost_s)

    def is_early(self, demand: Demand, priority: int, deadline: float, now: float) -> bool:
        """Whether the deadline is kept even behind all that is here: quicker to see than `finish_at`."""
        waiting_us = self.queue.backlog.total_us + self.expected_us
        if priority == BULK:
            waiting_us += self.bulk.backlog.total_us
        own_us = demand.busy_us + self.policy.fairness * demand.cost_us
        free_at = self.lanes.free_at if self.back_at is None else [self.back_at]
        latest = max(now, *free_at) if free_at else now
        return now + _CAUTION * (latest - now + self._slowness(priority) * (waiting_us + own_us) / 1e6) <= deadline

    def finish_at(self, demand: Demand, priority: int, deadline: float, now: float) -> float:
        """When a request's answer can be promised if it is queued now.

        What goes before it is what runs, what waits with a smaller key or in a higher class, and some of what will
        arrive before its own key's time has come. Of bulk work it is the earliest time: other requests that come
        meanwhile go before it, and nobody knows how many.
        """
        key = self.key(demand, deadline, now)
        ahead_us = self.queue.backlog.ahead_us(priority, key) + self.expected_us
        if priority == BULK:
            ahead_us += self.bulk.backlog.ahead_us(priority, key)
        overtaken_s = _OVERTAKING * max(0.0, key - now) if self.queue.items else 0.0
        work_s = self._slowness(priority) * (ahead_us + demand.busy_us) / 1e6
        return now + _CAUTION * (self._occupied_s(now) + work_s + overtaken_s)

    def drain_s(self, now: float, priority: int = DEFAULT_PRIORITY) -> float:
        """Seconds until all that is here is done: of bulk work only where the question is of bulk work."""
        waiting_us = self.queue.backlog.total_us + self.expected_us
        if priority == BULK:
            waiting_us += self.bulk.backlog.total_us
        return self._occupied_s(now) + self._slowness(priority) * waiting_us / 1e6

    def restart_s(self, now: float) -> float:
        """Seconds until an engine that has ended is probably replaced; 0 while there is one, or none comes."""
        return 0.0 if self.back_at is None else max(0.0, self.back_at - now)

    def _slowness(self, priority: int) -> float:
        """By how much work takes longer because bulk work has its share beside it."""
        return 1 / (1 - self.policy.bulk_share) if self.bulk.items and priority != BULK else 1.0

    def _occupied_s(self, now: float) -> float:
        """Seconds until the device has done what it was given, or is back: of narrow lanes, on average."""
        if self.back_at is not None:
            return self.restart_s(now)
        free_at = self.lanes.free_at
        if len(free_at) == 1 or (free_at and self.lanes.load[WIDE] and not self.policy.apart):
            return max(0.0, free_at[WIDE] - now)
        # Where the wide lane is busy here, it is one of the others under another name.
        return sum([max(0.0, free - now) for free in free_at]) / max(1, len(free_at) - 1)
