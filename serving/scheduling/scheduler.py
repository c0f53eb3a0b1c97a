"""The scheduler of one device slot: queue, choice, prediction and the correction of costs, without a clock of its own.

Whoever drives it passes the time in, in seconds of any clock that only goes forward, and does what it says:

    scheduler.engine_up(lanes, costs)
    scheduler.check(scheduler.demand(model, lengths), priority, deadline, now)   refuses what would be late
    scheduler.submit(items, priority, deadline, now)   checks too, and queues all of a request's items or starts it
    while assignment := scheduler.next(now): ...       what it returns has left the queue and shall run
    scheduler.done(assignment, compute_us, now)        and then `next` again, as after `submit`
    scheduler.cancel(items)                            at any time

The server's `Dispatcher` drives it from an event loop, a simulator from a list of events; neither needs to know
more. `drop` is told of items whose deadline cannot be kept any more when their turn comes.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from serving.errors import DeadlineExceeded, Overloaded
from serving.scheduling.admission import Admission
from serving.scheduling.batcher import WIDE, Assignment, Lanes, choose
from serving.scheduling.queue import WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from serving.records import ModelIndex
    from serving.scheduling.batcher import Policy
    from serving.scheduling.cost import ModelCosts
    from serving.scheduling.queue import WorkItem

_LEAST_RETRY_S = 0.02
"""Whoever is refused should not be back before anything has changed."""

_CROWDED_US = 100_000
"""Of work that waits. Below it tokenising costs less than looking at everything twice."""

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
        least_us: The same without what makes it longer at present.
        busy_us: From its start to its end while others wait.
        work_us: The share of the device that it takes while others wait.
    """

    cost_us: float
    least_us: float
    busy_us: float
    work_us: float


