"""The parts of a swap: two engines behind one dispatcher, a process that is paced, and the measurement."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from bertserve.serving.engine.base import EngineLoad
from bertserve.serving.engine.process.remote_engine import RemoteEngine
from bertserve.serving.engine.process.supervisor import Supervisor
from bertserve.serving.errors import EngineLost, NotReady
from bertserve.serving.records import ModelIndex
from bertserve.serving.rollout.idle_priority import PERIOD_S, IdlePriority
from tests.support.dispatching import BATCHED, TEXT_BY_TEXT, Bench, ScriptedEngine, costs, rows, run_request, text
from tests.support.engine_processes import LOAD, SIZE, Listener, cancel, right, soon, submit
from tests.support.specs import model_spec
from tests.support.stopping import is_stopped
from tests.support.virtual_time import asynchronous, virtually
from tests.support.waiting import until, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLLOWER = ModelIndex(2)
"""A version that takes the place of `BATCHED`; `TEXT_BY_TEXT` stays."""


def join(bench: Bench, lanes: int = 3) -> ScriptedEngine:
    """Another engine takes over: it holds the follower and the model that stays, in this order."""
    scheduler = bench.dispatcher._scheduler
    policy = scheduler.policy
    scheduler.policy = type(policy)(
        policy.max_batch_tokens,
        batch_invariant=[*policy.batch_invariant, True],
        narrow=[*policy.narrow, False],
    )
    engine = ScriptedEngine(lanes)
    bench.dispatcher.engine_up(engine, [*costs(), costs()[0]], [FOLLOWER, TEXT_BY_TEXT])
    return engine


@virtually
async def test_what_waits_for_the_old_version_runs_on_the_old_engine() -> None:
    """What comes for the new one runs on the new engine, under the number that it has there, and never beside it."""
    bench = Bench()
    running, waiting = await bench.ask(text(1)), await bench.ask(text(2))
    engine = join(bench)
    following = await bench.ask(text(3), model=FOLLOWER)
    assert engine.running == {}
    bench.engine.finish()
    assert [batch.texts[0].ids[0] for batch in bench.engine.started] == [1, 2]
    assert engine.running == {}
    bench.engine.finish()
    ((batch, _),) = engine.running.values()
    assert batch.model == 0
    engine.finish()
    assert [await rows(task) for task in (running, waiting, following)] == [[[1, 1]], [[2, 1]], [[3, 1]]]
    bench.assert_nothing_is_left()


@virtually
async def test_a_model_that_stays_moves_with_what_waits_for_it() -> None:
    """Its texts mean the same to both engines."""
    bench = Bench()
    running = await bench.ask(text(1))
    waiting = await bench.ask(text(2), model=TEXT_BY_TEXT)
    engine = join(bench)
    bench.engine.finish()
    ((batch, _),) = engine.running.values()
    assert batch.model == 1
    engine.finish_all()
    assert [await rows(task) for task in (running, waiting)] == [[[1, 1]], [[2, 1]]]


@virtually
async def test_an_engine_that_ends_takes_only_its_own_requests_with_it() -> None:
    """Those of the other engine are answered, and the lanes that it held are free again."""
    bench = Bench()
    await bench.ask(text(1))
    lost = await bench.ask(text(2))
    engine = join(bench)
    kept = await bench.ask(text(3), model=FOLLOWER)
    bench.engine.gone = True
    bench.dispatcher.engine_down(EngineLost("gone"), bench.engine)
    bench.engine.lose()
    with pytest.raises(EngineLost):
        await lost
    engine.finish()
    assert await rows(kept) == [[3, 1]]
    with pytest.raises(NotReady):
        await run_request(bench.dispatcher, BATCHED, [text(4)], 60.0)
    bench.assert_nothing_is_left()


@virtually
async def test_while_the_new_engine_restarts_the_one_before_answers_what_it_has() -> None:
    """What comes for the new one waits for the restart, also if the one before ends meanwhile."""
    bench = Bench()
    running = await bench.ask(text(1))
    join(bench)
    bench.dispatcher.engine_restarts(0.0)
    waiting = await bench.ask(text(3), model=FOLLOWER)
    bench.engine.finish()
    assert await rows(running) == [[1, 1]]
    bench.dispatcher.engine_down(EngineLost("gone"), bench.engine)
    engine = join(bench)
    engine.finish()
    assert await rows(waiting) == [[3, 1]]
    bench.assert_nothing_is_left()


@virtually
async def test_lanes_are_those_of_the_engines_that_are_there() -> None:
    """Of two engines the more; when one leaves, those of the other."""
    bench = Bench(lanes=3)
    join(bench, lanes=1)
    lanes = bench.dispatcher._scheduler.lanes
    assert lanes.load == [0, 0, 0]
    bench.dispatcher.engine_leaves(bench.engine)
    assert (lanes.load, lanes.free_at) == ([0], [0.0])


@virtually
async def test_lanes_of_an_engine_that_ended_go_when_its_batches_have() -> None:
    """What they had runs on the other; without any, lanes stay: batches may yet tell of their end."""
    bench = Bench(lanes=3)
    lost = await bench.ask(text(1), model=TEXT_BY_TEXT)
    engine = ScriptedEngine(1)
    bench.dispatcher.engine_up(engine, costs(), [BATCHED, TEXT_BY_TEXT])
    bench.engine.gone = True
    bench.dispatcher.engine_down(EngineLost("gone"), bench.engine)
    bench.engine.lose()
    bench.dispatcher.engine_leaves(bench.engine)
    lanes = bench.dispatcher._scheduler.lanes
    assert (lanes.load, len(lanes.free_at)) == ([1], 1)
    engine.finish()
    assert await rows(lost) == [[1, 1]]
    assert lanes.load == [0]
    running = await bench.ask(text(3))
    bench.dispatcher.engine_down(EngineLost("gone"))
    bench.dispatcher.engine_leaves(engine)
    engine.lose()
    with pytest.raises(EngineLost):
        await running
    bench.assert_nothing_is_left()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        yield process
        process.kill()


@asynchronous
async def test_a_process_is_stopped_while_the_device_works(sleeper: subprocess.Popen[bytes]) -> None:
    """From the start of a batch to its end, but for a turn in each period; afterwards it runs as any other."""
    bench = Bench()
    with IdlePriority(bench.dispatcher) as pace:
        pace.follow(sleeper.pid)
        assert not is_stopped(sleeper.pid)
        task = asyncio.create_task(run_request(bench.dispatcher, BATCHED, [text(1)], 1e9))
        await asyncio.sleep(0)
        wait_for(lambda: is_stopped(sleeper.pid), "a pause")
        bench.engine.finish()
        await asyncio.sleep(0)  # batches are counted behind the answers
        wait_for(lambda: not is_stopped(sleeper.pid), "its end")
        await task
        task = asyncio.create_task(run_request(bench.dispatcher, BATCHED, [text(2)], 1e9))
        await until(lambda: is_stopped(sleeper.pid), "a pause", 50 * PERIOD_S)
        await until(lambda: not is_stopped(sleeper.pid), "a turn", 50 * PERIOD_S)
        assert pace.paused_s > 0
    wait_for(lambda: not is_stopped(sleeper.pid), "the end of the pauses")
    assert bench.dispatcher.observers == [bench.sizes]
    bench.engine.finish()
    await task


@asynchronous
async def test_a_supervisor_looks_after_the_engine_it_is_given() -> None:
    """The one before is nobody's, and when the new one dies the next loads what it had loaded."""
    listener = Listener()
    supervised = Supervisor(LOAD)
    task = asyncio.create_task(supervised.run(listener))
    first = await listener.next("up")
    other = EngineLoad("fake", [model_spec("other", size=SIZE)], threads=1)
    second = await soon(RemoteEngine.start(other))
    supervised.adopt(second, other)
    assert supervised.engine is second
    os.kill(first.pid, signal.SIGKILL)
    await soon(first.wait())
    assert listener.news.empty()
    os.kill(second.pid, signal.SIGKILL)
    await listener.next("down")
    third = await listener.next("up")
    assert [spec.name for spec in supervised.load.models] == ["other"]
    assert right(await soon(submit(third, [1, 2])), [1, 2])
    await cancel(task)
