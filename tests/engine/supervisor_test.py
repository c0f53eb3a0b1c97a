"""The engine process as the server sees it: a real process each time, with the fake engine in it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from bertserve.serving.engine.base import BatchOutput, EngineLoad, LaneKind
from bertserve.serving.engine.process import remote_engine
from bertserve.serving.engine.process import supervisor as supervisor_module
from bertserve.serving.engine.process.remote_engine import RemoteEngine, starved_s
from bertserve.serving.engine.process.supervisor import Supervisor
from bertserve.serving.engine.process.wire import pack_result
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.errors import BertserveError, EngineFailed, EngineFault, EngineLost
from tests.support.engine_processes import (
    BATCHED,
    EXIT,
    FAULTS,
    HANG,
    LIMIT_S,
    LOAD,
    NAN,
    RAISE,
    SIZE,
    TEXT_BY_TEXT,
    Listener,
    batch,
    cancel,
    faulty,
    right,
    soon,
    submit,
)
from tests.support.server import is_running
from tests.support.specs import model_spec
from tests.support.stopping import stop
from tests.support.virtual_time import asynchronous
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


WHATEVER = range(1000)
"""Tokens among which those of warm-up are."""


def at_warm_up(fault: str) -> EngineLoad:
    return EngineLoad("fake", [BATCHED], threads=1, options=faulty(dict.fromkeys(WHATEVER, fault)))


def altered(folder: Path) -> EngineLoad:
    """A model whose file is not what was promised."""
    (folder / "model.onnx").write_bytes(b"something else")
    spec = model_spec("m", size=SIZE, path=str(folder / "model.onnx"), sha256="0" * 64)
    return EngineLoad("ort-cpu", [spec], threads=1)


@contextlib.asynccontextmanager
async def engine_process(load: EngineLoad = LOAD, hang_s: float = LIMIT_S) -> AsyncIterator[RemoteEngine]:
    engine = await soon(RemoteEngine.start(load, hang_s))
    yield engine
    await soon(engine.close())


@contextlib.asynccontextmanager
async def supervised(supervisor: Supervisor, listener: Listener) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(listener.run(supervisor))
    yield task
    await cancel(task)


async def ends(engine: RemoteEngine, outcome: asyncio.Future[BatchOutput | BertserveError]) -> None:
    """Kills an engine that was told to hang, which answers for what it was given."""
    engine.kill("was told to hang")
    assert isinstance(await soon(outcome), EngineLost)


@asynchronous
async def test_an_engine_comes_up_warm() -> None:
    """Once it is there, its lanes, its threads and the cost of every length are known."""
    async with engine_process() as engine:
        assert list(engine.lanes) == [LaneKind.WIDE]
        assert (engine.ready.engine, engine.ready.threads) == ("fake", 1)
        assert [point.tokens for point in engine.costs[0] if point.batch == 1] == [8, 16, 32]


@asynchronous
async def test_the_answer_of_an_idle_lane_is_waited_for_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is due: the event loop does not sleep then, and does as soon as the answer is much too late."""
    monkeypatch.setattr(remote_engine, "can_busy_wait", lambda: True)
    async with engine_process(
        EngineLoad("fake", [BATCHED], threads=1, options={"fake_ms": 5, **faulty(FAULTS)})
    ) as engine:
        (lane,) = engine._lanes
        polls, spin = [], lane._spin

        def counted(number: int, until: float) -> None:
            polls.append(number)
            spin(number, until)

        lane._spin = counted
        while len(polls) == len(set(polls)):  # once is not enough where another process has the core meanwhile
            assert right(await soon(submit(engine, [1])), [1])
        late = submit(engine, [HANG])
        begun = time.thread_time()
        await asyncio.sleep(0.5)
        assert time.thread_time() - begun < 0.25
        engine.kill("has shown what it should")
        assert isinstance(await soon(late), EngineLost)


@asynchronous
async def test_with_few_cpus_it_is_waited_for_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "can_busy_wait", lambda: False)
    async with engine_process() as engine:
        (lane,) = engine._lanes
        polls: list[int] = []
        lane._spin = lambda number, _: polls.append(number)
        assert right(await soon(submit(engine, [1])), [1])
        assert not polls


