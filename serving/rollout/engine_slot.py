"""The engine slot: which engine serves, which one served before it, and what happens when one of them ends.

| state    | requests run on    | previous engine           | what ends the state            |
|----------|--------------------|---------------------------|--------------------------------|
| STARTING | nothing: they wait | none, or as in DRAINING   | an engine is warm: SERVING     |
| SERVING  | the current engine | none                      | `switch`: DRAINING             |
| DRAINING | the current engine | answers its last requests | it is idle and closed: SERVING |
| FAILED   | nothing            | none                      | the server ends                |

When the current engine process ends, the slot tries in turn:

1. The supervisor starts another process for the same models: STARTING. 2. If that refuses to load or dies too often, an
engine of another kind starts if the settings allow it: STARTING. 3. The server ends: FAILED.

Before the first engine is warm, requests get 503. If the previous engine ends, its waiting requests fail. If one of
several GPUs is lost, the others go on and the server is degraded.

A switch is one step of the event loop. Requests that start after it use the new models; earlier ones keep the old
models until they are answered. The new engine warms up beside the one that serves, at idle priority, once the previous
one is closed: at most two engine processes hold models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.engine.process.fleet import start_engine
from bertserve.serving.engine.process.supervisor import Supervisor
from bertserve.serving.errors import EngineFailed, EngineLost
from bertserve.serving.lifecycle import State
from bertserve.serving.records import ModelIndex
from bertserve.serving.rollout.idle_priority import IdlePriority
from bertserve.serving.scheduling.cost import ModelCosts
from bertserve.serving.unawaited import start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from bertserve.serving.engine.base import EngineLoad
    from bertserve.serving.engine.process.remote_engine import EngineLife
    from bertserve.serving.inference.dispatcher import Dispatcher
    from bertserve.serving.inference.served_models import ServedModel
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.rollout.engine_load import LoadBuilder, PreparedLoad
    from bertserve.serving.settings import Settings

    Start = Callable[..., Awaitable[EngineLife]]

log = logging.getLogger("bertserve.swap")

_POLL_S = 0.02
_NO_PROCESS = "cannot start the engine process; see the log"


class SlotState(Enum):
    STARTING = auto()
    SERVING = auto()
    DRAINING = auto()
    FAILED = auto()


class EngineSlot:
    """Owns the engines of a server. It alone writes `repository.engine`."""

    def __init__(
        self,
        prepared: PreparedLoad,
        loads: LoadBuilder,
        settings: Settings,
        *,
        dispatcher: Dispatcher,
        lifecycle: Lifecycle,
        users: Callable[[ModelIndex], int],
        died: Callable[[], None],
        start: Start = start_engine,
    ) -> None:
        """Starts nothing yet.

        Args:
            prepared: What the first engine loads.
            loads: Prepares later loads.
            settings: The server's.
            dispatcher: Gets every warm engine.
            lifecycle: Gets the state of the server.
            users: Returns the number of requests that use a model.
            died: Called when the current engine ends by itself, or the next one ends before it is ready.
            start: Starts an engine.
        """
        self.state = SlotState.STARTING
        self._settings = settings
        self._loads = loads
        self._dispatcher = dispatcher
        self._users = users
        self._lifecycle = lifecycle
        self._died = died
        self._repository = prepared.choice.repository
        self._repository.engine = prepared.choice.summary()
        self._start = partial(start, start_limit_s=settings.engine_start_s)
        self._unmeasured: PreparedLoad | None = prepared
        self._previous: EngineLife | None = None
        self._supervisor = Supervisor(
            prepared.load,
            hang_s=settings.engine_hang_s,
            start=self._start,
            start_limit_s=settings.engine_start_s,
        )
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[EngineLife], None]] = []

    def subscribe(self, listener: Callable[[EngineLife], None]) -> None:
        """Calls the listener when an engine is warm after there was none."""
        self._listeners.append(listener)

    @property
    def engine(self) -> EngineLife | None:
        return self._supervisor.engine

    @property
    def load(self) -> EngineLoad:
        """What the current engine has loaded, or the next one will load."""
        return self._supervisor.load

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Grants the right to start another engine, once one serves and the previous one is drained."""
        async with self._turn:
            await self.serving()
            yield

    async def serving(self) -> None:
        """Waits until an engine serves alone. An engine that has ended is being restarted, or the server ends."""
        while self.state is not SlotState.SERVING:  # noqa: ASYNC110  rare and not urgent
            await asyncio.sleep(_POLL_S)

    def free_index(self) -> ModelIndex:
        """The lowest index that no model has. Within a turn no request uses it either."""
        taken = {model.index for model in self._repository.models}
        return next(index for index in map(ModelIndex, count()) if index not in taken)

    @asynccontextmanager
    async def beside(self, load: EngineLoad) -> AsyncIterator[EngineLife]:
        """A warm engine beside the one that serves. It ends with the block unless it was switched to.

        Raises:
            EngineFailed: It refused its load; the message is for the operator.
            EngineLost: It ended before it was ready.
            TimeoutError: It took longer than `engine_start_s`.
        """
        started = time.perf_counter()
        async with asyncio.timeout(self._settings.engine_start_s):
            await asyncio.to_thread(self._loads.check_room, load)
            with IdlePriority(self._dispatcher) as priority:
                engine = await self._start(load, self._settings.engine_hang_s, started=priority.follow)
        passed = time.perf_counter() - started
        log.info("the new engine is warm after %.2f s, paused for %.2f s of them", passed, priority.paused_s)
        try:
            yield engine
        finally:
            if engine is not self.engine:
                await engine.close()

    def switch(self, engine: EngineLife, load: EngineLoad, models: Sequence[ServedModel]) -> None:
        """Switches to an engine from `beside` and other versions of the models. Unchanged ones keep their indices.

        Raises:
            EngineLost: One of the two engines has ended.
        """
        before = self.engine
        if self.state is not SlotState.SERVING or before is None or engine.gone:
            raise EngineLost("the engine exited during the swap; try again", retry_after_s=1)
        indices = self._indices()
        leaving = set(indices.values()) - {model.index for model in models}
        costs = self._dispatcher.costs
        self._dispatch_to(engine, models, {model.index: costs[indices[model.name]] for model in models})
        self._supervisor.adopt(engine, load)
        self._repository.replace(models)
        self._previous = before
        self._serves(engine)
        before.on_end = partial(self._previous_ended, before)
        self._spawn(self._close_drained(before, leaving))

    def _previous_ended(self, engine: EngineLife) -> None:
        log.error("the previous engine, process %d, has exited", engine.pid)
        self._dispatcher.engine_down(EngineLost("the engine exited; try again", retry_after_s=1), engine)

    async def _close_drained(self, engine: EngineLife, models: Iterable[ModelIndex]) -> None:
        """Closes the previous engine once no request uses its models. No new request does."""
        started = time.perf_counter()
        try:
            while engine.busy or any(map(self._users, models)):  # noqa: ASYNC110  an event would cost every request
                await asyncio.sleep(_POLL_S)
            self._dispatcher.engine_leaves(engine)
            passed = time.perf_counter() - started
            log.info("the previous engine, process %d, drained in %.2f s", engine.pid, passed)
        finally:
            await engine.close()
            self._previous = None
            if self.state is SlotState.DRAINING:
                self.state = SlotState.SERVING

    def start(self) -> None:
        """Starts engines of the current load. The server fails if not even a process can be started."""
        self._spawn(self._supervise(), partial(self._fall_back, EngineFailed(_NO_PROCESS)))

    async def _supervise(self) -> None:
        try:
            await self._supervisor.run(self)
        except EngineFailed as failed:
            self._fall_back(failed)

    def engine_up(self, engine: EngineLife) -> None:
        self._dispatch_to(engine, self._repository.models)
        if self._unmeasured is not None:
            self._unmeasured.cache(engine.costs)
            self._unmeasured = None
        if self._serves(engine):
            for listener in self._listeners:
                listener(engine)

    def _serves(self, engine: EngineLife) -> bool:
        """Records the engine that serves; False if the server is ending."""
        self.state = SlotState.SERVING if self._previous is None else SlotState.DRAINING
        self._describe(engine)
        return self._lifecycle.to(State.READY if self._repository.whole else State.DEGRADED)

    def _describe(self, engine: EngineLife) -> None:
        self._repository.engine = msgspec.structs.replace(self._repository.engine, lost=tuple(engine.lost))

    def engine_lost(self) -> None:
        self._died()

    def device_lost(self) -> None:
        if self.engine is not None:
            self._describe(self.engine)
        if self._lifecycle.state is State.READY:
            self._lifecycle.to(State.DEGRADED)

    def engine_down(self) -> None:
        """The current engine has ended, and the supervisor starts another."""
        self.state = SlotState.STARTING
        self._died()
        self._lifecycle.to(State.WARMING)
        self._dispatcher.engine_restarts(self._supervisor.restart_s)

    def _fall_back(self, failed: EngineFailed) -> None:
        """The supervisor has given up: starts an engine of another kind, or fails the server."""
        self._spawn(self._start_another(failed), partial(self._give_up, failed))

    async def _start_another(self, failed: EngineFailed) -> None:
        """Starts an engine of another kind, or fails the server. A thread hashes cached files of gigabytes."""
        engine, models = self._repository.engine.engine, tuple(self._repository.models)
        prepared = await asyncio.to_thread(self._loads.fallback, engine, failed, models)
        if prepared is None:
            self._give_up(failed)
            return
        choice = prepared.choice
        # A request that is being read refers to its model by index.
        indices = self._indices()
        self._repository.replace([replace(model, index=indices[model.name]) for model in choice.repository.models])
        self._repository.engine = choice.summary()
        self._unmeasured = prepared
        self._supervisor.set_load(prepared.load)
        self.start()

    def _indices(self) -> dict[str, ModelIndex]:
        return {model.name: model.index for model in self._repository.models}

    def _give_up(self, failed: EngineFailed) -> None:
        self.state = SlotState.FAILED
        self._lifecycle.fail(str(failed))
        self._dispatcher.engine_down(EngineLost("the engine exited and cannot be restarted"))

    def _dispatch_to(
        self,
        engine: EngineLife,
        models: Sequence[ServedModel],
        taught: Mapping[ModelIndex, ModelCosts] | None = None,
    ) -> None:
        """Lets a warm engine take batches. `taught`: by model index, costs whose corrections a model inherits."""
        policy, lanes = self._dispatcher.policy, len(engine.lanes)
        invariant, narrow, costs = list(policy.batch_invariant), list(policy.narrow), list(self._dispatcher.costs)
        for model, points in zip(models, engine.costs, strict=True):
            batched = model.artifact.batch_invariant
            own = ModelCosts(
                points,
                narrow_lanes=lanes - 1,
                batched=batched,
                max_batch_tokens=policy.max_batch_tokens,
                group_tokens=policy.group_tokens,
                padded_to=engine.ready.padded_to,
            )
            if taught is not None:
                own.inherit(taught[model.index])
            place = slice(model.index, model.index + 1)  # a new model's is the end of the lists
            invariant[place] = [batched]
            narrow[place] = [own.narrow is not None]
            costs[place] = [own]
        policy = replace(policy, batch_invariant=invariant, narrow=narrow, apart=engine.apart)
        self._dispatcher.engine_up(engine, costs, [model.index for model in models], policy)

    def _spawn(self, work: Coroutine[Any, Any, None], failed: Callable[[], None] | None = None) -> None:
        task = start(work, failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
