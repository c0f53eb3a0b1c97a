"""Moves work between the queue and the engine: the only place where decisions become actions.

The texts of a request are queued together. When a lane is idle, the `Scheduler` decides what runs on it. Each request
gets exactly one outcome: the rows of all its texts, or one error.

While an engine that ended is being replaced, requests wait for the next one until their own deadlines. Texts that the
ended engine had started are retried once, one at a time with nothing beside them. A text that ends that engine too is
rejected from then on.

Usually there is one engine. While another takes over, each model runs on the engine that holds it. The scheduler sees
one device, and never gives a lane to both engines at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from enum import Enum, auto
from functools import partial
from itertools import count, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from bertserve.serving.engine.base import Batch
from bertserve.serving.errors import BertserveError, EngineFault, EngineLost, NonFiniteOutput, NotReady, too_late
from bertserve.serving.inference.deadline_timer import DeadlineTimer
from bertserve.serving.inference.deadly_texts import DeadlyTexts
from bertserve.serving.records import BULK, ModelIndex
from bertserve.serving.scheduling.queue import WorkItem
from bertserve.serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bertserve.serving.engine.base import BatchOutput, Engine
    from bertserve.serving.errors import DeadlineExceeded
    from bertserve.serving.inference.deadline_timer import Deadline
    from bertserve.serving.records import EncodedText
    from bertserve.serving.scheduling.admission import AdmissionLimits, Permit
    from bertserve.serving.scheduling.batcher import Assignment, Policy
    from bertserve.serving.scheduling.cost import ModelCosts


class Answered(Protocol):
    """What is told that a request is answered: an `asyncio.Future`, or a reply that needs no task."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...

    def set_exception(self, exception: BertserveError, /) -> None: ...


class BatchObserver(Protocol):
    def batch_started(self, assignment: Assignment) -> None: ...

    def batch_ended(self, assignment: Assignment, occupied_us: float) -> None:
        """`occupied_us` is the time for which the batch held its lane; 0 if its engine has ended."""


class _Choice(Enum):
    """The choice of batches.

    FREE: None is underway.
    UNDERWAY: Batches are chosen and started until none can start.
    REFUSED: The same, and an engine has just refused a batch, so no further one starts.
    HELD: No batch starts, so that requests that start together can be in one.
    """

    FREE = auto()
    UNDERWAY = auto()
    REFUSED = auto()
    HELD = auto()


class _EngineModel(NamedTuple):
    """The engine that runs a model, and the model's position there."""

    engine: Engine
    position: ModelIndex


_TEXT = attrgetter("text")


class PendingRequest:
    """A request that waits or is being computed; `Dispatcher.run` returns it when it is answered.

    Its items refer to it. It does not refer to them, and so is free as soon as it is answered.

    Attributes:
        rows: The row of every output for each text; valid when the future is done.
        queue_us: Longest wait of its texts for an engine.
        compute_us: Longest time an engine spent on one of its batches.
        started: Whether an engine has received any of its texts.
    """

    cached = False

    def __init__(self, permit: Permit, texts: Sequence[EncodedText], now: float, future: Answered) -> None:
        self.permit = permit
        self.texts = texts
        self.rows: list[Any] = [None] * len(texts)
        self.missing = len(texts)
        self.submitted = now
        self.queue_us = 0.0
        self.compute_us = 0.0
        self.started = False
        self.deadline: Deadline | None = None
        self.future = future


class DispatcherBulkLoad(msgspec.Struct, frozen=True):
    """The figures of `DispatcherLoad` for bulk work."""

    queued_texts: int
    queued_tokens: int
    queued_work_us: float
    admitted_tokens: int
    admitted_limit: int
    refusals: Mapping[str, int]
    misses: int


class DispatcherLoad(msgspec.Struct, frozen=True):
    """A dispatcher's current load, and its rejections and misses so far; bulk work is counted separately.

    Attributes:
        requests: Requests of all priorities, including bulk work.
        queued_work_us: Predicted time to compute the queued texts.
        wait_s: Predicted time until all current requests are answered.
        restart_s: The part of `wait_s` in which an ended engine is replaced.
        admitted_tokens: Tokens in flight.
        admitted_limit: Maximum tokens in flight.
        lane_tokens: Tokens that each lane is computing.
        refusals: Requests rejected at admission, by reason.
        misses: Deadlines missed after admission, by where the request was: `queue`, `engine`, or `finish` after it.
        non_finite: Texts whose answers were not finite.
        device_us: Device time of batches, by `online` and `bulk`.
    """

    requests: int
    queued_texts: int
    queued_tokens: int
    queued_work_us: float
    wait_s: float
    restart_s: float
    admitted_tokens: int
    admitted_limit: int
    lane_tokens: Sequence[int]
    refusals: Mapping[str, int]
    misses: Mapping[str, int]
    non_finite: int
    device_us: Mapping[str, float]
    bulk: DispatcherBulkLoad


