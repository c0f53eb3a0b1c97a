"""Moves work between the queue and the engine: the only place where decisions become actions.

A request's texts are queued together; whenever a lane is idle the `Scheduler` says what runs on it. Each request
gets exactly one outcome: all of its texts' rows, or one error.

Each model has its place on an engine. Mostly there is one engine. While another takes over, what was queued for a
model that goes runs where that model is, and what comes for the one that follows it runs on the new engine; the
scheduler sees one device, whose lanes are never given to both at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from serving.errors import BertserveError, DeadlineExceeded, EngineFault, EngineLost, NonFiniteOutput, NotReady
from serving.inference.deadline_timer import Alarms
from serving.records import DEFAULT_PRIORITY, Batch, ModelIndex
from serving.scheduling.queue import WorkItem
from serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.engine.base import Engine
    from serving.inference.deadline_timer import Alarm
    from serving.records import BatchOutput, EncodedText, Row
    from serving.scheduling.batcher import Assignment, Policy
    from serving.scheduling.cost import ModelCosts


class BatchObserver(Protocol):
    """Who is told what becomes of batches."""

    def batch_started(self, assignment: Assignment) -> None:
        """A batch has been given to its lane."""

    def batch_ended(self, assignment: Assignment, occupied_us: float) -> None:
        """It has ended, and held its lane for so many microseconds; 0 where its engine has gone."""


class _Place(NamedTuple):
    """Where a model runs: on which engine, and under which number there."""

    engine: Engine
    number: ModelIndex


_TOO_LATE = "the deadline passed before the answer was there"


class Ticket:
    """A request's place in the queue; awaiting `wait` gives its rows.

    Attributes:
        model: Which model it is for.
        queue_us: Longest wait of its texts for an engine.
        compute_us: Longest time an engine spent on one of its batches.
        started: Whether an engine has been given any of it.
    """

    def __init__(self, model: ModelIndex, texts: Sequence[EncodedText], now: float) -> None:
        self.model = model
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
        observer: Told of each batch.
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
        self.observer = observer
        self._clock = clock
        self._places: dict[ModelIndex, _Place] = {}
        self._generation = 0
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
        if model not in self._places:
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
                self._run(assignment, now)
            else:
                self._pump()
            await ticket.future
        finally:
            self._forget(ticket)
            ticket.items.clear()  # item and ticket hold one another: without this only a collection frees them
        return ticket

    def engine_up(
        self, engine: Engine, costs: Sequence[ModelCosts], models: Sequence[ModelIndex] | None = None
    ) -> None:
        """An engine takes batches from now on; a model that had its place on another has it here now.

        Args:
            engine: The engine.
            costs: Of each model, of whichever engine.
            models: Those that it holds, in its own order; None for all, in their order.
        """
        if self._places:
            self.scheduler.engine_joins(len(engine.lanes), costs)
        else:
            self._generation += 1
            self.scheduler.engine_up(len(engine.lanes), costs)
        held = models if models is not None else [ModelIndex(index) for index in range(len(costs))]
        self._places |= {model: _Place(engine, ModelIndex(number)) for number, model in enumerate(held)}
        self._pump()

    def engine_down(self, error: BertserveError, engine: Engine | None = None) -> None:
        """An engine has gone: everything that waits for it fails with `error`.

        Args:
            error: For the clients.
            engine: Which one; None for all that there are.
        """
        if engine is None:
            self._places.clear()
            self.fail_all(error)
            return
        self._forget_places(engine)
        for ticket in list(self._tickets):
            if ticket.model not in self._places:
                self._fail(ticket, error)

    def engine_leaves(self, engine: Engine) -> None:
        """An engine that nothing waits for any more takes no batches from now on."""
        self._forget_places(engine)
        if self._places:  # else the next engine brings its own lanes, and batches may still have those that were
            self.scheduler.resize(max(len(place.engine.lanes) for place in self._places.values()))

    def _forget_places(self, engine: Engine) -> None:
        self._places = {model: place for model, place in self._places.items() if place.engine is not engine}

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
        return Counter(ticket.model for ticket in self._tickets if not ticket.started)

    def predicted_wait_s(self) -> float:
        """Predicted seconds until all that is here now is answered."""
        return self.scheduler.drain_s(self._clock())

    def _pump(self) -> None:
        """Starts what can start. A batch that completes at once comes back here and leaves it to the loop."""
        if self._pumping or not self.scheduler.queue.items:
            return
        self._pumping = True
        try:
            while self._places and (assignment := self.scheduler.next(now := self._clock())):
                self._run(assignment, now)
        finally:
            self._pumping = False
        self._set_wake(self.scheduler.wake_at)

    def _set_wake(self, when: float | None) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if when is not None:
            self._wake = self._alarms.at(when, self._pump)

    def _run(self, assignment: Assignment, now: float) -> None:
        items = assignment.items
        for item in items:
            ticket = _ticket(item)
            ticket.started = True
            ticket.queue_us = max(ticket.queue_us, (now - ticket.submitted) * 1e6)
        engine, number = self._places[items[0].model]
        batch = Batch(number, [item.text for item in items])
        generation = self._generation
        self.observer.batch_started(assignment)
        engine.submit(assignment.lane, batch, lambda outcome: self._done(generation, assignment, outcome))

    def _done(self, generation: int, assignment: Assignment, outcome: BatchOutput | BertserveError) -> None:
        occupied_us = 0.0
        if generation == self._generation:
            compute_us = None if isinstance(outcome, BertserveError) else outcome.compute_us
            held_us = self.scheduler.done(assignment, compute_us, self._clock())
            occupied_us = 0.0 if isinstance(outcome, EngineLost) else held_us
        if not isinstance(outcome, BertserveError):
            self._deliver(assignment.items, outcome)
        elif isinstance(outcome, EngineFault) and len(assignment.items) > 1:
            # One text may have failed the batch; each now runs by itself, so that only that one fails.
            self.scheduler.put_back([item for item in assignment.items if not _ticket(item).future.done()])
        else:
            for item in assignment.items:
                self._fail(_ticket(item), outcome)
        self._pump()
        self.observer.batch_ended(assignment, occupied_us)

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
