"""The dispatcher and its alarms, with the fake engine in the same process and with one that is driven by hand."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from serving.alarms import Alarms
from serving.dispatch import Dispatcher
from serving.engine.base import LaneKind, ModelSpec
from serving.engine.fake import FakeBackend, Fault, fake_vector
from serving.engine.inline import InlineEngine
from serving.errors import DeadlineExceeded, EngineFault, EngineLost, NonFiniteOutput, NotReady
from serving.records import Batch, BatchOutput, EncodedText, ModelIndex
from serving.scheduling.batcher import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from serving.engine.base import Done

FIRST = ModelIndex(0)
SIZE = 8
SOON, LATER = 0.02, 3600.0
BAD = 13


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a coroutine to its end; whatever nobody awaited fails the test."""
    asyncio.run(test(), debug=True)


def text(*ids: int) -> EncodedText:
    """A text of these ids."""
    return EncodedText(array("i", ids))


def inline(faults: dict[int, Fault] | None = None) -> InlineEngine:
    """The fake engine in this process."""
    spec = ModelSpec("fake", "", "", True, SIZE, 100, 32, {})
    return InlineEngine(FakeBackend([spec], threads=1, faults=faults))


class ByHand:
    """An engine whose batches end when the test says so."""

    lanes = (LaneKind.WIDE,)

    def __init__(self) -> None:
        self.submitted: list[tuple[Batch, Done]] = []

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        """Keeps the batch."""
        assert lane == 0
        self.submitted.append((batch, done))

    def answer(self) -> None:
        """Ends the oldest batch with the fake engine's answer."""
        batch, done = self.submitted.pop(0)
        rows = np.stack([fake_vector(one, SIZE) for one in batch.texts])
        done(BatchOutput([rows], [True] * len(rows), 5.0))

    def fail(self, error: EngineFault | EngineLost) -> None:
        """Ends the oldest batch with an error."""
        _, done = self.submitted.pop(0)
        done(error)


def dispatcher(engine: InlineEngine | ByHand | None, sizes: list[int] | None = None) -> Dispatcher:
    """A dispatcher with that engine; the sizes of its batches are appended to `sizes`."""
    seen = sizes if sizes is not None else []
    made = Dispatcher(Policy(1024, [True]), seen.append)
    if engine is not None:
        made.engine_up(engine)
    return made


async def ask(to: Dispatcher, texts: Sequence[EncodedText], seconds: float = LATER) -> np.ndarray:
    """A request's rows."""
    ticket = await to.run(FIRST, texts, asyncio.get_running_loop().time() + seconds)
    return ticket.result()


async def turn() -> None:
    """Lets tasks that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_rows_in_the_order_of_the_texts() -> None:
    """A request gets a row for each of its texts, in their order, from however many batches."""

    async def test() -> None:
        texts = [text(1), text(*range(1, 30)), text(2), text(*range(2, 31))]  # two buckets
        sizes: list[int] = []
        rows = await ask(dispatcher(inline(), sizes), texts)
        np.testing.assert_array_equal(rows, [fake_vector(one, SIZE) for one in texts])
        assert sizes == [2, 2]

    run(test)


def test_times_are_reported() -> None:
    """A ticket says how long its texts waited and were computed."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        asking = asyncio.create_task(to.run(FIRST, [text(1)], asyncio.get_running_loop().time() + LATER))
        await turn()
        engine.answer()
        ticket = await asking
        assert ticket.compute_us == 5.0
        assert ticket.queue_us >= 0

    run(test)


def test_what_waits_shares_the_next_batch() -> None:
    """While the engine works, the next batch forms by itself."""

    async def test() -> None:
        engine, sizes = ByHand(), []
        to = dispatcher(engine, sizes)
        asking = [asyncio.create_task(ask(to, [text(number)])) for number in range(1, 5)]
        await turn()
        engine.answer()
        engine.answer()
        assert len(await asyncio.gather(*asking)) == 4
        assert sizes == [1, 3]

    run(test)


def test_no_engine() -> None:
    """Without an engine a request is refused at once and may come again."""

    async def test() -> None:
        with pytest.raises(NotReady) as refused:
            await ask(dispatcher(None), [text(1)])
        assert refused.value.retry_after_s

    run(test)


def test_deadline_that_has_passed() -> None:
    """A request that is late on arrival never reaches the queue."""

    async def test() -> None:
        to = dispatcher(ByHand())
        with pytest.raises(DeadlineExceeded):
            await ask(to, [text(1)], seconds=-1)
        assert to.requests == to.queue.items == 0

    run(test)