class Dispatcher:
    """The scheduler of one device slot, and its engine if it has one.

    The clock counts seconds and agrees with the event loop's clock: both read CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        policy: Policy,
        limits: AdmissionLimits,
        observer: BatchObserver,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = Scheduler(policy, limits, lambda item: self._miss(item.owner))
        self.admission = self._scheduler.admission
        self.permit = self.admission.permit
        self._misses = {"queue": 0, "engine": 0, "finish": 0}
        self._bulk_misses = 0
        self._non_finite = 0
        self.observers = [observer]
        self._clock = clock
        self._engines: dict[ModelIndex, _EngineModel] = {}
        self._generation = 0
        self._choice = _Choice.FREE
        self._deadly = DeadlyTexts()
        self._requests: dict[PendingRequest, Sequence[WorkItem]] = {}
        self._deadlines = DeadlineTimer()

    async def admit(
        self,
        model: ModelIndex,
        sizes: Sequence[int],
        *,
        longest: int | None,
        arrival: float,
        timeout_ms: float | None,
        priority: int,
    ) -> Permit:
        return self.admission.admit(
            model,
            sizes,
            longest=longest,
            arrival=arrival,
            timeout_ms=timeout_ms,
            priority=priority,
            now=self._clock(),
        )

    async def reserve(self, tokens: int) -> Permit:
        return self.admission.reserve(tokens, self._clock())

    def missed(self, permit: Permit, where: str = "queue") -> DeadlineExceeded:
        """Counts a request whose deadline passed before its texts could be queued, or after the engine."""
        self.count_miss(permit.priority, where)
        return too_late(permit.shortened)

    async def run(self, permit: Permit, texts: Sequence[EncodedText]) -> PendingRequest:
        """Confirms the permit, queues a request's texts together and waits until all are answered.

        If the caller is cancelled, its texts leave the queue at once; answers that an engine is already computing are
        discarded.

        Raises:
            NotReady: There is no engine and none is starting, or the server is shutting down.
            Overloaded: Because of queued work, the answer would come after the deadline.
            DeadlineExceeded: The deadline passed, or even an idle server could not meet it.
            EngineLost: The engine ended, and no other engine has the model.
            EngineFault: The engine failed on one of the texts, or one of them has ended two engines.
            NonFiniteOutput: The model answered NaN or infinity.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = self.start(permit, texts, future)
        try:
            await future
        finally:
            self.end(request)
        return request

    def start(self, permit: Permit, texts: Sequence[EncodedText], future: Answered) -> PendingRequest:
        """As `run`, but tells `future` of the answer. Its owner calls `end` afterwards, or to cancel the request."""
        if permit.model not in self._engines and not self._restarting:
            raise NotReady("the engine is starting; try again", retry_after_s=1)
        if self._deadly.told and (deadly := self._deadly.find(permit.model, texts)) is not None:
            raise deadly
        now = self._clock()
        lengths = [len(text.ids) for text in texts]
        permit.confirm(lengths, now)
        request = PendingRequest(permit, texts, now, future)
        if len(texts) == 1:
            items = [WorkItem(permit.model, texts[0], lengths[0], request, 0)]
        else:
            items = list(map(WorkItem, repeat(permit.model), texts, lengths, repeat(request), count()))
        try:
            assignment = self._scheduler.submit(items, permit, now, at_once=self._choice is _Choice.FREE)
            self._requests[request] = items
            if assignment is not None:
                self._run(assignment, now)
            else:
                self._pump()
            if permit.deadline < math.inf and not future.done():
                request.deadline = self._deadlines.at(permit.deadline, partial(self._miss, request))
        except BaseException:
            self.end(request)
            raise
        return request

    def hold(self) -> None:
        """Chooses no batches until `release`, so that requests that start together can be in one batch."""
        self._choice = _Choice.HELD

    def release(self) -> None:
        self._choice = _Choice.FREE
        self._pump()

    def end(self, request: PendingRequest) -> None:
        """Forgets a request that is answered or that nobody waits for."""
        items = self._requests.pop(request, None)
        if items is not None:
            if request.deadline is not None:
                request.deadline.cancel()
            if request.missing:
                self._scheduler.cancel(items)

    @property
    def policy(self) -> Policy:
        return self._scheduler.policy

    @property
    def costs(self) -> Sequence[ModelCosts]:
        """The costs of each model; empty before the first engine."""
        return self._scheduler.costs

    def engine_up(
        self,
        engine: Engine,
        costs: Sequence[ModelCosts],
        models: Sequence[ModelIndex] | None = None,
        policy: Policy | None = None,
    ) -> None:
        """Lets an engine take batches, including those of models that another engine ran.

        `costs` are those of every model. `models` are the models that this engine holds, in its own order, or None for
        all. A `policy` of None keeps the current one.
        """
        if policy is not None:
            self._scheduler.policy = policy
        if self._engines:
            self._scheduler.engine_joins(len(engine.lanes), costs)
        else:
            self._generation += 1
            self._scheduler.engine_up(len(engine.lanes), costs)
        indices = models if models is not None else [ModelIndex(index) for index in range(len(costs))]
        self._engines |= {model: _EngineModel(engine, ModelIndex(position)) for position, model in enumerate(indices)}
        self._fail_unserved(EngineLost("the engine exited, and the next one does not have the model; try again"))
        self._pump()

    def engine_restarts(self, in_s: float) -> None:
        """All engines have ended and another one starts in about `in_s` seconds: requests wait for it."""
        self._engines.clear()
        self._scheduler.engine_restarts(self._clock() + in_s)

    def engine_down(self, error: BertserveError, engine: Engine | None = None) -> None:
        """One engine, or all (None), has ended for good: every request that only it could answer fails with `error`."""
        if engine is None:
            self._engines.clear()
            self._scheduler.predictor.back_at = None
        else:
            self._forget_engine(engine)
        if not self._restarting:
            self._fail_unserved(error)
        self._pump()

    def _fail_unserved(self, error: BertserveError) -> None:
        for request in list(self._requests):
            if request.permit.model not in self._engines:
                self._fail(request, error)

    @property
    def _restarting(self) -> bool:
        return self._scheduler.predictor.back_at is not None

    def engine_leaves(self, engine: Engine) -> None:
        """Stops giving batches to an engine that no request waits for any more."""
        self._forget_engine(engine)
        if self._engines:  # otherwise the next engine sets its lanes, and batches may still hold the old ones
            self._scheduler.resize(max(len(run.engine.lanes) for run in self._engines.values()))

    def _forget_engine(self, engine: Engine) -> None:
        self._engines = {model: run for model, run in self._engines.items() if run.engine is not engine}

    def fail_all(self, error: BertserveError) -> None:
        for request in list(self._requests):
            self._fail(request, error)

    def runs(self, model: ModelIndex) -> bool:
        """Whether an engine has a model."""
        return model in self._engines

    @property
    def requests(self) -> int:
        return len(self._requests)

    @property
    def computing(self) -> bool:
        return any(self._scheduler.lanes.load)

    def load(self) -> DispatcherLoad:
        scheduler, predictor, admission = self._scheduler, self._scheduler.predictor, self.admission
        now = self._clock()
        return DispatcherLoad(
            requests=len(self._requests),
            queued_texts=predictor.queue.items,
            queued_tokens=predictor.queue.tokens,
            queued_work_us=predictor.queue.backlog.total_us,
            wait_s=predictor.drain_s(now),
            restart_s=predictor.restart_s(now),
            admitted_tokens=admission.online.in_flight,
            admitted_limit=admission.online.capacity,
            lane_tokens=list(predictor.lanes.load),
            refusals=admission.online.refusals,
            misses=self._misses,
            non_finite=self._non_finite,
            device_us={"online": scheduler.online_us, "bulk": scheduler.bulk_us},
            bulk=DispatcherBulkLoad(
                queued_texts=predictor.bulk.items,
                queued_tokens=predictor.bulk.tokens,
                queued_work_us=predictor.bulk.backlog.total_us,
                admitted_tokens=admission.bulk.in_flight,
                admitted_limit=admission.bulk.capacity,
                refusals=admission.bulk.refusals,
                misses=self._bulk_misses,
            ),
        )

    def _pump(self) -> None:
        """Starts all batches that can start.

        A batch that completes at once calls this method again, which leaves the rest to the running loop.
        """
        if self._choice is not _Choice.FREE or not self._scheduler.waiting:
            return
        self._choice = _Choice.UNDERWAY
        try:
            while self._engines and self._choice is _Choice.UNDERWAY:
                now = self._clock()
                if (assignment := self._scheduler.next(now)) is None:
                    return
                self._run(assignment, now)
        finally:
            self._choice = _Choice.FREE

    def _run(self, assignment: Assignment, now: float) -> None:
        items = assignment.items
        for item in items:
            request: PendingRequest = item.owner
            request.started = True
            request.queue_us = max(request.queue_us, (now - request.submitted) * 1e6)
        engine, position = self._engines[items[0].model]
        batch = Batch(position, list(map(_TEXT, items)), alone=len(self._requests) == 1)
        engine.submit(assignment.lane, batch, partial(self._done, self._generation, assignment))
        for observer in self.observers:
            observer.batch_started(assignment)

    def _done(self, generation: int, assignment: Assignment, outcome: BatchOutput | BertserveError) -> None:
        occupied_us = 0.0
        if generation == self._generation:
            occupied_us = self._scheduler.done(assignment, self._clock())
        if not isinstance(outcome, BertserveError):
            self._deliver(assignment.items, outcome)
        elif isinstance(outcome, EngineLost):
            self._take_back(assignment, outcome)
        elif isinstance(outcome, EngineFault) and len(assignment.items) > 1:
            # One text may have failed the batch. Each text is retried by itself, so that only that one fails.
            self._scheduler.put_back([item for item in assignment.items if not item.owner.future.done()])
        else:
            for item in assignment.items:
                self._fail(item.owner, outcome)
        self._pump()
        # Recorded after the answers, because clients wait for those.
        asyncio.get_running_loop().call_soon(self._record, generation, assignment, outcome, occupied_us)

    def _take_back(self, assignment: Assignment, lost: EngineLost) -> None:
        """Queues the texts that an engine held when it ended."""
        items = assignment.items
        if not lost.begun and self._choice is _Choice.UNDERWAY:
            self._choice = _Choice.REFUSED  # otherwise the same engine would get it again and again
        if items[0].suspect and lost.begun:
            self._deadly.add(items[0].model, items[0].text)
            tried = items[0].owner  # the log names this request, not another one with the same text
            for request in sorted(self._requests, key=lambda request: request is not tried):
                model = request.permit.model
                if model == items[0].model and (deadly := self._deadly.find(model, request.texts)) is not None:
                    self._fail(request, deadly)
            return
        waiting = [item for item in items if not item.owner.future.done()]
        if lost.begun or items[0].suspect:
            self._scheduler.suspect(waiting)
        else:
            self._scheduler.take_back(waiting)

    def _record(
        self, generation: int, assignment: Assignment, outcome: BatchOutput | BertserveError, occupied_us: float
    ) -> None:
        if generation == self._generation and not isinstance(outcome, BertserveError):
            self._scheduler.learn(assignment, outcome.compute_us, occupied_us)
        for observer in self.observers:
            observer.batch_ended(assignment, 0.0 if isinstance(outcome, EngineLost) else occupied_us)

    def _deliver(self, items: Sequence[WorkItem], output: BatchOutput) -> None:
        arrays = output.arrays
        for row, item in enumerate(items):
            request: PendingRequest = item.owner
            if not output.finite[row]:
                self._non_finite += 1
                self._fail(request, NonFiniteOutput("the model returned NaN or infinity for this input"))
                continue
            request.rows[item.index] = (arrays[0][row],) if len(arrays) == 1 else tuple([each[row] for each in arrays])
            request.compute_us = max(request.compute_us, output.compute_us)
            request.missing -= 1
            if request.missing == 0 and not request.future.done():
                request.future.set_result(None)

    def _miss(self, request: PendingRequest) -> None:
        if not request.future.done():
            self.count_miss(request.permit.priority, "engine" if request.started else "queue")
        self._fail(request, too_late(request.permit.shortened))

    def count_miss(self, priority: int, where: str) -> None:
        if priority == BULK:
            self._bulk_misses += 1
        else:
            self._misses[where] += 1

    def _fail(self, request: PendingRequest, error: BertserveError) -> None:
        if not request.future.done():
            request.future.set_exception(error)
        self.end(request)
