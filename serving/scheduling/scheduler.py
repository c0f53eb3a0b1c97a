"""The scheduler of one device slot: queue, choice, prediction and cost correction, without a clock of its own.

Its driver passes the time, in seconds of any monotonic clock, and acts on the results:

    scheduler.engine_up(lanes, costs)
    permit = scheduler.admission.permit(...)           or `admit`, which may reject a request by an estimate
    permit.confirm(lengths, now)                       after tokenization; may reject it too
    scheduler.submit(items, permit, now)               queues all of a request's items, or starts its only one
    while assignment := scheduler.next(now): ...       what it returns has left the queue and must run
    occupied_us = scheduler.done(assignment, now)      and then `next` again, as after `submit`
    scheduler.learn(assignment, compute_us, occupied_us)   when there is time for it
    scheduler.cancel(items)                            at any time

The server's `Dispatcher` drives it from an event loop, a simulator from a list of events.
"""

from __future__ import annotations

import math
import random
from collections import deque
from typing import TYPE_CHECKING

from bertserve.serving.records import BULK
from bertserve.serving.scheduling.admission import Admission
from bertserve.serving.scheduling.batcher import WIDE, Assignment, Lanes, assign, choose, fill_groups
from bertserve.serving.scheduling.load_predictor import BULK_SHARE, LoadPredictor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.scheduling.admission import AdmissionLimits, Permit
    from bertserve.serving.scheduling.batcher import Policy
    from bertserve.serving.scheduling.cost import ModelCosts
    from bertserve.serving.scheduling.queue import WorkItem, WorkQueue

_BULK_SLICE_US = 8000.0
"""Maximum time of a bulk batch while other requests arrive, which wait for it; a single text may always run."""

_LATELY_S = 5.0
"""After this time without other requests, bulk work uses the device without limits."""


