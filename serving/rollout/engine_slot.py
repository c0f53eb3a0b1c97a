"""The engine slot: which engine serves, which one served before it, and what happens when one of them ends.

| state    | requests run on        | previous generation       | what ends the state                       |
|----------|------------------------|---------------------------|-------------------------------------------|
| STARTING | nothing: they wait     | none                      | an engine is warm: SERVING                |
| SERVING  | the current generation | none                      | `switch`: DRAINING                        |
| DRAINING | the current generation | answers its last requests | it is idle and closed: SERVING            |
| FAILED   | nothing                | none                      | the server ends                           |

When the current engine process ends, the slot tries in turn:

1. The supervisor starts a process of the same generation: STARTING. 2. If that refuses to load or dies too often, an
engine of another kind starts if the settings allow it: STARTING. 3. The server ends: FAILED.

Before the first engine is warm, requests get 503. If the previous generation ends, its waiting requests fail and the
state is SERVING. If one of several GPUs is lost, the others go on and the server is degraded.

A switch is one step of the event loop. Requests that start after it use the new models; earlier ones keep the old
models until they are answered. The new engine warms up beside the one that serves, at idle priority, once the previous
one is closed: at most two engine processes hold models.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from serving.engine.process.fleet import start_engine
from serving.engine.process.supervisor import Supervisor
from serving.errors import EngineLost
from serving.lifecycle import State
from serving.records import ModelIndex
from serving.rollout.idle_priority import IdlePriority
from serving.scheduling.cost import ModelCosts
from serving.unawaited import start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence

    from serving.engine.base import EngineLoad
    from serving.engine.process.remote_engine import EngineLife
    from serving.engine.specs import EngineChoice
    from serving.inference.dispatcher import Dispatcher
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import ServedModel
    from serving.lifecycle import Lifecycle
    from serving.rollout.engine_choice import Choice, Chooser
    from serving.rollout.engine_load import LoadBuilder, PreparedLoad
    from serving.settings import Settings

    Start = Callable[..., Awaitable[EngineLife]]

T = TypeVar("T")

log = logging.getLogger("bertserve.swap")

_POLL_S = 0.02

_RETRY = "the engine exited; try again"


class SlotState(Enum):
    STARTING = auto()
    SERVING = auto()
    DRAINING = auto()
    FAILED = auto()


@dataclass(slots=True, frozen=True)
class EngineGeneration:
    """An engine, its models in its own order, and the load for processes that replace it."""

    engine: EngineLife
    load: EngineLoad
    models: Sequence[ServedModel]


class EngineSlot:
    """Owns the engine generations of a server. It alone writes `repository.engine`.

    Attributes:
        on_up: Called when an engine is warm after there was none.
        on_end: Called when the current engine ends by itself, or the next one ends before it is ready.
        previous: The previous generation, until it is idle or ends.
    """

    def __init__(
        self,
        choice: Choice,
        *,
        settings: Settings,
        chooser: Chooser,
        loads: LoadBuilder,
        dispatcher: Dispatcher,
        pipeline: Pipeline,
        lifecycle: Lifecycle,
        start: Start = start_engine,
    ) -> None:
        self._settings = settings
        self._chooser = chooser
        self._loads = loads
        self._dispatcher = dispatcher
        self._pipeline = pipeline
        self._lifecycle = lifecycle
        self._repository = choice.repository
        self._repository.engine = choice.summary()
        limits: dict[str, Any] = {
            "crash_limit": settings.engine_crash_limit,
            "crash_window_s": settings.engine_crash_window_s,
            "start_limit_s": settings.engine_start_s,
        }
        self._start = partial(start, **limits)
        self._prepared: PreparedLoad | None = loads.prepare(choice)
        self._supervisor = Supervisor(
            self._prepared.load, self, hang_s=settings.engine_hang_s, start=self._start, **limits
        )
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervision: asyncio.Task[None] | None = None
        self._choosing: asyncio.Task[None] | None = None
        self._drain: asyncio.Task[None] | None = None
        self._failed = False
        self.previous: EngineGeneration | None = None
        self.on_up: list[Callable[[EngineLife], None]] = []
        self.on_end: list[Callable[[], None]] = []

    @property
    def state(self) -> SlotState:
        if self._failed:
            return SlotState.FAILED
        if self.engine is None or self.engine.gone:
            return SlotState.STARTING
        return SlotState.SERVING if self.previous is None else SlotState.DRAINING

    @property
    def engine(self) -> EngineLife | None:
        return self._supervisor.engine

    @property
    def load(self) -> EngineLoad:
        """What the current engine has loaded, or the next one will load."""
        return self._supervisor.load

    @property
    def models(self) -> Sequence[ServedModel]:
        return self._repository.models

    @property
    def choice(self) -> EngineChoice:
        return self._repository.engine

    def new_indices(self) -> Iterator[ModelIndex]:
        """Indices that no model has and no request uses, ascending."""
        taken = {model.index for model in [*self.models, *(self.previous.models if self.previous else ())]}
        return (index for index in map(ModelIndex, count()) if index not in taken and not self._pipeline.users(index))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Grants the right to start another engine, once one serves and the previous generation is drained."""
        async with self._turn:
            if self._drain is not None:
                await asyncio.wait({self._drain})
            await self.serving()
            yield

    async def serving(self) -> None:
        """Waits until an engine serves. An engine that has ended is being restarted, or the server ends."""
        while self.engine is None or self.engine.gone:  # noqa: ASYNC110  rare and not urgent
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def beside(self, load: EngineLoad) -> AsyncIterator[EngineLife]:
        """A warm engine beside the one that serves. It ends with the block unless it was switched to.

        Raises:
            EngineFailed: It refused its load; the message is for the operator.
            EngineLost: It ended before it was ready.
            TimeoutError: It took longer than `engine_start_s`.
        """

        async def on_verified() -> None:
            await asyncio.to_thread(self._loads.check_room, load)

        if not load.bundles:
            await on_verified()
        started = time.perf_counter()
        async with asyncio.timeout(self._settings.engine_start_s):
            with IdlePriority(self._dispatcher) as priority:
                engine = await self._start(
                    load, self._settings.engine_hang_s, started=priority.follow, on_verified=on_verified
                )
        passed = time.perf_counter() - started
        log.info("the new engine is warm after %.2f s, paused for %.2f s of them", passed, priority.paused_s)
        try:
            yield engine
        finally:
            if engine is not self.engine:
                await engine.close()

    def switch(self, generation: EngineGeneration) -> None:
        """Switches to a generation whose engine came from `beside`. Unchanged models keep their indices.

        Raises:
            EngineLost: One of the two engines has ended.
        """
        if self.engine is None or self.engine.gone or generation.engine.gone:
            raise EngineLost("the engine exited during the swap; try again", retry_after_s=1)
        before = EngineGeneration(self.engine, self.load, tuple(self.models))
        self._activate(generation)
        self.previous = before
        before.engine.on_end = lambda: self._previous_ended(before)
        self._drain = self._spawn(self._drained(before))

    def _activate(self, generation: EngineGeneration) -> None:
        current = {model.name: model for model in self.models}
        taught = {
            model.index: self._dispatcher.costs[current[model.name].index]
            for model in generation.models
            if model.name in current
        }
        self._dispatch_to(generation.engine, generation.models, taught)
        self._supervisor.adopt(generation.engine, generation.load)
        self._repository.replace(generation.models)
        self._describe(lost=tuple(generation.engine.lost))
        self._lifecycle.to(State.READY if self._repository.whole else State.DEGRADED)

    async def _drained(self, generation: EngineGeneration) -> None:
        """Closes a generation once no request uses its models. No new request does."""
        staying = {model.index for model in self.models}
        leaving = [model.index for model in generation.models if model.index not in staying]
        engine, started = generation.engine, time.perf_counter()
        while engine.busy or any(map(self._pipeline.users, leaving)):  # noqa: ASYNC110  an event would cost every request
            await asyncio.sleep(_POLL_S)
        if engine.gone:
            return
        self._dispatcher.engine_leaves(engine)
        passed = time.perf_counter() - started
        log.info("the previous engine, process %d, drained in %.2f s", engine.pid, passed)
        self.previous = None
        await engine.close()

    def start(self) -> None:
        self._supervise()

    def _supervise(self) -> None:
        self._supervision = asyncio.create_task(self._supervisor.run())
        self._supervision.add_done_callback(self._supervision_ended)

    def engine_up(self, engine: EngineLife) -> None:
        self._dispatch_to(engine, self.models)
        if self._prepared is not None:
            self._prepared.cache_costs(engine.costs)
            self._prepared.cache_kernels()
            self._prepared = None
        self._describe(lost=tuple(engine.lost))
        if self._lifecycle.to(State.READY if self._repository.whole else State.DEGRADED):
            for listener in self.on_up:
                listener(engine)

    def engine_lost(self) -> None:
        for listener in self.on_end:
            listener()

    def device_lost(self) -> None:
        self._describe(lost=tuple(self.engine.lost) if self.engine else ())
        if self._lifecycle.state is State.READY:
            self._lifecycle.to(State.DEGRADED)

    def engine_down(self) -> None:
        """The current engine has ended, and the supervisor starts another."""
        self.engine_lost()
        self._lifecycle.to(State.WARMING)
        self._dispatcher.engine_restarts(self._supervisor.restart_s)

    def engine_failed(self, reason: str, *, crashed: bool = False, passing: bool = False) -> None:  # noqa: ARG002
        """The supervisor has given up: starts an engine of another kind, or fails the server."""
        self._choosing = self._spawn(self._choose_fallback(reason, crashed=crashed), partial(self._give_up, reason))

    async def _choose_fallback(self, reason: str, *, crashed: bool) -> None:
        """Starts an engine of another kind, or fails the server. A thread hashes cached files of gigabytes."""

        def prepared() -> PreparedLoad | None:
            choice = self._chooser.fallback(engine, reason, models, crashed=crashed)
            return None if choice is None else self._loads.prepare(choice)

        engine, models = self.choice.engine, tuple(self.models)
        fallback = await asyncio.to_thread(prepared)
        if fallback is not None:
            self._start_fallback(fallback)
        else:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        self._failed = True
        self._lifecycle.fail(reason)
        self._dispatcher.engine_down(EngineLost("the engine exited and cannot be restarted"))

    def _start_fallback(self, prepared: PreparedLoad) -> None:
        choice = prepared.choice
        # A request that is being read refers to its model by index.
        indices = {model.name: model.index for model in self.models}
        self._repository.replace([replace(model, index=indices[model.name]) for model in choice.repository.models])
        self._repository.engine = choice.summary()
        self._prepared = prepared
        self._supervisor.set_load(prepared.load)
        self._supervise()

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """Fails the server if not even a process can be started."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cannot start the engine", exc_info=error)
            self.engine_failed("cannot start the engine process; see the log")

    def _previous_ended(self, generation: EngineGeneration) -> None:
        log.error("the previous engine, process %d, has exited", generation.engine.pid)
        self._dispatcher.engine_down(EngineLost(_RETRY, retry_after_s=1), generation.engine)
        self.previous = None
        self._spawn(self._reap(generation.engine))

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
            spec = model.spec()
            own = ModelCosts(
                points,
                narrow_lanes=lanes - 1,
                batched=spec.batch_invariant,
                max_batch_tokens=policy.max_batch_tokens,
                group_tokens=policy.group_tokens,
                min_batch_gain=policy.min_batch_gain,
                padded_to=engine.ready.padded_to,
            )
            if taught is not None and model.index in taught:
                own.inherit(taught[model.index])
            _set(invariant, model.index, spec.batch_invariant)
            _set(narrow, model.index, lanes > 1 and (spec.narrow or engine.apart))
            _set(costs, model.index, own)
        policy = replace(policy, batch_invariant=invariant, narrow=narrow, apart=engine.apart)
        self._dispatcher.engine_up(engine, costs, [model.index for model in models], policy)

    def _describe(self, **changes: object) -> None:
        self._repository.engine = msgspec.structs.replace(self.choice, **changes)

    async def _reap(self, engine: EngineLife) -> None:
        """Ends an engine, and removes its lanes once the outcome of each batch is known."""
        await engine.close()
        while engine.busy:  # noqa: ASYNC110  for a moment
            await asyncio.sleep(_POLL_S)
        self._dispatcher.engine_leaves(engine)

    def _spawn(self, work: Coroutine[Any, Any, None], failed: Callable[[], None] | None = None) -> asyncio.Task[None]:
        task = start(work, failed)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        if self._choosing is not None:
            self._choosing.cancel()
        if self._supervision is not None:
            self._supervision.cancel()
        if self._drain is not None:
            self._drain.cancel()
        if self.previous is not None:
            await self.previous.engine.close()
        await asyncio.gather(*filter(None, (self._supervision,)), *self._tasks, return_exceptions=True)


def _set(values: list[T], index: int, value: T) -> None:
    """Sets an element. A list that is too short is padded with the value."""
    values.extend([value] * (index + 1 - len(values)))
    values[index] = value
