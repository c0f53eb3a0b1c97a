"""Answers that are kept, and computations that several requests wait for, over a dispatcher with a scripted engine."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.loadtest.benchmarks.processes import resident_bytes
from bertserve.serving.errors import DeadlineExceeded, EngineFault, NonFiniteOutput
from bertserve.serving.inference.answer_cache import AnswerCache, _key
from bertserve.serving.inference.dispatcher import Dispatcher, PendingRequest
from bertserve.serving.records import DEFAULT_PRIORITY, EncodedText, ModelIndex
from bertserve.serving.scheduling.admission import Permit
from bertserve.serving.tasks import TASKS
from tests.support.dispatching import BATCHED, NAN, RAISES, TEXT_BY_TEXT, Bench, answer, text
from tests.support.virtual_time import asynchronous, now, virtually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.inference.answer_cache import CachedRows
    from bertserve.serving.records import Row

MIB = 1 << 20
OUTPUTS = TASKS["embed"].graph_outputs(hidden_size=2, labels=0, candidates=0)


class Cached:
    def __init__(self, most_bytes: int = MIB) -> None:
        self.bench = Bench()
        self.cache = AnswerCache(most_bytes)

    async def ask(
        self,
        *texts: EncodedText,
        model: ModelIndex = BATCHED,
        timeout_s: float = 60.0,
        priority: int = DEFAULT_PRIORITY,
    ) -> asyncio.Task[CachedRows]:
        permit = Permit(self.bench.dispatcher._scheduler.admission, model, priority, now() + timeout_s)
        task = asyncio.create_task(self.cache.run(self.bench.dispatcher, permit, texts, OUTPUTS))
        await asyncio.sleep(0)
        return task

    async def answered(self, *texts: EncodedText) -> CachedRows:
        task = await self.ask(*texts)
        self.bench.engine.finish_all()
        return await task

    async def settle(self, *tasks: asyncio.Task[CachedRows]) -> None:
        while not all(task.done() for task in tasks):
            self.bench.engine.finish_all()
            await asyncio.sleep(0)


class Instant(Dispatcher):
    """A dispatcher whose engine gives every text the same row at once."""

    def __init__(self, row: Row) -> None:
        self.row = row

    async def run(self, permit: Permit, texts: Sequence[EncodedText]) -> PendingRequest:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = PendingRequest(permit, texts, 0.0, future)
        request.rows = [self.row] * len(texts)
        return request


def numbers(found: CachedRows) -> list[list[float]]:
    return [row.tolist() for (row,) in found.rows]


def right(*texts: EncodedText) -> list[list[float]]:
    return [answer(one) for one in texts]


@virtually
async def test_what_was_answered_is_not_computed_again() -> None:
    """In any request, beside texts that are new, and twice in one."""
    both = Cached()
    assert numbers(await both.answered(text(1), text(2, 2))) == right(text(1), text(2, 2))
    found = await both.answered(text(2, 2), text(3), text(1), text(3))
    assert numbers(found) == right(text(2, 2), text(3), text(1), text(3))
    assert not found.cached
    again = await both.answered(text(3), text(1))
    assert numbers(again) == right(text(3), text(1))
    assert again.cached
    assert both.bench.engine.seen == [1, 2, 3]
    assert both.cache.texts == {"hit": 4, "shared": 0, "miss": 3}
    assert both.cache.recall(BATCHED, [text(1), text(4)]) is None
    both.bench.assert_nothing_is_left()


@virtually
async def test_other_models_and_segments_have_answers_of_their_own() -> None:
    """The same ids are not the same text then."""
    both = Cached()
    plain = text(1, 2)
    await both.answered(plain)
    assert both.cache.recall(TEXT_BY_TEXT, [plain]) is None
    assert both.cache.recall(BATCHED, [EncodedText(plain.ids, text(0, 1).ids)]) is None
    assert both.cache.recall(BATCHED, [text(1), text(2)]) is None


@virtually
async def test_one_computation_for_all_who_ask_meanwhile() -> None:
    """Each gets the answer, and only the first is computed for."""
    both = Cached()
    tasks = [await both.ask(text(1), text(number)) for number in (2, 3, 2)]
    both.bench.engine.finish_all()
    for task, number in zip(tasks, (2, 3, 2), strict=True):
        assert numbers(await task) == right(text(1), text(number))
    assert sorted(both.bench.engine.seen) == [1, 2, 3]
    assert [(await task).cached for task in tasks] == [False, False, True]


@virtually
async def test_two_that_wait_for_one_another_both_end() -> None:
    """Each computes what it was first to ask for."""
    both = Cached()
    one = await both.ask(text(1))
    several = [await both.ask(text(2), text(1)), await both.ask(text(3), text(2)), await both.ask(text(1), text(3))]
    await both.settle(one, *several)
    assert numbers(several[2].result()) == right(text(1), text(3))


@virtually
async def test_a_client_that_leaves_does_not_take_the_answer_of_others() -> None:
    """It is computed for the next one who waits."""
    both = Cached()
    first, second, third = [await both.ask(text(1)) for _ in range(3)]
    first.cancel()
    second.cancel()
    await both.settle(first, second, third)
    assert numbers(third.result()) == right(text(1))
    both.bench.assert_nothing_is_left()


@virtually
async def test_each_keeps_its_own_deadline() -> None:
    """One that is late does not make others late, whoever asked first."""
    both = Cached()
    hasty, patient = await both.ask(text(1), timeout_s=1.0), await both.ask(text(1))
    late = await both.ask(text(1), timeout_s=2.0)
    for task in (hasty, late):
        with pytest.raises(DeadlineExceeded):
            await task
    assert both.bench.dispatcher.load().misses["queue"] + both.bench.dispatcher.load().misses["engine"] == 2
    await both.settle(patient)
    assert numbers(patient.result()) == right(text(1))


@virtually
async def test_an_urgent_request_does_not_wait_for_a_later_class() -> None:
    """It has the text computed in its own class; what is less urgent waits for either."""
    both = Cached()
    blocking = [await both.ask(text(number)) for number in (7, 8, 9)]
    later, urgent, last = [await both.ask(text(1), priority=priority) for priority in (3, 1, 3)]
    both.bench.engine.finish_all()
    for task in (later, urgent, last):
        assert numbers(await task) == right(text(1))
    await asyncio.gather(*blocking)
    assert both.cache.texts == {"hit": 0, "shared": 1, "miss": 5}
    both.bench.assert_nothing_is_left()


@virtually
async def test_a_request_does_not_wait_for_a_larger_one() -> None:
    """A query gets its text although a batch client was first to ask for it."""
    both, one = Cached(), text(20, *[1] * 20)
    many = [text(number, *[1] * 20) for number in range(1, 21)]
    large, *small = [await both.ask(*texts, model=TEXT_BY_TEXT) for texts in (many, [one], [one])]
    while not small[0].done():
        both.bench.engine.finish(next(iter(both.bench.engine.running)))
        await asyncio.sleep(0)
    assert not large.done()
    both.bench.engine.finish_all()
    for task, texts in zip((large, *small), (many, [one], [one]), strict=True):
        assert numbers(await task) == right(*texts)
    assert both.cache.texts == {"hit": 0, "shared": 1, "miss": 21}
    both.bench.assert_nothing_is_left()


@pytest.mark.parametrize(("bad", "error"), [(RAISES, EngineFault), (NAN, NonFiniteOutput)])
@virtually
async def test_an_error_is_not_an_answer(bad: int, error: type[Exception]) -> None:
    """It fails each who asks, is not kept, and fails nobody who waits for another text of the request."""
    both = Cached()
    tasks = [await both.ask(text(1), text(bad)), await both.ask(text(bad)), await both.ask(text(1))]
    await both.settle(*tasks)
    for task in tasks[:2]:
        with pytest.raises(error):
            task.result()
    assert numbers(tasks[2].result()) == right(text(1))
    assert both.cache.recall(BATCHED, [text(bad)]) is None
    both.bench.assert_nothing_is_left()


@virtually
async def test_nothing_survives_another_version_or_engine() -> None:
    """What was computed by the one before is not kept when it comes later, either."""
    both = Cached()
    await both.answered(text(1))
    old = await both.ask(text(2))
    both.cache.clear()
    new = await both.ask(text(2))
    both.bench.engine.finish()
    assert numbers(await old) == right(text(2))
    assert both.cache.recall(BATCHED, [text(1)]) is None
    assert both.cache.recall(BATCHED, [text(2)]) is None
    both.bench.engine.finish_all()
    assert numbers(await new) == right(text(2))
    assert both.cache.recall(BATCHED, [text(2)]) is not None


@virtually
async def test_answers_cannot_be_changed_and_keep_no_batch() -> None:
    """Requests share the arrays; a view would keep its whole batch in memory."""
    both = Cached()
    await both.answered(text(1), text(2))
    ((row,),) = (await both.answered(text(1))).rows
    assert {type(part) for part in _key(BATCHED, text(1))} == {int, bytes}, "no texts"
    assert row.base is None
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 0.0


@pytest.mark.parametrize(
    ("task", "row", "shapes"),
    [
        ("embed_tokens", (np.arange(64.0).reshape(8, 8),), [(3, 8)]),
        ("answer", (np.zeros(8), np.zeros(8)), [(3,), (3,)]),
        ("embed", (np.zeros(8),), [(8,)]),
        ("fill_mask", (np.zeros((1, 4)), np.zeros((1, 4)), np.zeros(1)), [(1, 4), (1, 4), (1,)]),
        ("embed_sparse", (np.zeros(4), np.zeros(4)), [(4,), (4,)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@asynchronous
async def test_answers_for_each_token_are_kept_without_padding(
    task: str, row: Row, shapes: list[tuple[int, ...]]
) -> None:
    """Whatever batch a text was in; vectors of a whole text stay whole."""
    bench, cache = Bench(), AnswerCache(MIB)
    permit = Permit(bench.dispatcher.admission, BATCHED, DEFAULT_PRIORITY, 1.0)
    await cache.run(
        Instant(row),
        permit,
        [text(1, 2, 3)],
        TASKS[task].graph_outputs(hidden_size=8, labels=8, candidates=4, active=4),
    )
    found = cache.recall(BATCHED, [text(1, 2, 3)])
    assert found is not None
    assert [part.shape for part in found.rows[0]] == shapes
    for kept, whole in zip(found.rows[0], row, strict=True):
        np.testing.assert_array_equal(kept, whole[: len(kept)])


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.endurance)])
def test_memory_is_bounded_however_many_texts_come(count: int) -> None:
    """Of different texts with vectors of 1.5 KB; those that are asked for again and again stay."""
    most = 16 * MIB
    cache = AnswerCache(most)
    dispatcher = Instant((np.zeros(384, np.float32),))
    often = [text(number, number) for number in range(100)]

    async def add(permit: Permit, texts: Sequence[EncodedText]) -> None:
        for one in texts:
            if cache.recall(BATCHED, [one]) is None:
                await cache.run(dispatcher, permit, [one], OUTPUTS)

    async def run() -> int:
        before, permit = 0, Permit(Bench().dispatcher.admission, BATCHED, DEFAULT_PRIORITY, 1.0)
        for start in range(0, count, 1000):
            await add(permit, often)
            await add(permit, [text(1, number) for number in range(1000 + start, 2000 + start)])
            if start == 20_000:
                before = resident_bytes(os.getpid())
        return resident_bytes(os.getpid()) - before

    grown = asyncio.run(run())
    cache._rows.run_pending_tasks()
    assert cache._rows.weighted_size() <= most
    assert grown < most
    kept = sum(cache.recall(BATCHED, [one]) is not None for one in often)
    assert kept > len(often) // 2


class Request(NamedTuple):
    texts: list[EncodedText]
    task: asyncio.Task[CachedRows]


class Schedule:
    def __init__(self) -> None:
        self.both = Cached(2048)
        self.requests: list[Request] = []

    async def play(self, steps: list[tuple[str, int]]) -> None:
        for step, number in steps:
            await getattr(self, step)(number)
        await self.both.settle(*(request.task for request in self.requests))
        self.both.bench.engine.finish_all()
        for request in self.requests:
            if not request.task.cancelled():
                self.check(request)
        assert self.both.cache._computing == {}
        self.both.bench.assert_nothing_is_left()

    def check(self, request: Request) -> None:
        error = request.task.exception()
        if error is None:
            assert numbers(request.task.result()) == right(*request.texts)
        else:
            assert isinstance(error, DeadlineExceeded)

    async def ask(self, number: int) -> None:
        texts = [text(1 + (number + place) % 5) for place in range(1 + number % 3)]
        self.requests.append(Request(texts, await self.both.ask(*texts, timeout_s=(60.0, 1.0)[number % 2])))

    async def finish(self, number: int) -> None:
        if running := list(self.both.bench.engine.running):
            self.both.bench.engine.finish(running[number % len(running)])

    async def cancel(self, number: int) -> None:
        if self.requests:
            self.requests[number % len(self.requests)].task.cancel()

    async def clear(self, _number: int) -> None:
        self.both.cache.clear()

    async def wait(self, number: int) -> None:
        await asyncio.sleep(number / 20)


STEPS = st.lists(st.tuples(st.sampled_from(["ask", "ask", "finish", "cancel", "clear", "wait"]), st.integers(0, 30)))


@given(steps=STEPS)
@settings(max_examples=150)
@virtually
async def test_any_order_of_things_gives_each_its_own_answer(steps: list[tuple[str, int]]) -> None:
    """Texts that many ask for, clients that leave, deadlines, swaps: right answers, and nothing is left."""
    await Schedule().play(steps)