def test_deadline_passes_in_the_queue() -> None:
    """A request whose deadline passes while it waits leaves the queue."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        first = asyncio.create_task(ask(to, [text(1)]))
        await turn()
        with pytest.raises(DeadlineExceeded):
            await ask(to, [text(2), text(3)], seconds=SOON)
        assert to.queue.items == 0
        engine.answer()
        await first
        assert not engine.submitted

    run(test)


def test_deadline_passes_while_computing() -> None:
    """An answer that comes too late is thrown away; the lane is free again."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        with pytest.raises(DeadlineExceeded):
            await ask(to, [text(1)], seconds=SOON)
        engine.answer()
        second = asyncio.create_task(ask(to, [text(2)]))
        await turn()
        engine.answer()
        np.testing.assert_array_equal(await second, [fake_vector(text(2), SIZE)])

    run(test)


def test_cancelled_in_the_queue() -> None:
    """A caller that goes away takes its texts along."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        first = asyncio.create_task(ask(to, [text(1)]))
        gone = asyncio.create_task(ask(to, [text(2)]))
        stays = asyncio.create_task(ask(to, [text(3)]))
        await turn()
        gone.cancel()
        await turn()
        assert to.queue.items == 1
        engine.answer()
        assert [one.ids[0] for one in engine.submitted[0][0].texts] == [3]
        engine.answer()
        await asyncio.gather(first, stays)
        assert to.requests == 0

    run(test)


def test_cancelled_while_computing() -> None:
    """A caller that goes away later disturbs nobody."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        gone = asyncio.create_task(ask(to, [text(1)]))
        await turn()
        gone.cancel()
        await turn()
        engine.answer()
        assert to.requests == to.queue.items == 0

    run(test)


def test_nan_fails_its_own_request() -> None:
    """A row that is not finite fails the request it belongs to; the batch's others have their answers."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        first = asyncio.create_task(ask(to, [text(1)]))
        await turn()
        bad, good = (asyncio.create_task(ask(to, [text(number)])) for number in (2, 3))
        await turn()
        engine.answer()
        batch, done = engine.submitted.pop()
        rows = np.stack([fake_vector(one, SIZE) for one in batch.texts])
        done(BatchOutput([rows], [False, True], 5.0))
        np.testing.assert_array_equal(await good, rows[1:])
        with pytest.raises(NonFiniteOutput):
            await bad
        await first

    run(test)


def test_one_bad_text_of_a_request_fails_all_of_it() -> None:
    """One outcome a request: the good rows of a bad one are not delivered."""

    async def test() -> None:
        to = dispatcher(inline({BAD: Fault.NAN}))
        with pytest.raises(NonFiniteOutput):
            await ask(to, [text(1), text(BAD), text(2)])
        assert to.requests == to.queue.items == 0

    run(test)


def test_a_failed_batch_is_run_text_by_text() -> None:
    """When a batch fails, each of its texts runs alone and only the bad one fails."""

    async def test() -> None:
        sizes: list[int] = []
        engine = ByHand()
        to = dispatcher(engine, sizes)
        hold = asyncio.create_task(ask(to, [text(99)]))
        await turn()
        texts = [text(1), text(BAD), text(2), text(3)]
        asking = [asyncio.create_task(ask(to, [one])) for one in texts]
        await turn()
        real = inline({BAD: Fault.RAISE})
        engine.answer()
        while engine.submitted:
            batch, done = engine.submitted.pop(0)
            real.submit(0, batch, done)
        results = await asyncio.gather(*asking, return_exceptions=True)
        await hold
        assert isinstance(results.pop(1), EngineFault)
        np.testing.assert_array_equal(
            np.concatenate(results), [fake_vector(one, SIZE) for one in texts if one.ids[0] != BAD]
        )
        assert sizes == [1, 4, 1, 1, 1, 1]

    run(test)


def test_a_failed_batch_does_not_compute_for_those_who_left() -> None:
    """A caller that went away while its batch failed is not run again."""

    async def test() -> None:
        engine, sizes = ByHand(), []
        to = dispatcher(engine, sizes)
        hold = asyncio.create_task(ask(to, [text(99)]))
        await turn()
        gone, stays = (asyncio.create_task(ask(to, [text(number)])) for number in (1, 2))
        await turn()
        engine.answer()
        gone.cancel()
        await turn()
        engine.fail(EngineFault("no"))
        engine.answer()
        await asyncio.gather(hold, stays)
        assert sizes == [1, 2, 1]
        assert not engine.submitted

    run(test)


def test_a_text_that_fails_alone_is_not_tried_again() -> None:
    """A fault of a single text is final."""

    async def test() -> None:
        sizes: list[int] = []
        to = dispatcher(inline({BAD: Fault.RAISE}), sizes)
        with pytest.raises(EngineFault):
            await ask(to, [text(BAD)])
        assert sizes == [1]

    run(test)


def test_engine_lost_with_a_batch() -> None:
    """The texts of a batch whose engine ended fail and are not tried again: they may be what killed it."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        asking = asyncio.create_task(ask(to, [text(1), text(2)]))
        await turn()
        engine.fail(EngineLost("gone"))
        with pytest.raises(EngineLost):
            await asking
        assert not engine.submitted

    run(test)


