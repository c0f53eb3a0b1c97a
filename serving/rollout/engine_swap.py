"""Exchanges the engine of a running server for another one: whatever the reason, and without losing a request.

A second engine process comes up beside the one that serves, at idle priority (see `pace`). The switch is one step of
the event loop: every request that starts after it finds the new models, every one before it keeps the old ones until
it is answered, and none sees both. The record of what runs goes along. Then the old engine is drained and kept for a
while, warm and idle, so that the way back is one step too: asked for, or by itself if the new process ends.

There are never more than two engine processes with models: once the version that comes has been verified, the one
that is kept goes before it is loaded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from serving.engine.process.fleet import start_engine
from serving.errors import EngineLost
from serving.lifecycle import State
from serving.records import ModelIndex
from serving.rollout.activation import place
from serving.rollout.idle_priority import Pace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence

    from serving.engine.process.supervisor import EngineLife, Supervisor
    from serving.engine.process.wire import Load
    from serving.inference.dispatcher import Dispatcher
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository, ServedModel
    from serving.lifecycle import Lifecycle
    from serving.records import EngineChoice

    Start = Callable[..., Awaitable[EngineLife]]

log = logging.getLogger("bertserve.swap")

LOAD_LIMIT_S = 600.0
"""For an engine that comes up beside another; a busy server leaves it a tenth of the time."""

_LOOK_S = 0.02
"""How often the end of a drain is looked for; nobody waits for it."""


@dataclass(slots=True, frozen=True)
class Held:
    """An engine process and what it serves, in its own order.

    Attributes:
        engine: The process.
        load: What those that follow it load.
        models: What it holds.
        choice: What it is, and why not another.
    """

    engine: EngineLife
    load: Load
    models: Sequence[ServedModel]
    choice: EngineChoice


class Exchange:
    """The engine process that serves, and the one before it as long as that is kept.

    Attributes:
        turn: Held by whoever brings up another engine, from what it goes by until it has switched.
        kept: The engine before, warm and idle.
        leaving: The engine before, while requests still wait for it.
    """

    def __init__(
        self,
        *,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        pipeline: Pipeline,
        repository: Repository,
        lifecycle: Lifecycle,
        hang_s: float,
        keep_s: float,
        start: Start = start_engine,
        check_room: Callable[[Load], None] = lambda _: None,
    ) -> None:
        """Takes the parts that a switch changes.

        Args:
            supervisor: Looks after the engine that serves.
            dispatcher: Drives it.
            pipeline: Knows which requests are under way.
            repository: The models that requests find.
            lifecycle: The server's state.
            hang_s: As `RemoteEngine.start` has it.
            keep_s: How long the engine before is kept; 0 for not at all.
            start: Starts engines, as `start_engine` does.
            check_room: Raises `EngineFailed` where the memory of a card does not suffice for what a load asks for
                beside what is there; called in a thread.
        """
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._repository = repository
        self._lifecycle = lifecycle
        self._hang_s = hang_s
        self._keep_s = keep_s
        self._start = start
        self._check_room = check_room
        self._tasks: set[asyncio.Task[None]] = set()
        self._drain: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._coming = repository.engine
        self.turn = asyncio.Lock()
        self.kept: Held | None = None
        self.leaving: Held | None = None

    def new_index(self) -> ModelIndex:
        """The smallest index that no model has and no request knows."""
        return next(self.new_indices())

    def new_indices(self) -> Iterator[ModelIndex]:
        """All such indices, ascending."""
        taken = {model.index for model in self._repository.models}
        for held in filter(None, (self.kept, self.leaving)):
            taken |= {model.index for model in held.models}
        return (index for index in map(ModelIndex, count()) if index not in taken and not self._pipeline.users(index))

    @property
    def load(self) -> Load:
        """What the engine that serves has loaded."""
        return self._supervisor.load

    async def serving(self) -> None:
        """Waits until an engine serves: one that has died is being started again, or the server ends."""
        while self._supervisor.engine is None or self._supervisor.engine.gone:  # noqa: ASYNC110  seldom, and no hurry
            await asyncio.sleep(_LOOK_S)

    def still_serves(self, models: Iterable[ServedModel]) -> bool:
        """Whether these are served as they were: where an engine ends, those before come back, whoever has the turn."""
        return all(self._repository.named(model.name) is model for model in models)

    async def drained(self) -> None:
        """Waits until nothing waits for the engine before any more."""
        if self._drain is not None:
            await asyncio.wait({self._drain})

    @asynccontextmanager
    async def beside(self, load: Load, choice: EngineChoice | None = None) -> AsyncIterator[EngineLife]:
        """Another engine process, warm, beside the one that serves; it ends with the block unless it was switched to.

        Args:
            load: What it loads.
            choice: What it is; None for the same as the one that serves.

        Raises:
            EngineFailed: It refused; the message is for the operator.
            EngineLost: It died before it was ready.
            TimeoutError: It took longer than `LOAD_LIMIT_S`.
        """
        self._coming = choice or self._repository.engine

        async def verified() -> None:
            await self._make_room()
            await asyncio.to_thread(self._check_room, load)

        if not load.bundles:
            await verified()
        started = time.perf_counter()
        async with asyncio.timeout(LOAD_LIMIT_S):
            with Pace(self._dispatcher) as pace:
                engine = await self._start(load, self._hang_s, started=pace.follow, verified=verified)
        passed = time.perf_counter() - started
        log.info("another engine is warm after %.2f s, for %.2f s of which it was paused", passed, pace.paused_s)
        try:
            yield engine
        finally:
            if engine is not self._supervisor.engine:
                await engine.close()

    def switch(self, engine: EngineLife, load: Load, models: Sequence[ServedModel]) -> None:
        """Serves with another engine from now on.

        Args:
            engine: As `beside` gave it.
            load: What it has loaded.
            models: What it holds, in its own order; a model that stays as it is keeps its index.

        Raises:
            EngineLost: One of the two engines has ended.
        """
        before = self._supervisor.engine
        if before is None or before.gone or engine.gone:
            raise EngineLost("an engine ended while another was to take its place; try again", retry_after_s=1)
        self._take_turns(before, Held(engine, load, models, self._coming))

    def back(self) -> None:
        """Serves with the engine before again.

        Raises:
            EngineLost: There is none.
        """
        held, before = self.kept, self._supervisor.engine
        if held is None or held.engine.gone or before is None:
            raise EngineLost("the engine before is not there any more; try again", retry_after_s=1)
        self._forget_kept()
        self._take_turns(before, held)

    def fall_back(self) -> bool:
        """Serves with the engine before again, because the one that serves has ended; False where there is none.

        What had been given to the engine that ended, or waits for its models, fails.
        """
        held, ended = self.leaving or self.kept, self._supervisor.engine
        if held is None or held.engine.gone or ended is None:
            return False
        if self._drain is not None:
            self._drain.cancel()
        self.leaving = None
        self._forget_kept()
        self._serve_with(held)
        self._dispatcher.engine_down(EngineLost("the engine ended; try again", retry_after_s=1), ended)
        self._later(self._ended(ended))
        return True

    async def release(self) -> None:
        """Ends the engine that is kept."""
        held = self.kept
        self._forget_kept()
        if held is not None:
            log.info("the engine before, process %d, is not kept any longer", held.engine.pid)
            held.engine.on_end = _nobody
            await held.engine.close()

    async def _make_room(self) -> None:
        await self.drained()
        await self.release()

    async def close(self) -> None:
        """Ends every engine but the one that serves."""
        if self._drain is not None:
            self._drain.cancel()
        before = self.leaving or self.kept
        self._forget_kept()
        if before is not None:
            before.engine.on_end = _nobody
            await before.engine.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take_turns(self, before: EngineLife, after: Held) -> None:
        held = Held(before, self._supervisor.load, tuple(self._repository.models), self._repository.engine)
        self._serve_with(after)
        self.leaving = held
        before.on_end = lambda: self._lost(held)
        self._drain = self._later(self._drained(held))

    def _serve_with(self, held: Held) -> None:
        scheduler, before = self._dispatcher.scheduler, {model.name: model for model in self._repository.models}
        # What one kind of engine has taught says nothing of another.
        alike = held.choice.engine == self._repository.engine.engine
        taught = {
            model.index: scheduler.costs[before[model.name].index]
            for model in held.models
            if alike and model.name in before
        }
        place(self._dispatcher, held.engine, held.models, taught)
        self._supervisor.exchange(held.engine, held.load)
        if not alike:
            self._repository.engine = held.choice
        self._repository.replace(held.models)
        self._repository.note_lost(held.engine.lost)
        self._lifecycle.to(State.READY if self._repository.whole else State.DEGRADED)

    async def _drained(self, held: Held) -> None:
        """Waits for the requests that hold on to an engine's models, each of which has a deadline."""
        stay = {model.index for model in self._repository.models}
        leaving = [model.index for model in held.models if model.index not in stay]
        started = time.perf_counter()
        while held.engine.busy or any(map(self._pipeline.users, leaving)):  # noqa: ASYNC110  requests pay for no event
            await asyncio.sleep(_LOOK_S)
        self.leaving = None
        if held.engine.gone:
            return
        self._dispatcher.engine_leaves(held.engine)
        passed = time.perf_counter() - started
        log.info(
            "the engine before, process %d, is drained after %.2f s and kept for %g s",
            *(held.engine.pid, passed, self._keep_s),
        )
        self.kept = held
        if not self._keep_s:
            await self.release()
            return
        self._timer = asyncio.get_running_loop().call_later(self._keep_s, lambda: self._later(self.release()))

    def _lost(self, held: Held) -> None:
        """The engine before has ended; what still waited for it fails."""
        log.error("the engine before, process %d, has ended", held.engine.pid)
        self._dispatcher.engine_down(EngineLost("the engine ended; try again", retry_after_s=1), held.engine)
        if self.kept is held:
            self._forget_kept()
        self._later(self._ended(held.engine))

    async def _ended(self, engine: EngineLife) -> None:
        """Reaps an engine, and takes its lanes away once all of them have told what became of their batches."""
        await engine.close()
        while engine.busy:  # noqa: ASYNC110  for a moment
            await asyncio.sleep(_LOOK_S)
        self._dispatcher.engine_leaves(engine)

    def _forget_kept(self) -> None:
        self.kept = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _nobody() -> None:
    """Is told of an end that was wanted."""
