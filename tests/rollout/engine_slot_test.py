"""The states of the engine slot, with engines that end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from bertserve.serving.engine.base import LaneKind
from bertserve.serving.engine.process.remote_engine import EngineFailed
from bertserve.serving.engine.process.wire import Ready
from bertserve.serving.inference.dispatcher import Dispatcher
from bertserve.serving.lifecycle import Lifecycle, State
from bertserve.serving.rollout.engine_choice import Chooser
from bertserve.serving.rollout.engine_load import LoadBuilder
from bertserve.serving.rollout.engine_slot import EngineSlot, SlotState
from bertserve.serving.scheduling.admission import AdmissionLimits
from bertserve.serving.scheduling.batcher import Policy
from bertserve.serving.settings import Settings
from bertserve.serving.telemetry.metrics import Metrics
from tests.support.costs import constant, model_costs
from tests.support.tasks import tiny_model, write_bundle
from tests.support.virtual_time import asynchronous
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Life:
    apart, devices, lost = False, 1, ()
    lanes = (LaneKind.WIDE,)

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.busy = False
        self.closed = False
        self.costs = [list(model_costs(constant(100)).points)]
        self.ready = Ready("fake", [LaneKind.WIDE], 1, "", self.costs)
        self.on_end: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._ended = asyncio.Event()

    @property
    def gone(self) -> bool:
        return self._ended.is_set()

    def end(self) -> None:
        self._ended.set()
        self.on_end()

    async def wait(self) -> int:
        await self._ended.wait()
        return 1

    async def close(self) -> None:
        self.closed = True
        self._ended.set()


class Bench:
    """A slot whose engines are `Life`s; where `refuse` is set the next one is refused."""

    def __init__(self, models: Path) -> None:
        self.lives: list[Life] = []
        self.refuse = False
        self.lifecycle = Lifecycle()
        self.lifecycle.to(State.WARMING)
        settings = Settings(models=models, engine="fake")
        metrics, chooser = Metrics(), Chooser(settings)
        loads = LoadBuilder(settings, chooser)
        self.repository = (choice := chooser.first()).repository
        self.deaths = 0
        self.slot = EngineSlot(
            loads.prepare(choice),
            loads,
            settings,
            dispatcher=Dispatcher(
                Policy(1024, batch_invariant=[True], narrow=[False]), AdmissionLimits(1 << 20, 2000, 60_000), metrics
            ),
            lifecycle=self.lifecycle,
            users=lambda _: 0,
            died=self._died,
            start=self._start,
        )

    def _died(self) -> None:
        self.deaths += 1

    async def _start(self, *_: Any, **__: Any) -> Life:
        if self.refuse:
            raise EngineFailed("no such weights")
        self.lives.append(Life(len(self.lives) + 1))
        return self.lives[-1]

    async def until(self, state: SlotState) -> None:
        await until(lambda: self.slot.state is state, f"the state {state}")

    async def serve(self) -> Life:
        self.slot.start()
        await self.until(SlotState.SERVING)
        return self.lives[-1]

    async def switch(self) -> Life:
        slot = self.slot
        async with slot.turn(), slot.beside(slot.load) as engine:
            slot.switch(engine, slot.load, list(self.repository.models))
        return self.lives[-1]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    write_bundle(tmp_path, tiny_model("embed"), "embed")
    return tmp_path


@asynchronous
async def test_the_engine_before_a_switch_is_drained_and_closed(models: Path) -> None:
    bench = Bench(models)
    assert bench.slot.state is SlotState.STARTING
    first = await bench.serve()
    first.busy = True
    second = await bench.switch()
    assert (bench.slot.state, bench.slot.engine) == (SlotState.DRAINING, second)
    first.busy = False
    await bench.until(SlotState.SERVING)
    assert (first.closed, second.closed) == (True, False)
    await bench.slot.close()
    assert second.closed


@asynchronous
async def test_a_new_engine_that_ends_is_started_again_while_the_one_before_drains(models: Path) -> None:
    """The one before answers what it has, and does not serve again."""
    bench = Bench(models)
    first = await bench.serve()
    first.busy = True
    second = await bench.switch()
    second.end()
    assert (bench.slot.state, bench.lifecycle.state, bench.deaths) == (SlotState.STARTING, State.WARMING, 1)
    await bench.until(SlotState.DRAINING)
    assert bench.slot.engine not in {first, second}
    assert (bench.lifecycle.state, first.closed) == (State.READY, False)
    first.busy = False
    await bench.until(SlotState.SERVING)
    assert first.closed
    await bench.slot.close()


@asynchronous
async def test_an_engine_before_that_ends_is_forgotten(models: Path) -> None:
    bench = Bench(models)
    first = await bench.serve()
    first.busy = True
    second = await bench.switch()
    first.busy = False
    first.end()
    await until(lambda: first.closed, "its end")
    await bench.until(SlotState.SERVING)
    assert (bench.slot.engine, bench.lifecycle.state) == (second, State.READY)
    await bench.slot.close()


@asynchronous
async def test_an_engine_that_ends_alone_is_started_again(models: Path) -> None:
    bench = Bench(models)
    up: list[int] = []
    bench.slot.subscribe(lambda engine: up.append(engine.pid))
    first = await bench.serve()
    first.end()
    assert (bench.slot.state, bench.lifecycle.state) == (SlotState.STARTING, State.WARMING)
    await bench.until(SlotState.SERVING)
    assert (up, bench.lifecycle.state) == ([1, 2], State.READY)
    await bench.slot.close()


@asynchronous
async def test_an_engine_that_is_refused_ends_the_server(models: Path) -> None:
    bench = Bench(models)
    bench.refuse = True
    bench.slot.start()
    await bench.until(SlotState.FAILED)
    assert (bench.lifecycle.state, bench.lifecycle.failure) == (State.FAILED, "no such weights")
    await bench.slot.close()


@asynchronous
async def test_another_engine_is_looked_for_beside_the_event_loop(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached files of gigabytes are verified for it; meanwhile the server is warming and says so."""
    looking, go_on = threading.Event(), threading.Event()

    def look(*_: object, **__: object) -> None:
        looking.set()
        assert go_on.wait(10)

    bench = Bench(models)
    monkeypatch.setattr(Chooser, "fallback", look)
    bench.refuse = True
    bench.slot.start()
    async with asyncio.timeout(10):
        await asyncio.to_thread(looking.wait, 10)
    assert (bench.slot.state, bench.lifecycle.state) == (SlotState.STARTING, State.WARMING)
    go_on.set()
    await bench.until(SlotState.FAILED)
    assert bench.lifecycle.failure == "no such weights"
    await bench.slot.close()