class Scheduler:
    """See the module.

    Attributes:
        admission: Admits requests.
        online_us: Device time of batches other than bulk work, in microseconds.
        bulk_us: The same for bulk work.
    """

    def __init__(
        self,
        policy: Policy,
        limits: AdmissionLimits,
        drop: Callable[[WorkItem], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Starts without an engine; `drop` gets each item that left the queue as late, and may call `cancel`."""
        self.predictor = LoadPredictor(policy)
        self.queue = self.predictor.queue
        self.bulk = self.predictor.bulk
        self.admission = Admission(self.predictor, limits, jitter=jitter)
        self.online_us = self.bulk_us = 0.0
        self._owed_us = 0.0
        self._last_online = -_LATELY_S
        self._drop = drop
        self._held: list[float] = []
        self._freed: list[float] = []
        self._suspects: deque[WorkItem] = deque()
        self._tried: Assignment | None = None

    @property
    def policy(self) -> Policy:
        return self.predictor.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.predictor.policy = policy

    @property
    def lanes(self) -> Lanes:
        return self.predictor.lanes

    @property
    def costs(self) -> Sequence[ModelCosts]:
        """The costs of each model; empty before the first engine."""
        return self.predictor.costs

    @property
    def waiting(self) -> int:
        return self.queue.items + self.bulk.items

    # The engine.

    def engine_up(self, lanes: int, costs: Sequence[ModelCosts]) -> None:
        """An engine with this number of lanes takes batches from now on; the first lane is the wide one."""
        self.predictor.lanes = Lanes.idle(lanes)
        self._held = [0.0] * lanes
        self._freed = [0.0] * lanes
        self.predictor.costs = costs
        self.predictor.back_at = self._tried = None

    def engine_restarts(self, back_at: float) -> None:
        """There is no engine until about that time: queued work is kept, and predictions include the delay."""
        self.predictor.back_at = back_at

    def engine_joins(self, lanes: int, costs: Sequence[ModelCosts]) -> None:
        """An engine takes batches beside one that still works; lanes of the same number share a part of the device.

        `costs` are those of every model.
        """
        self.resize(max(lanes, len(self.lanes.load)))
        self.predictor.costs = costs

    def resize(self, lanes: int) -> None:
        """Sets the number of lanes; removed ones are idle."""
        load = self.lanes.load
        del load[lanes:]
        load.extend([0] * (lanes - len(load)))
        for times in (self.lanes.free_at, self._held, self._freed):
            del times[lanes:]
            times.extend([0.0] * (lanes - len(times)))

    # The queue.

    def submit(
        self, items: Sequence[WorkItem], permit: Permit, now: float, *, at_once: bool = True
    ) -> Assignment | None:
        """Queues all items of a request of one model, or starts a single one if the device is idle and `at_once`.

        Returns what was started, as `next` does; None if the items wait. The permit must have been confirmed at this
        time.
        """
        first, demand = items[0], permit.demand
        if demand is None:
            raise ValueError("the permit has not been confirmed")
        if permit.priority != BULK:
            self._last_online = now
        if at_once and len(items) == 1 and self.predictor.idle:
            first.priority = permit.priority
            first.deadline = permit.due
            bulk = float(permit.priority == BULK)
            alone = Assignment(WIDE, [first], first.tokens, first.tokens, 0, now, demand.cost_us, bulk=bulk)
            return self._start(alone, now)
        key = self.predictor.key(demand, permit.due, now)
        for item in items:
            item.priority = permit.priority
            item.key = key
            item.deadline = permit.due
        if len(items) == 1:
            first.least_us, first.work_us = demand.least_us, int(demand.work_us) + 1
        else:
            self._price(items, self.costs[first.model])
        self._queue_of(first).push(items)
        return None

    def _price(self, items: Sequence[WorkItem], costs: ModelCosts) -> None:
        prices: dict[int, tuple[float, int]] = {}
        for item in items:
            price = prices.get(item.tokens)
            if price is None:
                price = costs.least_us(item.tokens), int(costs.share_us(item.tokens)) + 1
                prices[item.tokens] = price
            item.least_us, item.work_us = price

    def put_back(self, items: Sequence[WorkItem]) -> None:
        """Queues items of a failed batch again, each to run alone, at their old positions."""
        for item in items:
            item.alone = True
        self.take_back(items)

    def take_back(self, items: Sequence[WorkItem]) -> None:
        """Queues items again that no engine has computed, at their old positions."""
        for item in items:
            self._queue_of(item).push([item])

    def suspect(self, items: Sequence[WorkItem]) -> None:
        """Queues items of a batch again during which an engine crashed.

        They go before all others, one at a time and with nothing beside them, so that the culprit affects only itself.
        """
        for item in items:
            item.suspect = True
        self._suspects.extend(items)
        self.put_back(items)

    def cancel(self, items: Sequence[WorkItem]) -> None:
        """Removes the waiting items of a request."""
        if items:
            self._queue_of(items[0]).remove(items)

    def next(self, now: float) -> Assignment | None:
        """The next batch to run, taken out of the queue and counted on its lane; None if nothing can start."""
        predictor = self.predictor
        if self._tried is not None:
            return None
        if (suspect := self._suspect(now)) is not None:
            return None if any(self.lanes.load) else self._try(suspect, now)
        state = predictor.lanes, predictor.policy, predictor.costs, now
        head = self._head(self.queue, now)
        bulk = self._head(self.bulk, now) if self.bulk.items else None
        if bulk is not None and (head is None or self._is_due(bulk)):
            alone = head is None and now - self._last_online >= _LATELY_S
            assignment = choose(
                self.bulk,
                *state,
                most_us=math.inf if alone else _BULK_SLICE_US,
                on_wide=head is None and not alone and not predictor.policy.apart,
            )
        elif head is not None:
            assignment = choose(self.queue, *state)
        else:
            return None
        if assignment is None:
            return None
        own = assignment.items
        if bulk is not None and own[0].priority != BULK:
            begin = max(now, predictor.lanes.free_at[assignment.lane])
            costs = predictor.costs[own[0].model]
            assignment = fill_groups(assignment, self.bulk, self.queue, begin, self._owed_us, predictor.policy, costs)
            self.bulk.remove(assignment.items[len(own) :])
        self._queue_of(own[0]).remove(own)
        return self._start(assignment, now)

    def done(self, assignment: Assignment, now: float) -> float:
        """Ends a batch of the present engine; returns for how many microseconds it held its lane."""
        if assignment is self._tried:
            self._tried = None
        lane, lanes = assignment.lane, self.predictor.lanes
        lanes.load[lane] -= assignment.tokens
        if lanes.load[lane]:
            self._held[lane] = max(0.0, self._held[lane] - assignment.predicted_us)
        else:
            self._held[lane] = 0.0
        lanes.free_at[lane] = now + self._held[lane] / 1e6
        occupied_us = (now - max(assignment.given_at, self._freed[lane])) * 1e6
        self._freed[lane] = now
        self._count(assignment, occupied_us)
        return occupied_us

    def learn(self, assignment: Assignment, compute_us: float, occupied_us: float) -> None:
        """Corrects costs by a finished batch; `compute_us` is the engine's time."""
        items = assignment.items
        costs = self.predictor.costs[items[0].model]
        costs.observe(assignment.lane, assignment.padded_length, len(items), compute_us, occupied_us)

    # Inside.

    def _queue_of(self, item: WorkItem) -> WorkQueue:
        return self.bulk if item.priority == BULK else self.queue

    def _head(self, queue: WorkQueue, now: float) -> WorkItem | None:
        """The first item that is not late; those before it are dropped."""
        while (head := queue.head()) is not None and head.is_late(now):
            queue.remove([head])
            self._drop(head)
        return head

    def _suspect(self, now: float) -> WorkItem | None:
        """The first suspect that still waits; late ones are dropped."""
        while self._suspects:
            suspect = self._suspects[0]
            if suspect.waits and not suspect.is_late(now):
                return suspect
            self._suspects.popleft()
            if suspect.waits:
                self._queue_of(suspect).remove([suspect])
                self._drop(suspect)
        return None

    def _try(self, suspect: WorkItem, now: float) -> Assignment:
        self._queue_of(suspect).remove([suspect])
        costs = self.costs[suspect.model]
        self._tried = self._start(assign(WIDE, [suspect], suspect.tokens, self.policy, costs, now), now)
        return self._tried

    # The share of bulk work. While it waits, it is owed a part of the time that other work takes of the device. Once
    # that is enough for a batch, nothing else starts before it. A batch is charged its predicted time when it starts,
    # and the rest when it ends. Idle time that it uses is free, except for one batch, which delays its next turn
    # slightly.

    def _is_due(self, bulk: WorkItem) -> bool:
        return self._owed_us >= max(min(_BULK_SLICE_US, self.bulk.backlog.total_us), bulk.work_us)

    def _charge(self, assignment: Assignment, us: float) -> None:
        own_us = assignment.bulk * self._device_us(assignment.lane, us)
        self._owed_us = max(self._owed_us - own_us, -_BULK_SLICE_US)

    def _device_us(self, lane: int, us: float) -> float:
        """Time of the whole device that corresponds to time of a lane."""
        predictor = self.predictor
        lanes = len(predictor.lanes.load)
        return us if lanes == 1 or (lane == WIDE and not predictor.policy.apart) else us / (lanes - 1)

    def _count(self, assignment: Assignment, occupied_us: float) -> None:
        bulk, us = assignment.bulk, self._device_us(assignment.lane, occupied_us)
        self.bulk_us += bulk * us
        self.online_us += (1 - bulk) * us
        if bulk:
            self._charge(assignment, occupied_us - assignment.predicted_us)
        if self.bulk.items:
            self._owed_us += (1 - bulk) * us * BULK_SHARE / (1 - BULK_SHARE)

    def _start(self, assignment: Assignment, now: float) -> Assignment:
        lane, lanes = assignment.lane, self.predictor.lanes
        lanes.load[lane] += assignment.tokens
        self._held[lane] += assignment.predicted_us
        if assignment.bulk:
            self._charge(assignment, assignment.predicted_us)
        lanes.free_at[lane] = max(now, lanes.free_at[lane]) + assignment.predicted_us / 1e6
        return assignment
