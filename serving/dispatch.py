"""Moves work between the queue and the engine: the only place where decisions become actions.

A request's texts are queued together; whenever a lane is idle the pure `batcher` chooses what runs on it.
Each request gets exactly one outcome: all of its texts' rows, or one error.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from serving.alarms import Alarms
from serving.errors import BertserveError, DeadlineExceeded, EngineFault, NonFiniteOutput, NotReady
from serving.records import Batch
from serving.scheduling.batcher import choose
from serving.scheduling.queue import WorkItem, WorkQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.alarms import Alarm
    from serving.engine.base import Engine
    from serving.records import BatchOutput, EncodedText, ModelIndex, Row
    from serving.scheduling.batcher import Assignment, Policy


_TOO_LATE = "the deadline passed before the answer was there"


class Ticket:
    """A request's place in the queue; awaiting `wait` gives its rows.

    Attributes:
        queue_us: Longest wait of its texts for an engine.
        compute_us: Longest time an engine spent on one of its batches.
    """

    def __init__(self, model: ModelIndex, texts: Sequence[EncodedText]) -> None:
        self.items = [WorkItem(model, text, self, index) for index, text in enumerate(texts)]
        self.rows: list[Row | None] = [None] * len(texts)
        self.missing = len(texts)
        self.submitted = time.perf_counter()
        self.queue_us = 0.0
        self.compute_us = 0.0
        self.alarm: Alarm | None = None
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def result(self) -> list[Row]:
        """Each text's row of every output, once the future is done."""
        return [row for row in self.rows if row is not None]


class Dispatcher:
    """One device slot's queue and its engine, if it has one now."""

    def __init__(self, policy: Policy, observe_batch: Callable[[int], None]) -> None:
        """Starts without an engine.

        Args:
            policy: For the batcher.
            observe_batch: Told the size of each batch that starts.
        """
        self._policy = policy
        self._observe_batch = observe_batch
        self._engine: Engine | None = None
        self._load: list[int] = []
        self._pumping = False
        self._tickets: set[Ticket] = set()
        self._alarms = Alarms()
        self.queue = WorkQueue()

    async def run(self, model: ModelIndex, texts: Sequence[EncodedText], deadline: float) -> Ticket:
        """Queues a request's texts together and waits until all are answered.

        A cancelled caller takes its texts out of the queue at once; what an engine already computes for it
        is thrown away.

        Args:
            model: Which model.
            texts: At least one.
            deadline: When the answer becomes useless, on the event loop's clock.

        Raises:
            NotReady: There is no engine now, or the server ends.
            DeadlineExceeded: The deadline passed first.
            EngineLost: The engine ended.
            EngineFault: The engine failed on one of the texts.
            NonFiniteOutput: It answered NaN or infinity.
        """
        if self._engine is None:
            raise NotReady("the engine is being started; try again", retry_after_s=1)
        if deadline <= asyncio.get_running_loop().time():
            raise DeadlineExceeded("the deadline had passed before the request could be queued")
        ticket = Ticket(model, texts)
        self._tickets.add(ticket)
        ticket.alarm = self._alarms.at(deadline, lambda: self._fail(ticket, DeadlineExceeded(_TOO_LATE)))
        self.queue.push(ticket.items)
        self._pump()
        try:
            await ticket.future
        finally:
            self._forget(ticket)
            ticket.items.clear()  # item and ticket hold one another: without this only a collection frees them
        return ticket

    def engine_up(self, engine: Engine) -> None:
        """An engine takes batches from now on."""
        self._engine = engine
        self._load = [0] * len(engine.lanes)
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

    def _pump(self) -> None:
        """Starts what can start. A batch that completes at once comes back here and leaves it to the loop."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (
                self._engine is not None
                and self.queue.items
                and (assignment := choose(self.queue, self._load, self._policy))
            ):
                self._start(self._engine, assignment)
        finally:
            self._pumping = False

    def _start(self, engine: Engine, assignment: Assignment) -> None:
        now = time.perf_counter()
        items = assignment.items
        self.queue.remove(items)
        tokens = assignment.tokens
        self._load[assignment.lane] += tokens
        self._observe_batch(len(items))
        for item in items:
            ticket = _ticket(item)
            ticket.queue_us = max(ticket.queue_us, (now - ticket.submitted) * 1e6)
        batch = Batch(items[0].model, [item.text for item in items])
        engine.submit(assignment.lane, batch, lambda outcome: self._done(engine, assignment, tokens, outcome))

    def _done(self, engine: Engine, assignment: Assignment, tokens: int, outcome: BatchOutput | BertserveError) -> None:
        if engine is self._engine:
            self._load[assignment.lane] -= tokens
        if not isinstance(outcome, BertserveError):
            self._deliver(assignment.items, outcome)
        elif isinstance(outcome, EngineFault) and len(assignment.items) > 1:
            self._retry_alone(assignment.items)
        else:
            for item in assignment.items:
                self._fail(_ticket(item), outcome)
        self._pump()

    def _deliver(self, items: Sequence[WorkItem], output: BatchOutput) -> None:
        for place, item in enumerate(items):
            ticket = _ticket(item)
            if not output.finite[place]:
                self._fail(ticket, NonFiniteOutput("the model's answer to this input is not finite"))
                continue
            ticket.rows[item.index] = tuple(array[place] for array in output.arrays)
            ticket.compute_us = max(ticket.compute_us, output.compute_us)
            ticket.missing -= 1
            if ticket.missing == 0 and not ticket.future.done():
                ticket.future.set_result(None)

    def _retry_alone(self, items: Sequence[WorkItem]) -> None:
        """One text may have failed the batch; each now runs by itself, so that only that one fails."""
        for item in items:
            item.alone = True
        self.queue.push([item for item in reversed(items) if not _ticket(item).future.done()])

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
                self.queue.remove(ticket.items)


def _ticket(item: WorkItem) -> Ticket:
    if not isinstance(item.owner, Ticket):
        raise TypeError("a work item without a ticket")
    return item.owner