@asynchronous
async def test_a_batch_comes_back_right() -> None:
    """Every row, in order, with the time it took; and again, on the same lane."""
    async with engine_process() as engine:
        for texts in ([[1, 2, 3], [4], [5, 6]], [[7] * 32]):
            outcome = await soon(submit(engine, *texts))
            assert right(outcome, *texts)
            assert isinstance(outcome, BatchOutput)
            assert outcome.finite == [True] * len(texts)
            assert outcome.compute_us > 0


@asynchronous
async def test_lanes_answer_independently() -> None:
    """Batches on several lanes are under way at once, and each caller gets its own."""
    async with engine_process(EngineLoad("fake", [BATCHED, TEXT_BY_TEXT], threads=3, options=faulty(FAULTS))) as engine:
        assert list(engine.lanes) == [LaneKind.WIDE, *[LaneKind.NARROW] * 3]
        hanging = submit(engine, [HANG], lane=1)
        second, third = submit(engine, [2], lane=2), submit(engine, [3], lane=3)
        assert right(await soon(second), [2])
        assert right(await soon(third), [3])
        assert not hanging.done()
        await ends(engine, hanging)


@asynchronous
async def test_a_lane_takes_batches_ahead() -> None:
    """They are answered in their order, each with its own answer; one that fails leaves the others alone."""
    async with engine_process() as engine:
        outcomes = [submit(engine, [token]) for token in (1, RAISE, 3, 4)]
        assert right(await soon(outcomes[3]), [4])
        assert right(outcomes[0].result(), [1])
        assert isinstance(outcomes[1].result(), EngineFault)
        assert right(outcomes[2].result(), [3])


@asynchronous
async def test_an_engine_that_dies_answers_for_what_it_was_given_ahead() -> None:
    """Nothing that lay in its socket is left waiting; only the batch that it died of had been begun."""
    async with engine_process() as engine:
        stop(engine.pid)  # all four lie in its socket before it looks at the first
        outcomes = [submit(engine, [token]) for token in (1, EXIT, 3, 4)]
        os.kill(engine.pid, signal.SIGCONT)
        assert isinstance(await soon(outcomes[3]), EngineLost)
        assert right(outcomes[0].result(), [1])
        lost = [outcome.result() for outcome in outcomes[1:]]
        assert [isinstance(one, EngineLost) and one.begun for one in lost] == [True, False, False]
        assert {type(one) for one in lost} == {EngineLost}


@asynchronous
async def test_a_batch_sent_ahead_has_its_own_time() -> None:
    """The watchdog counts from when the batch before it was answered, and still sees a hang."""
    async with engine_process(
        EngineLoad("fake", [BATCHED], threads=1, options={"fake_ms": 250, **faulty(FAULTS)}), hang_s=0.9
    ) as engine:
        outcomes = [submit(engine, [token]) for token in (1, 2, 3, HANG)]
        assert right(await soon(outcomes[2]), [3])
        assert isinstance(await soon(outcomes[3]), EngineLost)


@asynchronous
async def test_a_batch_that_raises_costs_that_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets a bare sentence, the log gets the engine's own, and the next batch is right."""
    async with engine_process() as engine:
        outcome = await soon(submit(engine, [1], [RAISE]))
        assert isinstance(outcome, EngineFault)
        assert outcome.message == "the engine failed on this input"
        assert "told to fail" in caplog.text
        assert right(await soon(submit(engine, [1])), [1])


@asynchronous
async def test_rows_that_are_not_finite_are_marked() -> None:
    """The other rows of the batch are as they should be."""
    async with engine_process() as engine:
        outcome = await soon(submit(engine, [1], [NAN], [3]))
        assert isinstance(outcome, BatchOutput)
        assert outcome.finite == [True, False, True]
        assert right(BatchOutput([outcome.arrays[0][::2]], [], 0), [1], [3])


@asynchronous
async def test_an_engine_that_is_killed_answers_for_its_batch() -> None:
    """Whoever waits for it is told, once; whoever comes later is told at once; its owner hears of it first."""
    async with engine_process() as engine:
        heard: list[str] = []
        engine.on_end = lambda: heard.append("owner")
        outcome = submit(engine, [HANG])
        outcome.add_done_callback(lambda _: heard.append("caller"))
        os.kill(engine.pid, signal.SIGKILL)
        assert isinstance(await soon(outcome), EngineLost)
        await asyncio.sleep(0)
        assert heard == ["owner", "caller"]
        assert engine.gone
        late = submit(engine, [1])
        assert isinstance(late.result(), EngineLost)
        assert await soon(engine.wait()) == -signal.SIGKILL


