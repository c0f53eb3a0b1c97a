"""Moves work between the queue and the engine: the only place where decisions become actions.

A request's texts are queued together; whenever a lane is idle the `Scheduler` says what runs on it. Each request
gets exactly one outcome: all of its texts' rows, or one error.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from serving.alarms import Alarms
from serving.errors import BertserveError, DeadlineExceeded, EngineFault, NonFiniteOutput, NotReady
from serving.records import DEFAULT_PRIORITY, Batch
from serving.scheduling.queue import WorkItem
from serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.alarms import Alarm
    from serving.engine.base import Engine
    from serving.records import BatchOutput, EncodedText, ModelIndex, Row
    from serving.scheduling.batcher import Assignment, Policy
    from serving.scheduling.cost import ModelCosts


class BatchObserver(Protocol):
    """Who is told what becomes of batches."""

    def batch_started(self, assignment: Assignment) -> None:
        """A batch has been given to its lane."""

    def batch_ended(self, assignment: Assignment, occupied_us: float) -> None:
        """It has ended, and held its lane for so many microseconds; 0 where its engine has gone."""


_TOO_LATE = "the deadline passed before the answer was there"


class Ticket:
    """A request's place in the queue; awaiting `wait` gives its rows.

    Attributes:
        queue_us: Longest wait of its texts for an engine.
        compute_us: Longest time an engine spent on one of its batches.
        started: Whether an engine has been given any of it.
    """

    def __init__(self, model: ModelIndex, texts: Sequence[EncodedText], now: float) -> None:
        self.items = [WorkItem(model, text, self, index) for index, text in enumerate(texts)]
        self.rows: list[Row | None] = [None] * len(texts)
        self.missing = len(texts)
        self.submitted = now
        self.queue_us = 0.0
        self.compute_us = 0.0
        self.started = False
        self.alarm: Alarm | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def result(self) -> list[Row]:
        """Each text's row of every output, once the future is done."""
        return [row for row in self.rows if row is not None]