def test_engine_down_and_up() -> None:
    """All that waits for an engine that ended fails; with the next one, requests are answered again."""

    async def test() -> None:
        old = ByHand()
        to = dispatcher(old)
        asking = [asyncio.create_task(ask(to, [text(number)])) for number in (1, 2, 3)]
        await turn()
        to.engine_down(EngineLost("gone"))
        assert [type(result) for result in await asyncio.gather(*asking, return_exceptions=True)] == [EngineLost] * 3
        with pytest.raises(NotReady):
            await ask(to, [text(4)])
        to.engine_up(inline())
        assert len(await ask(to, [text(5)])) == 1

    run(test)


def test_a_late_answer_of_an_old_engine() -> None:
    """An answer from an engine that was replaced does not free a lane of the new one."""

    async def test() -> None:
        old, new = ByHand(), ByHand()
        to = dispatcher(old)
        first = asyncio.create_task(ask(to, [text(1)]))
        await turn()
        to.engine_down(EngineLost("gone"))
        to.engine_up(new)
        second = asyncio.create_task(ask(to, [text(2)]))
        await turn()
        old.answer()
        third = asyncio.create_task(ask(to, [text(3)]))
        await turn()
        assert len(new.submitted) == 1, "its lane is busy"
        new.answer()
        new.answer()
        await asyncio.gather(second, third)
        with pytest.raises(EngineLost):
            await first

    run(test)


def test_fail_all() -> None:
    """At the end of the drain every request that is left gets an error, queued or running."""

    async def test() -> None:
        engine = ByHand()
        to = dispatcher(engine)
        asking = [asyncio.create_task(ask(to, [text(number)])) for number in (1, 2)]
        await turn()
        assert to.requests == 2
        to.fail_all(NotReady("the end"))
        assert [type(result) for result in await asyncio.gather(*asking, return_exceptions=True)] == [NotReady] * 2
        engine.answer()
        assert to.requests == to.queue.items == 0

    run(test)


def test_alarms_ring_in_order() -> None:
    """Alarms ring at their time, the earliest first, whatever order they were set in."""

    async def test() -> None:
        alarms, rung = Alarms(), []
        done = asyncio.Event()
        now = asyncio.get_running_loop().time()
        alarms.at(now + 0.03, done.set)
        for delay in (0.02, 0.01, 0.0):
            alarms.at(now + delay, lambda delay=delay: rung.append(delay))
        await done.wait()
        assert rung == [0.0, 0.01, 0.02]

    run(test)


def test_a_cancelled_alarm_stays_silent() -> None:
    """A cancelled alarm never rings; those behind it do."""

    async def test() -> None:
        alarms, rung = Alarms(), []
        done = asyncio.Event()
        now = asyncio.get_running_loop().time()
        silent = alarms.at(now + 0.01, lambda: rung.append("cancelled"))
        alarms.at(now + 0.02, done.set)
        silent.cancel()
        silent.cancel()
        await done.wait()
        assert rung == []

    run(test)


def test_an_alarm_may_set_another() -> None:
    """A callback can set the next alarm, and cancel one that is due."""

    async def test() -> None:
        alarms, rung = Alarms(), []
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        now = loop.time()

        def ring() -> None:
            due.cancel()
            alarms.at(loop.time() + 0.001, done.set)

        alarms.at(now, ring)
        due = alarms.at(now, lambda: rung.append("cancelled"))
        await done.wait()
        assert rung == []

    run(test)