@asynchronous
@pytest.mark.parametrize("kills", [1, 0])
async def test_an_engine_that_the_kernel_killed_for_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kills: int
) -> None:
    """With the container's limit and the models' need, if its group's counter grew meanwhile."""
    counts = iter([5, 5 + kills])
    monkeypatch.setattr(remote_engine, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(remote_engine, "memory_limit", lambda: 300 << 20)
    async with engine_process(msgspec.structs.replace(LOAD, needed_mib=450)) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        assert await soon(engine.wait()) == -signal.SIGKILL
    said = "the container reached its memory limit of 300 MiB; these models need about 450 MiB"
    assert (said in caplog.text) == bool(kills)


@asynchronous
async def test_a_caller_that_submits_again_from_its_callback_is_answered() -> None:
    """As the dispatcher does: a batch that is handed to an engine in its last moment is not forgotten."""
    async with engine_process() as engine:
        second: asyncio.Future[BatchOutput | BertserveError] = asyncio.get_running_loop().create_future()
        engine.submit(0, batch([HANG]), lambda _: engine.submit(0, batch([1]), second.set_result))
        await ends(engine, second)


@asynchronous
async def test_an_engine_that_crashes_tells_its_status() -> None:
    """As by a segmentation fault on an input."""
    async with engine_process() as engine:
        assert isinstance(await soon(submit(engine, [EXIT])), EngineLost)
        assert await soon(engine.wait()) == 139


@asynchronous
async def test_an_engine_that_hangs_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    """After a multiple of what the batch was predicted to take, but not before the floor."""
    async with engine_process(hang_s=0.7) as engine:
        assert isinstance(await soon(submit(engine, [HANG, 1])), EngineLost)
        assert await soon(engine.wait()) == -signal.SIGKILL
    assert re.search(
        r"it hangs: no answer for \d\.\d s to a batch of 1 x 2 tokens of the model \S+; it waited", caplog.text
    )


@asynchronous
async def test_an_engine_that_lacks_cpus_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its threads wait for a CPU is no sign of a hang, up to ten times the patience."""
    async with engine_process() as engine:
        [lane] = engine._lanes
        now, waited = lane._loop.time(), {"7": 100.0}
        monkeypatch.setattr(lane, "_patience_s", lambda _: 2.0)
        monkeypatch.setattr(lane, "_starved_s", lambda: {**waited})
        outcome = submit(engine, [HANG])
        looks = []
        for age_s, waited_s in ((0.2, 0.0), (0.4, 0.0), (5.0, 4.0), (5.2, 4.1), (6.2, 4.1), (6.3, 4.1)):
            lane._since, waited["7"] = now - age_s, 100.0 + waited_s
            looks.append(lane.hangs())
        assert looks == [False] * 5 + [True]
        lane._since, waited["7"] = now - 30.0, 129.0
        assert lane.hangs()
        await ends(engine, outcome)


def test_a_thread_that_gets_no_cpu_is_seen() -> None:
    """Three processes that want the same core are two thirds of the time without it."""
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(3)]
    try:
        wait_for(lambda: all(sum(starved_s(process.pid).values()) > 0.5 for process in busy), "a lack of CPU")
    finally:
        for process in busy:
            process.kill()
            process.wait()


@asynchronous
async def test_a_batch_that_is_overdue_twice_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once may be this loop's own fault: its answer may lie in the socket. Each batch has its own two looks.

    A lane without a batch is idle however often it is looked at.
    """
    async with engine_process() as engine:
        [lane] = engine._lanes
        monkeypatch.setattr(lane, "_patience_s", lambda _: 0.0)
        for token in (1, 2):
            outcome = submit(engine, [token])
            assert not lane.hangs()
            assert right(await soon(outcome), [token])
        assert [lane.hangs(), lane.hangs()] == [False, False]
        outcome = submit(engine, [HANG])
        assert [lane.hangs(), lane.hangs()] == [False, True]
        await ends(engine, outcome)


@asynchronous
async def test_an_answer_to_an_earlier_batch_is_not_taken_for_this_one() -> None:
    """Frames carry the number of their batch."""
    async with engine_process() as engine:
        outcome = submit(engine, [HANG])
        stale = BatchOutput([np.zeros((1, SIZE), np.float32)], [True], 0.0)
        engine._lanes[0].data_received(pack_result(99, stale))
        assert not outcome.done()
        await ends(engine, outcome)


@pytest.mark.parametrize("stopped", [False, True])
@asynchronous
async def test_closing_ends_the_process(*, stopped: bool) -> None:
    """It goes by itself when the sockets close, with status 0; one that is stopped does not see that, and is killed."""
    async with engine_process() as engine:
        assert is_running(engine.pid)
        if stopped:
            stop(engine.pid)
    assert not is_running(engine.pid)
    assert engine._process.returncode == (-signal.SIGKILL if stopped else 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@asynchronous
async def test_signals_to_the_whole_group_leave_the_engine_alone(number: signal.Signals) -> None:
    """The server decides when its engine ends: requests under way are still answered after Ctrl-C."""
    async with engine_process() as engine:
        os.kill(engine.pid, number)
        assert right(await soon(submit(engine, [1])), [1])


@pytest.mark.parametrize(
    ("load", "error", "sentence"),
    [
        pytest.param(altered, EngineFailed, "does not match its SHA-256", id="altered"),
        pytest.param(lambda _: at_warm_up("raise"), EngineFailed, "warm-up of batched failed", id="fails-in-warm-up"),
        pytest.param(lambda _: at_warm_up("exit"), EngineLost, "while loading", id="dies-while-loading"),
    ],
)
@asynchronous
async def test_an_engine_that_cannot_start_is_refused(
    tmp_path: Path, load: Callable[[Path], EngineLoad], error: type[BertserveError], sentence: str
) -> None:
    """A model that is not as promised or cannot answer the simplest text is not served; no process is left."""
    before = children()
    with pytest.raises(error, match=sentence):
        await soon(RemoteEngine.start(load(tmp_path)))
    assert children() == before


@asynchronous
async def test_an_engine_that_dies_is_replaced() -> None:
    """Its listener hears of the end and of the new one, which answers."""
    listener = Listener()
    supervisor = Supervisor(LOAD)
    async with supervised(supervisor, listener):
        first = await listener.next("up")
        assert supervisor.engine is first
        os.kill(first.pid, signal.SIGKILL)
        await listener.next("down")
        second = await listener.next("up")
        assert second.pid != first.pid
        assert supervisor.restarts == 1
        assert right(await soon(submit(second, [1, 2])), [1, 2])


@asynchronous
async def test_an_engine_that_dies_too_often_is_given_up() -> None:
    """After so many deaths within the window there is no other one, and the reason says so."""
    listener = Listener()
    async with supervised(Supervisor(LOAD, crash_limit=2, crash_window_s=600), listener) as task:
        for _ in range(2):
            submit(await listener.next("up"), [EXIT])
            await listener.next("down")
        assert await listener.next("failed") == "the engine process died 2 times in 600 s"
        await soon(task)
    assert listener.news.empty()


def test_deaths_outside_the_window_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those count that come close together."""
    clock = iter([0.0, 30.0, 70.0, 95.0, 129.0, 130.0])
    monkeypatch.setattr(supervisor_module.time, "monotonic", lambda: next(clock))
    supervisor = Supervisor(LOAD, crash_limit=3, crash_window_s=60)
    assert [supervisor._too_many_crashes() for _ in range(6)] == [False, False, False, False, True, True]


@pytest.mark.parametrize(
    ("load", "options", "reason", "lost"),
    [
        # The files will not be better the second time.
        pytest.param(altered, {}, "SHA-256", 0, id="refuses"),
        # Whatever kills every new process at once does not go on for ever.
        pytest.param(lambda _: at_warm_up("exit"), {"crash_limit": 2}, "died 2 times", 2, id="dies-while-loading"),
        pytest.param(
            lambda _: at_warm_up("hang"), {"start_limit_s": 1.0}, "the engine was not ready within 1 s", 0, id="hangs"
        ),
        # Another start has the time that is left.
        pytest.param(
            lambda _: at_warm_up("exit"),
            {"crash_limit": 1_000_000, "start_limit_s": 1.0},
            "the engine was not ready within 1 s",
            None,
            id="dies-until-there-is-no-time",
        ),
    ],
)
@asynchronous
async def test_an_engine_that_never_starts_is_given_up(
    tmp_path: Path, load: Callable[[Path], EngineLoad], options: dict[str, Any], reason: str, lost: int | None
) -> None:
    """The slot is told why, once; nothing waits for it for ever, and no process is left."""
    before, listener = children(), Listener()
    await soon(listener.run(Supervisor(load(tmp_path), **options)))
    assert reason in await listener.next("failed")
    assert lost in {listener.lost, None}
    assert listener.crashed == (reason != "SHA-256")
    assert listener.news.empty()
    assert children() == before


@asynchronous
async def test_an_engine_that_dies_while_loading_is_followed_by_one_that_compiles_anew() -> None:
    """What this node has cached may be what its library dies of; what the next one compiles takes its place."""
    slot, cached = Listener(), KernelFiles(read="cached", sha256="0" * 64, write="written")
    loads = []

    async def start(load: EngineLoad, hang_s: float) -> RemoteEngine:
        loads.append(load)
        faults = dict.fromkeys(range(1000), "exit") if load.kernels[0].read else FAULTS
        return await RemoteEngine.start(msgspec.structs.replace(load, options=faulty(faults)), hang_s)

    async with supervised(Supervisor(msgspec.structs.replace(LOAD, kernels=[cached]), start=start), slot):
        await slot.next("up")
    assert [load.kernels for load in loads] == [[cached], [KernelFiles(write="written")]]


@asynchronous
async def test_what_the_machine_lacks_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither descriptors nor processes that cannot be had count as a death of the engine."""
    monkeypatch.setattr(supervisor_module, "_PAUSE_S", 0.01)
    slot, lacks = Listener(), [errno.EMFILE, errno.EAGAIN, errno.ENOMEM]

    async def start(load: EngineLoad, hang_s: float) -> RemoteEngine:
        if lacks:
            raise OSError(lacks[0], os.strerror(lacks.pop()))
        return await RemoteEngine.start(load, hang_s)

    supervisor = Supervisor(LOAD, crash_limit=1, start=start)
    async with supervised(supervisor, slot):
        await slot.next("up")
        assert (lacks, supervisor.restarts) == ([], 0)


@asynchronous
async def test_what_will_not_pass_is_not_waited_for() -> None:
    """A program that is not there ends the supervision, and its owner says so."""

    async def start(_: EngineLoad, __: float) -> RemoteEngine:
        raise FileNotFoundError(errno.ENOENT, "no such program")

    with pytest.raises(FileNotFoundError):
        await soon(Supervisor(LOAD, start=start).run(Listener()))


@asynchronous
async def test_a_supervisor_that_is_cancelled_takes_its_engine_with_it() -> None:
    """The listener is told nothing any more."""
    listener = Listener()
    supervisor = Supervisor(LOAD)
    async with supervised(supervisor, listener) as task:
        engine = await listener.next("up")
    assert task.cancelled()
    assert not is_running(engine.pid)
    assert supervisor.engine is None
    assert listener.news.empty()


@pytest.mark.parametrize("turns", [1, 2, 3, 100])
@asynchronous
async def test_a_supervisor_that_is_cancelled_while_an_engine_starts_leaves_nothing_behind(
    turns: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by a signal right after the start: no process, no open socket, no traceback."""
    before, open_before = children(), sockets()
    async with supervised(Supervisor(LOAD), Listener()):
        for _ in range(turns):
            await asyncio.sleep(0)
        (started,) = children() - before
    assert not is_running(started)
    assert sockets() == open_before
    assert "Traceback" not in capfd.readouterr().err


def children() -> set[int]:
    """The processes that this one has started and not reaped."""
    return {int(pid) for listed in Path("/proc/self/task").glob("*/children") for pid in listed.read_text().split()}


def sockets() -> int:
    return sum(link.is_socket() for link in Path("/proc/self/fd").iterdir() if link.exists())