class Dispatcher:
    """One device slot's scheduler and its engine, if it has one now.

    Attributes:
        scheduler: What decides.
        misses: Deadlines missed after admission, by where the request was: `queue` or `engine`.
        non_finite: Texts whose answers were not finite.
    """

    def __init__(
        self,
        policy: Policy,
        max_queue_tokens: int,
        observer: BatchObserver,
        clock: Callable[[], float] = time.perf_counter,
        scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        """Starts without an engine.

        Args:
            policy: For the scheduler.
            max_queue_tokens: Tokens that may be in flight.
            observer: Told of each batch.
            clock: Seconds; the event loop's own clock, or one that goes with it, as both read CLOCK_MONOTONIC.
            scheduler: What decides.
        """
        self.scheduler = scheduler(policy, max_queue_tokens, self._drop)
        self.misses = {"queue": 0, "engine": 0}
        self.non_finite = 0
        self._observer = observer
        self._clock = clock
        self._engine: Engine | None = None
        self._pumping = False
        self._tickets: set[Ticket] = set()
        self._alarms = Alarms()
        self._wake: Alarm | None = None

    async def run(
        self, model: ModelIndex, texts: Sequence[EncodedText], deadline: float, priority: int = DEFAULT_PRIORITY
    ) -> Ticket:
        """Queues a request's texts together and waits until all are answered.

        A cancelled caller takes its texts out of the queue at once; what an engine already computes for it
        is thrown away.

        Args:
            model: Which model.
            texts: At least one.
            deadline: When the answer becomes useless, on the dispatcher's clock.
            priority: The request's class.

        Raises:
            NotReady: There is no engine now, or the server ends.
            Overloaded: The answer would come after the deadline, by what waits before it.
            DeadlineExceeded: The deadline passed first, or even an idle server could not keep it.
            EngineLost: The engine ended.
            EngineFault: The engine failed on one of the texts.
            NonFiniteOutput: It answered NaN or infinity.
        """
        engine = self._engine
        if engine is None:
            raise NotReady("the engine is being started; try again", retry_after_s=1)
        now = self._clock()
        if deadline <= now:
            raise DeadlineExceeded("the deadline had passed before the request could be queued")
        ticket = Ticket(model, texts, now)
        try:
            assignment = self.scheduler.submit(ticket.items, priority, deadline, now)
            self._tickets.add(ticket)
            ticket.alarm = self._alarms.at(deadline, lambda: self._miss(ticket))
            if assignment is not None:
                self._run(engine, assignment, now)
            else:
                self._pump()
            await ticket.future
        finally:
            self._forget(ticket)
            ticket.items.clear()  # item and ticket hold one another: without this only a collection frees them
        return ticket

    def engine_up(self, engine: Engine, costs: Sequence[ModelCosts]) -> None:
        """An engine takes batches from now on; what they cost on it is known for each model."""
        self._engine = engine
        self.scheduler.engine_up(len(engine.lanes), costs)
        self._pump()

    def engine_down(self, error: BertserveError) -> None:
        """The engine has gone: everything that waits for it fails with `error`."""
        self._engine = None
        self.fail_all(error)

    def fail_all(self, error: BertserveError) -> None:
        """Answers every request that is still here with an error."""
        for ticket in list(self._tickets):
            self._fail(ticket, error)

    @property
    def requests(self) -> int:
        """Requests that wait or are being computed."""
        return len(self._tickets)

    def waiting(self) -> Counter[ModelIndex]:
        """Requests of each model of which no text has reached the engine yet."""
        return Counter(ticket.items[0].model for ticket in self._tickets if not ticket.started)

    def predicted_wait_s(self) -> float:
        """Predicted seconds until all that is here now is answered."""
        return self.scheduler.drain_s(self._clock())

    def _pump(self) -> None:
        """Starts what can start. A batch that completes at once comes back here and leaves it to the loop."""
        if self._pumping or not self.scheduler.queue.items:
            return
        self._pumping = True
        try:
            while self._engine is not None and (assignment := self.scheduler.next(now := self._clock())):
                self._run(self._engine, assignment, now)
        finally:
            self._pumping = False
        self._set_wake(self.scheduler.wake_at)

    def _set_wake(self, when: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if when is not None:
            self._wake = self._alarms.at(when, self._pump)

    def _run(self, engine: Engine, assignment: Assignment, now: float) -> None:
        items = assignment.items
        for item in items:
            ticket = _ticket(item)
            ticket.started = True
            ticket.queue_us = max(ticket.queue_us, (now - ticket.submitted) * 1e6)
        batch = Batch(items[0].model, [item.text for item in items])
        self._observer.batch_started(assignment)
        engine.submit(assignment.lane, batch, lambda outcome: self._done(engine, assignment, outcome))

    def _done(self, engine: Engine, assignment: Assignment, outcome: BatchOutput | BertserveError) -> None:
        occupied_us = 0.0
        if engine is self._engine:
            compute_us = None if isinstance(outcome, BertserveError) else outcome.compute_us
            occupied_us = self.scheduler.done(assignment, compute_us, self._clock())
        if not isinstance(outcome, BertserveError):
            self._deliver(assignment.items, outcome)
        elif isinstance(outcome, EngineFault) and len(assignment.items) > 1:
            # One text may have failed the batch; each now runs by itself, so that only that one fails.
            self.scheduler.put_back([item for item in assignment.items if not _ticket(item).future.done()])
        else:
            for item in assignment.items:
                self._fail(_ticket(item), outcome)
        self._pump()
        self._observer.batch_ended(assignment, occupied_us)

    def _deliver(self, items: Sequence[WorkItem], output: BatchOutput) -> None:
        for place, item in enumerate(items):
            ticket = _ticket(item)
            if not output.finite[place]:
                self.non_finite += 1
                self._fail(ticket, NonFiniteOutput("the model's answer to this input is not finite"))
                continue
            ticket.rows[item.index] = tuple(array[place] for array in output.arrays)
            ticket.compute_us = max(ticket.compute_us, output.compute_us)
            ticket.missing -= 1
            if ticket.missing == 0 and not ticket.future.done():
                ticket.future.set_result(None)

    def _drop(self, item: WorkItem) -> None:
        """The item's turn has come too late: nobody would wait for its answer."""
        self._miss(_ticket(item))

    def _miss(self, ticket: Ticket) -> None:
        if not ticket.future.done():
            self.misses["engine" if ticket.started else "queue"] += 1
        self._fail(ticket, DeadlineExceeded(_TOO_LATE))

    def _fail(self, ticket: Ticket, error: BertserveError) -> None:
        if not ticket.future.done():
            ticket.future.set_exception(error)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        if ticket in self._tickets:
            self._tickets.discard(ticket)
            if ticket.alarm is not None:
                ticket.alarm.cancel()
            if ticket.missing:
                self.scheduler.cancel(ticket.items)


def _ticket(item: WorkItem) -> Ticket:
    if not isinstance(item.owner, Ticket):
        raise TypeError("a work item without a ticket")
    return item.owner
