"""A dispatcher with an engine that answers when a test says so."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.serving.engine.base import Batch, BatchOutput, LaneKind
from bertserve.serving.errors import EngineFault, EngineLost
from bertserve.serving.inference.dispatcher import Dispatcher
from bertserve.serving.records import DEFAULT_PRIORITY, EncodedText, ModelIndex
from bertserve.serving.scheduling.admission import AdmissionLimits, Permit
from bertserve.serving.scheduling.batcher import WIDE, Policy
from tests.support.costs import constant, model_costs
from tests.support.specs import model_spec
from tests.support.virtual_time import now

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from bertserve.serving.engine.base import Done
    from bertserve.serving.inference.dispatcher import PendingRequest
    from bertserve.serving.scheduling.batcher import Assignment
    from bertserve.serving.scheduling.cost import ModelCosts
    from bertserve.serving.scheduling.queue import WorkQueue
SIZE = 8
BATCHED, TEXT_BY_TEXT = ModelIndex(0), ModelIndex(1)
RAISES, NAN = 9001, 9002
POLICY = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[False, True])
SPECS = [
    model_spec(size=SIZE, batch_invariant=invariant, vocab_size=2000, max_length=64)
    for invariant in POLICY.batch_invariant
]


def costs() -> list[ModelCosts]:
    each = constant(100)
    return [model_costs(each, each, batched=batched, corners=True) for batched in POLICY.batch_invariant]


def pooled(pending: PendingRequest) -> np.ndarray:
    return np.stack([row for (row,) in pending.rows])


def text(*ids: int) -> EncodedText:
    return EncodedText(array("i", ids))


def answer(one: EncodedText) -> list[float]:
    """What the scripted engine answers to a text: its first id and its length."""
    return [float("nan") if NAN in one.ids else one.ids[0], len(one.ids)]


class ScriptedEngine:
    """An engine whose batches end when the test says so.

    Attributes:
        started: Every batch that ever started.
        running: The batch of each busy lane, and whom to tell.
        gone: The process has ended, and the dispatcher has not been told yet.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = [LaneKind.WIDE, *[LaneKind.NARROW] * (lanes - 1)]
        self.started: list[Batch] = []
        self.running: dict[int, tuple[Batch, Done]] = {}
        self.gone = False

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        if self.gone:
            done(EngineLost("the process has just ended", begun=False))
            return
        assert lane not in self.running, "a busy lane was given a batch"
        assert not self.running or WIDE not in {lane, *self.running}, "something runs beside the wide lane"
        self.started.append(batch)
        self.running[lane] = (batch, done)

    def finish(self, lane: int = WIDE) -> None:
        batch, done = self.running.pop(lane)
        if any(RAISES in one.ids for one in batch.texts):
            done(EngineFault("told to fail"))
        else:
            rows = np.array([answer(one) for one in batch.texts], np.float32)
            done(BatchOutput([rows], [bool(np.isfinite(row).all()) for row in rows], compute_us=7.0))

    def lose(self, lane: int = WIDE) -> None:
        _, done = self.running.pop(lane)
        done(EngineLost("the process ended"))

    def finish_all(self) -> None:
        """Ends whatever runs, and what starts then, until nothing does."""
        while self.running:
            self.finish(next(iter(self.running)))

    @property
    def seen(self) -> list[int]:
        """The first id of each text that ever started, in order."""
        return [one.ids[0] for batch in self.started for one in batch.texts]


class Sizes:
    def __init__(self) -> None:
        self.started: list[int] = []
        self.ended: list[int] = []

    def batch_started(self, assignment: Assignment) -> None:
        self.started.append(len(assignment.items))

    def batch_ended(self, assignment: Assignment, occupied_us: float) -> None:
        assert occupied_us >= 0
        self.ended.append(len(assignment.items))


def run_request(
    dispatcher: Dispatcher, model: ModelIndex, texts: Sequence[EncodedText], deadline: float
) -> Coroutine[Any, Any, PendingRequest]:
    """`Dispatcher.run` with a permit of its own."""
    return dispatcher.run(Permit(dispatcher._scheduler.admission, model, DEFAULT_PRIORITY, deadline), texts)


def dispatcher(sizes: Sizes | None = None) -> Dispatcher:
    return Dispatcher(POLICY, AdmissionLimits(1 << 20), sizes or Sizes(), now)


class Bench:
    def __init__(self, lanes: int = 3) -> None:
        self.sizes = Sizes()
        self.dispatcher = dispatcher(self.sizes)
        self.engine = ScriptedEngine(lanes)
        self.dispatcher.engine_up(self.engine, costs())

    @property
    def queue(self) -> WorkQueue:
        return self.dispatcher._scheduler.queue

    async def ask(
        self, *texts: EncodedText, model: ModelIndex = BATCHED, timeout_s: float = 60.0
    ) -> asyncio.Task[PendingRequest]:
        task = asyncio.create_task(run_request(self.dispatcher, model, texts, now() + timeout_s))
        await asyncio.sleep(0)
        return task

    def assert_nothing_is_left(self) -> None:
        assert self.dispatcher.requests == 0
        assert (self.queue.items, self.queue.tokens) == (0, 0)


async def rows(task: asyncio.Task[PendingRequest]) -> list[list[float]]:
    found: list[list[float]] = pooled(await task).tolist()
    return found