class Scheduler:
    """See the module.

    Attributes:
        queue: What waits.
        admission: The bound on the tokens in flight.
        lanes: What the engine's lanes do.
        costs: Of each model; empty while there has been no engine.
        wake_at: When `next` must be asked again although nothing happens; None for not at all.
        refusals: Requests refused so far, by reason.
    """

    def __init__(
        self,
        policy: Policy,
        max_queue_tokens: int,
        drop: Callable[[WorkItem], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Starts without an engine.

        Args:
            policy: Limits and models.
            max_queue_tokens: Tokens that may be in flight.
            drop: Told of each item that left the queue because it was too late; may call `cancel`.
            jitter: Numbers in [0, 1), so that those who are refused together do not come back together.
        """
        self.policy = policy
        self.queue = WorkQueue()
        self.admission = Admission(max_queue_tokens, self._full)
        self.lanes = Lanes.idle(0)
        self.costs: Sequence[ModelCosts] = ()
        self.wake_at: float | None = None
        self.refusals = {"queue_full": 0, "predicted_late": 0, "hopeless": 0}
        self._drop = drop
        self._jitter = jitter
        self._held: list[float] = []
        self._freed: list[float] = []
        self._elsewhere_us = 0
        self._now = 0.0

    # The engine.

    def engine_up(self, lanes: int, costs: Sequence[ModelCosts]) -> None:
        """An engine with so many lanes takes batches from now on; the first lane is the wide one."""
        self.lanes = Lanes.idle(lanes)
        self._held = [0.0] * lanes
        self._freed = [0.0] * lanes
        self.costs = costs

    def engine_joins(self, lanes: int, costs: Sequence[ModelCosts]) -> None:
        """An engine takes batches beside one that still works; lanes of one number are the same part of the device.

        Args:
            lanes: Of the engine that joins.
            costs: Of each model, of whichever engine.
        """
        self.resize(max(lanes, len(self.lanes.load)))
        self.costs = costs

    def resize(self, lanes: int) -> None:
        """There are so many lanes from now on; those that go are idle."""
        load = self.lanes.load
        del load[lanes:]
        load.extend([0] * (lanes - len(load)))
        for times in (self.lanes.free_at, self._held, self._freed):
            del times[lanes:]
            times.extend([0.0] * (lanes - len(times)))

    # Admission.

    @property
    def crowded(self) -> bool:
        """Whether so much waits that a refusal is likely: then it should come before anything is tokenised."""
        return self.queue.backlog.total_us > _CROWDED_US

    def demand(self, model: ModelIndex, lengths: Sequence[int]) -> Demand:
        """What texts of these lengths ask of the device, as one request."""
        costs = self.costs[model]
        longest = max(lengths)
        cost_us, least_us, busy_us = costs.alone_us(longest), costs.least_us(longest), costs.busy_us(longest)
        if len(lengths) == 1:
            return Demand(cost_us, least_us, busy_us, costs.share_us(longest))
        counts = Counter(lengths).items()
        work_us = sum([count * costs.share_us(tokens) for tokens, count in counts])
        least_work_us = sum([count * costs.least_share_us(tokens) for tokens, count in counts])
        return Demand(max(cost_us, work_us), max(least_us, least_work_us), max(busy_us, work_us), work_us)

    def plain_cost_us(self, model: ModelIndex, lengths: Sequence[int]) -> float:
        """What a request costs on an idle device by the cost table alone, roughly; for default deadlines."""
        wide = self.costs[model].wide
        return wide.batch_us(max(lengths), 1) * len(lengths)

    def check(self, demand: Demand, priority: int, deadline: float, now: float) -> None:
        """Refuses a request that would not be answered in time.

        Args:
            demand: What it asks.
            priority: Its class.
            deadline: When its answer becomes useless.
            now: The time.

        Raises:
            DeadlineExceeded: Even an idle server would be too late.
            Overloaded: This one will be; `retry_after_s` says when it should have caught up.
        """
        self._now = now
        if now + demand.least_us / 1e6 > deadline:
            raise self._hopeless(demand.least_us, deadline - now)
        if self._is_far(deadline, demand, now) or not (self.queue.items or any(self.lanes.load)):
            return
        if self.finish_at(demand, priority, deadline, now) > deadline:
            self.refusals["predicted_late"] += 1
            raise self.overloaded("the answer would come after the deadline; try again later")

    def _is_far(self, deadline: float, demand: Demand, now: float) -> bool:
        """Whether the deadline is kept even behind all that is here, which is quicker to see than what goes before."""
        waiting_us = self.queue.backlog.total_us + self._elsewhere_us
        own_us = demand.busy_us + self.policy.fairness * demand.cost_us
        latest = max(now, *self.lanes.free_at) if self.lanes.free_at else now
        return now + _CAUTION * (latest - now + (waiting_us + own_us) / 1e6) <= deadline

    def finish_at(self, demand: Demand, priority: int, deadline: float, now: float) -> float:
        """When a request's answer can be promised if it is queued now, in seconds.

        What goes before it is what runs, what waits with a smaller key or in a higher class, and some of what will
        arrive before its own key's time has come.
        """
        key = self.key(demand, deadline, now)
        ahead_us = self.queue.backlog.ahead_us(priority, key) + self._elsewhere_us
        overtaken_s = _OVERTAKING * max(0.0, key - now) if self.queue.items else 0.0
        return now + _CAUTION * (self._occupied_s(now) + (ahead_us + demand.busy_us) / 1e6 + overtaken_s)

    def key(self, demand: Demand, deadline: float, now: float) -> float:
        """A request's place within its class: static, so that waiting makes it older than whatever comes later."""
        cost_s = demand.cost_us / 1e6
        return min(deadline - cost_s, now + self.policy.fairness * cost_s)

    def drain_s(self, now: float) -> float:
        """Predicted seconds until all that is here now is answered."""
        return self._occupied_s(now) + (self.queue.backlog.total_us + self._elsewhere_us) / 1e6

    def overloaded(self, message: str) -> Overloaded:
        """The refusal of a request that finds too much here."""
        drain_s = max(_LEAST_RETRY_S, self.drain_s(self._now))
        return Overloaded(message, retry_after_s=drain_s, jitter=self._jitter())

    @contextlib.contextmanager
    def expecting(self, model: ModelIndex, lengths: Sequence[int]) -> Iterator[None]:
        """Counts the work of a request that is admitted and on its way to the queue."""
        work_us = int(self.demand(model, lengths).work_us)
        self._elsewhere_us += work_us
        try:
            yield
        finally:
            self._elsewhere_us -= work_us

    # The queue.

    def submit(self, items: Sequence[WorkItem], priority: int, deadline: float, now: float) -> Assignment | None:
        """Queues all items of a request, or starts the only one at once where nothing else is there.

        Args:
            items: At least one, of one model.
            priority: Their class.
            deadline: When their answers become useless.
            now: The time.

        Returns:
            What was started, as by `next`; None where they wait.

        Raises:
            DeadlineExceeded: As `check`; none of them is queued.
            Overloaded: As `check`; none of them is queued.
        """
        first = items[0]
        idle = not self.queue.items and not any(self.lanes.load)
        if idle and len(items) == 1 and not self.policy.max_queue_delay_s:
            first.deadline = deadline
            return self._start_alone(first, now)
        demand = self.demand(first.model, [item.tokens for item in items])
        self.check(demand, priority, deadline, now)
        key = self.key(demand, deadline, now)
        costs = self.costs[first.model]
        prices = {first.tokens: (demand.least_us, int(demand.work_us) + 1)} if len(items) == 1 else {}
        for item in items:
            price = prices.get(item.tokens)
            if price is None:
                price = costs.least_us(item.tokens), int(costs.share_us(item.tokens)) + 1
                prices[item.tokens] = price
            item.least_us, item.work_us = price
            item.priority = priority
            item.key = key
            item.deadline = deadline
            item.queued = now
        self.queue.push(items)
        return None

    def put_back(self, items: Sequence[WorkItem]) -> None:
        """Queues items of a batch that failed once more, each to run alone, in their old places."""
        for item in items:
            item.alone = True
        self.queue.push(items)

    def cancel(self, items: Sequence[WorkItem]) -> None:
        """Takes out what still waits of a request."""
        self.queue.remove(items)

    def next(self, now: float) -> Assignment | None:
        """The next batch to run, taken out of the queue and counted on its lane; None where nothing can start."""
        self._now = now
        self.wake_at = None
        while (head := self.queue.head()) is not None and head.is_late(now):
            self.queue.remove([head])
            self._drop(head)
        if head is None:
            return None
        assignment = choose(self.queue, self.lanes, self.policy, self.costs, now)
        if assignment is None or self._waits_for_company(assignment, now):
            return None
        self.queue.remove(assignment.items)
        return self._start(assignment, now)

    def done(self, assignment: Assignment, compute_us: float | None, now: float) -> float:
        """A batch has ended; returns for how many microseconds it held its lane.

        Args:
            assignment: As `next` or `submit` gave it, to the engine that is up now.
            compute_us: What the engine spent on it; None where it failed.
            now: The time.
        """
        self._now = now
        lane, lanes = assignment.lane, self.lanes
        lanes.load[lane] -= assignment.tokens
        self._held[lane] = max(0.0, self._held[lane] - assignment.predicted_us) if lanes.load[lane] else 0.0
        lanes.free_at[lane] = now + self._held[lane] / 1e6
        occupied_us = (now - max(assignment.given, self._freed[lane])) * 1e6
        self._freed[lane] = now
        if compute_us is not None:
            items = assignment.items
            costs = self.costs[items[0].model]
            costs.observe(lane, assignment.padded_length, len(items), compute_us, occupied_us)
        return occupied_us

    # Inside.

    def _start_alone(self, item: WorkItem, now: float) -> Assignment:
        """What an idle server does with a single text, in as few steps as it can be done."""
        self._now = now
        costs = self.costs[item.model]
        table_us = costs.wide.batch_us(item.tokens, 1)
        correction = costs.corrections[WIDE]
        factor = correction.at(item.tokens)
        least_us = table_us * factor if factor < 1 else table_us
        if now + least_us / 1e6 > item.deadline:
            raise self._hopeless(least_us, item.deadline - now)
        predicted_us = table_us * factor + correction.overhead_us
        return self._start(Assignment(WIDE, [item], item.tokens, item.tokens, 0, now, predicted_us), now)

    def _hopeless(self, least_us: float, left_s: float) -> DeadlineExceeded:
        self.refusals["hopeless"] += 1
        return DeadlineExceeded(
            f"the deadline cannot be kept: an idle server needs about {least_us / 1e3:.1f} ms for this request,"
            f" and {max(0.0, left_s) * 1e3:.1f} ms are left"
        )

    def _full(self, message: str) -> Overloaded:
        self.refusals["queue_full"] += 1
        return self.overloaded(message)

    def _start(self, assignment: Assignment, now: float) -> Assignment:
        lane, lanes = assignment.lane, self.lanes
        lanes.load[lane] += assignment.tokens
        self._held[lane] += assignment.predicted_us
        lanes.free_at[lane] = max(now, lanes.free_at[lane]) + assignment.predicted_us / 1e6
        return assignment

    def _waits_for_company(self, assignment: Assignment, now: float) -> bool:
        """Whether a batch that could still grow has time for it; for those who prefer throughput to latency."""
        if not self.policy.max_queue_delay_s or not assignment.could_grow:
            return False
        items = assignment.items
        latest = min([item.deadline for item in items]) - 2 * assignment.predicted_us / 1e6
        until = min(min([item.queued for item in items]) + self.policy.max_queue_delay_s, latest)
        if until <= now:
            return False
        self.wake_at = until
        return True

    def _occupied_s(self, now: float) -> float:
        """Seconds until the device has done what it was given: of narrow lanes, on average."""
        free_at = self.lanes.free_at
        if len(free_at) == 1 or (free_at and self.lanes.load[WIDE]):
            return max(0.0, free_at[WIDE] - now)
        narrow = [max(0.0, free - now) for free in free_at[1:]]
        return sum(narrow) / len(narrow) if narrow else 0.0
