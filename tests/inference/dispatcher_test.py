from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

from bertserve.serving.engine.base import InlineEngine
from bertserve.serving.engine.fake import FakeBackend, fake_vector
from bertserve.serving.errors import (
    BertserveError,
    DeadlineExceeded,
    EngineFault,
    EngineLost,
    NonFiniteOutput,
    NotReady,
    Overloaded,
)
from bertserve.serving.records import DEFAULT_PRIORITY, EncodedText, ModelIndex
from bertserve.serving.scheduling.admission import Permit
from tests.support.costs import constant, model_costs
from tests.support.dispatching import (
    BATCHED,
    NAN,
    RAISES,
    SIZE,
    SPECS,
    TEXT_BY_TEXT,
    Bench,
    ScriptedEngine,
    answer,
    costs,
    dispatcher,
    pooled,
    rows,
    run_request,
    text,
)
from tests.support.fuzzing import each
from tests.support.virtual_time import VirtualLoop, now, virtually

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.inference.dispatcher import Dispatcher, PendingRequest


def inline(threads: int = 1) -> Dispatcher:
    """A dispatcher whose engine answers before `submit` returns."""
    made = dispatcher()
    made.engine_up(InlineEngine(FakeBackend(SPECS, threads)), costs())
    return made


@pytest.mark.parametrize("model", [BATCHED, TEXT_BY_TEXT])
@pytest.mark.parametrize("count", [1, 2, 40])
@virtually
async def test_rows_come_in_the_order_of_the_texts(model: ModelIndex, count: int) -> None:
    """However the texts were batched: they are of all lengths, and lengths are batched apart."""
    texts = [text(*range(number, number + 1 + 7 * number % 60)) for number in range(count)]
    pending = await run_request(inline(threads=2), model, texts, now() + 1)
    np.testing.assert_array_equal(pooled(pending), [fake_vector(one, SIZE) for one in texts])


@virtually
async def test_a_thousand_batches_that_complete_at_once() -> None:
    """An engine may answer before `submit` returns, however much waits: nothing piles up on the stack."""
    texts = [text(number) for number in range(1000)]
    pending = await run_request(inline(), TEXT_BY_TEXT, texts, now() + 1)
    assert len(pending.rows) == 1000


@virtually
async def test_requests_without_an_engine_are_refused_at_once() -> None:
    """With a hint to come back: an engine is being started."""
    with pytest.raises(NotReady) as refused:
        await run_request(dispatcher(), BATCHED, [text(1)], now() + 1)
    assert refused.value.retry_after_s == 1


@virtually
async def test_a_deadline_that_has_passed_already_queues_nothing() -> None:
    """Tokenising may have taken all the time there was."""
    bench = Bench()
    with pytest.raises(DeadlineExceeded):
        await run_request(bench.dispatcher, BATCHED, [text(1)], now())
    assert bench.engine.started == []
    bench.assert_nothing_is_left()


@virtually
async def test_requests_share_a_batch() -> None:
    """What waits while the engine works runs together next, and each request gets its own rows."""
    bench = Bench()
    first = await bench.ask(text(1))
    second, third = await bench.ask(text(2), text(3)), await bench.ask(text(4))
    bench.engine.finish()
    assert [len(batch.texts) for batch in bench.engine.started] == [1, 3]
    bench.engine.finish()
    assert [await rows(task) for task in (first, second, third)] == [[[1, 1]], [[2, 1], [3, 1]], [[4, 1]]]
    assert bench.sizes.started == [1, 3]
    bench.assert_nothing_is_left()


@virtually
async def test_narrow_lanes_may_answer_in_any_order() -> None:
    """Texts that run side by side end when they end; the answer's order is the request's."""
    bench = Bench(lanes=4)
    task = await bench.ask(text(1), text(2), text(3), model=TEXT_BY_TEXT)
    for lane in (2, 3, 1):
        bench.engine.finish(lane)
    assert await rows(task) == [[1, 1], [2, 1], [3, 1]]


@virtually
async def test_a_request_is_not_answered_before_its_last_text() -> None:
    """All of its rows or none."""
    bench = Bench()
    task = await bench.ask(text(1), text(2, 2), text(*[3] * 20))
    bench.engine.finish()
    await asyncio.sleep(0)
    assert not task.done()
    bench.engine.finish()
    assert await rows(task) == [[1, 1], [2, 2], [3, 20]]


@virtually
async def test_a_request_knows_its_waits() -> None:
    """The longest wait and the longest computation of its texts are told."""
    bench = Bench()
    task = await bench.ask(text(1), text(*[2] * 20))
    await asyncio.sleep(0.5)
    bench.engine.finish_all()
    pending = await task
    assert pending.compute_us == 7.0
    assert pending.queue_us == pytest.approx(5e5)


@pytest.mark.parametrize(
    ("bad", "error", "batches"), [(RAISES, EngineFault, [1, 7, *[1] * 7]), (NAN, NonFiniteOutput, [1, 7])]
)
@virtually
async def test_one_bad_text_fails_its_own_request_alone(
    bad: int, error: type[BertserveError], batches: list[int]
) -> None:
    """A batch that raises runs again text by text; NaN is never sent, and the other rows of its batch are."""
    bench = Bench()
    tasks = [await bench.ask(text(number)) for number in range(4)]
    poison = await bench.ask(text(bad))
    tasks += [await bench.ask(text(number)) for number in range(4, 7)]
    bench.engine.finish_all()
    with pytest.raises(error):
        await poison
    assert [await rows(task) for task in tasks] == [[[number, 1]] for number in range(7)]
    assert bench.sizes.started == batches
    bench.assert_nothing_is_left()


@virtually
async def test_retried_texts_keep_their_place() -> None:
    """What failed with its neighbours runs before what came later, in its old order, and never in a batch again."""
    bench = Bench()
    await bench.ask(text(0))
    for number in (1, RAISES, 2):
        (await bench.ask(text(number))).add_done_callback(lambda task: task.exception())
    bench.engine.finish()
    await asyncio.sleep(0.01)
    later = [await bench.ask(text(number)) for number in (3, 4)]
    bench.engine.finish_all()
    assert bench.engine.seen == [0, 1, RAISES, 2, 1, RAISES, 2, 3, 4]
    assert bench.sizes.started == [1, 3, 1, 1, 1, 2]
    assert [await rows(task) for task in later] == [[[3, 1]], [[4, 1]]]


@virtually
async def test_a_text_that_was_given_up_is_not_retried() -> None:
    """Of a batch that failed, only those run again for whom somebody still waits."""
    bench = Bench()
    await bench.ask(text(0))
    gone, stays = await bench.ask(text(1)), await bench.ask(text(2))
    (await bench.ask(text(RAISES))).add_done_callback(lambda task: task.exception())
    bench.engine.finish()
    gone.cancel()
    await asyncio.sleep(0)
    bench.engine.finish_all()
    assert bench.engine.seen == [0, 1, 2, RAISES, 2, RAISES]
    assert await rows(stays) == [[2, 1]]


@pytest.mark.parametrize(("bad", "error"), [(RAISES, EngineFault), (NAN, NonFiniteOutput)])
@virtually
async def test_a_request_with_one_bad_text_fails_whole_and_at_once(bad: int, error: type[BertserveError]) -> None:
    """Its other texts leave the queue: nobody waits for them."""
    bench = Bench()
    task = await bench.ask(text(bad), *[text(*[number] * 20) for number in range(9)])
    bench.engine.finish()
    with pytest.raises(error):
        await task
    assert bench.engine.seen == [bad]
    bench.assert_nothing_is_left()


@virtually
async def test_a_request_cancelled_in_the_queue_never_reaches_the_engine() -> None:
    """A client that hangs up costs no computation."""
    bench = Bench()
    first = await bench.ask(text(1))
    leaver, stays = await bench.ask(text(2), text(*[2] * 30)), await bench.ask(text(3))
    leaver.cancel()
    await asyncio.sleep(0)
    assert (bench.dispatcher.requests, bench.queue.items, bench.queue.tokens) == (2, 1, 1)
    bench.engine.finish_all()
    assert bench.engine.seen == [1, 3]
    assert [await rows(first), await rows(stays)] == [[[1, 1]], [[3, 1]]]
    assert leaver.cancelled()


@virtually
async def test_what_is_computed_for_a_cancelled_request_is_thrown_away() -> None:
    """Its batch goes on for the others, and its lane is free afterwards."""
    bench = Bench()
    await bench.ask(text(0))
    leaver, stays = await bench.ask(text(1)), await bench.ask(text(2))
    bench.engine.finish()
    leaver.cancel()
    await asyncio.sleep(0)
    assert bench.dispatcher.requests == 1
    bench.engine.finish()
    assert await rows(stays) == [[2, 1]]
    assert leaver.cancelled()
    after = await bench.ask(text(3))
    bench.engine.finish()
    assert await rows(after) == [[3, 1]]


@pytest.mark.parametrize("queued", [True, False], ids=["in the queue", "while computing"])
@virtually
async def test_a_deadline_that_passes_is_told_at_its_time(*, queued: bool) -> None:
    """The engine never sees what passes in the queue; of what is computed the answer is thrown away."""
    bench = Bench()
    before = [await bench.ask(text(1))] if queued else []
    late = await bench.ask(text(2), timeout_s=5)
    with pytest.raises(DeadlineExceeded):
        await late
    assert now() == pytest.approx(5)
    bench.engine.finish_all()
    assert [await rows(task) for task in before] == [[[1, 1]]] * queued
    assert bench.engine.seen == ([1] if queued else [2])
    bench.assert_nothing_is_left()


@virtually
async def test_what_would_come_too_late_is_refused_at_once() -> None:
    """It holds nothing, and those before it are not disturbed."""
    bench = Bench()
    bench.dispatcher._scheduler.predictor.costs = [model_costs(constant(1e6)), model_costs(constant(1e6))]
    first = await bench.ask(text(1))
    late = await bench.ask(text(2), timeout_s=1.5)
    hopeless = await bench.ask(text(3), timeout_s=0.5)
    with pytest.raises(Overloaded) as refused:
        await late
    with pytest.raises(DeadlineExceeded):
        await hopeless
    assert now() == 0
    assert refused.value.retry_after_s == pytest.approx(1)
    assert bench.dispatcher.requests == 1
    bench.engine.finish_all()
    assert await rows(first) == [[1, 1]]
    bench.assert_nothing_is_left()


@virtually
async def test_a_refused_request_leaves_no_cycle_behind() -> None:
    """Under overload there are thousands of them, and the garbage collector looks seldom."""
    bench = Bench()
    bench.dispatcher._scheduler.predictor.costs = [model_costs(constant(1e6)), model_costs(constant(1e6))]
    one = text(1)
    gc.collect()
    gc.disable()
    try:
        held = sys.getrefcount(one)
        with pytest.raises(DeadlineExceeded):
            await run_request(bench.dispatcher, BATCHED, [one, one], now() + 0.5)
        assert sys.getrefcount(one) == held
    finally:
        gc.enable()


@virtually
async def test_what_is_too_late_when_its_turn_comes_is_not_computed() -> None:
    """It is told then, before its deadline, and whoever waits behind it runs."""
    bench = Bench()
    bench.dispatcher._scheduler.predictor.costs = [
        model_costs(constant(1e6), batched=False),
        model_costs(constant(1e6)),
    ]
    await bench.ask(text(1))
    late, fine = await bench.ask(text(2), text(3), timeout_s=6), await bench.ask(text(*[4] * 20))
    await asyncio.sleep(5.5)
    bench.engine.finish()
    with pytest.raises(DeadlineExceeded):
        await late
    assert now() == 5.5
    bench.engine.finish_all()
    assert bench.engine.seen == [1, 4]
    assert await rows(fine) == [[4, 20]]
    assert bench.dispatcher.load().misses == {"queue": 1, "engine": 0, "finish": 0}
    bench.assert_nothing_is_left()


@virtually
async def test_an_answer_in_time_disarms_the_deadline() -> None:
    """Nothing rings for a request that has its answer."""
    bench = Bench()
    task = await bench.ask(text(1), timeout_s=5)
    bench.engine.finish()
    pending = await task
    assert pending.deadline is not None
    assert pending.deadline.callback is None
    await asyncio.sleep(10)
    assert pooled(pending).tolist() == [[1, 1]]


async def killed(bench: Bench, in_s: float = 1.0) -> ScriptedEngine:
    """The engine ends with all that it has, and another one is up after a while."""
    bench.dispatcher.engine_restarts(in_s)
    for lane in list(bench.engine.running):
        bench.engine.lose(lane)
    await asyncio.sleep(in_s)
    bench.engine = ScriptedEngine(3)
    bench.dispatcher.engine_up(bench.engine, costs())
    return bench.engine


@virtually
async def test_requests_wait_for_the_next_engine() -> None:
    """Those that were queued and those that come meanwhile; what was begun is tried again, singly and first."""
    bench = Bench()
    first = await bench.ask(text(1))
    begun = await bench.ask(text(2), text(3))
    bench.engine.finish()
    queued = await bench.ask(text(4), text(5))
    coming = asyncio.create_task(killed(bench))
    await asyncio.sleep(0)
    later = await bench.ask(text(6))
    engine = await coming
    assert now() == 1
    sizes = []
    while engine.running:
        sizes.append([len(batch.texts) for batch, _ in engine.running.values()])
        engine.finish(next(iter(engine.running)))
    assert (engine.seen, sizes) == ([2, 3, 4, 5, 6], [[1], [1], [3]])
    assert [await rows(task) for task in (first, begun)] == [[[1, 1]], [[2, 1], [3, 1]]]
    assert [await rows(task) for task in (queued, later)] == [[[4, 1], [5, 1]], [[6, 1]]]
    bench.assert_nothing_is_left()


@virtually
async def test_a_text_that_ends_two_engines_is_refused_from_then_on() -> None:
    """Whoever waits with the same text is refused too; its neighbors are answered, and other models may have it."""
    bench = Bench()
    running = await bench.ask(text(1))
    deadly, good = await bench.ask(text(2, 2)), await bench.ask(text(3, 3))
    bench.engine.finish()
    twin = await bench.ask(text(4), text(2, 2))
    await killed(bench)
    assert bench.engine.seen == [2]
    engine = await killed(bench)
    with pytest.raises(EngineFault) as refused:
        await deadly
    with pytest.raises(EngineFault) as again:
        await twin
    with pytest.raises(EngineFault):
        await run_request(bench.dispatcher, BATCHED, [text(5), text(2, 2)], now() + 1)
    assert [refused.value.news, again.value.news] == [True, False]
    other = await bench.ask(text(2, 2), model=TEXT_BY_TEXT)
    engine.finish_all()
    assert [await rows(task) for task in (running, good, other)] == [[[1, 1]], [[3, 2]], [[2, 2]]]
    bench.assert_nothing_is_left()


@virtually
async def test_an_engine_that_is_killed_again_blames_what_it_had_alone() -> None:
    """What waited behind, or was sent to an engine that had gone, is no suspect."""
    bench = Bench()
    lost, waiting = await bench.ask(text(1)), await bench.ask(text(2))
    await killed(bench)
    bench.engine.gone = True
    bench.engine.lose()
    await killed(bench)
    assert bench.engine.seen == [2]
    bench.engine.finish_all()
    with pytest.raises(EngineFault):
        await lost
    assert await rows(waiting) == [[2, 1]]


@virtually
async def test_a_deadline_before_the_next_engine_is_refused_at_once() -> None:
    """By how long the start before took; a later one waits, and one that the engine then misses is too late."""
    bench = Bench()
    coming = asyncio.create_task(killed(bench, in_s=5.0))
    await asyncio.sleep(0)
    with pytest.raises(NotReady) as refused:
        await run_request(bench.dispatcher, BATCHED, [text(1)], 2.0)
    assert (now(), refused.value.retry_after_s, refused.value.begun) == (0, 5.0, False)
    refusals = bench.dispatcher.load().refusals
    assert refusals == {"queue_full": 0, "predicted_late": 0, "hopeless": 0, "not_ready": 1}
    kept = await bench.ask(text(2), timeout_s=10)
    bench.dispatcher.engine_restarts(0.0)
    missed = await bench.ask(text(3), timeout_s=2)
    with pytest.raises(DeadlineExceeded):
        await missed
    assert now() == 2
    (await coming).finish_all()
    assert await rows(kept) == [[2, 1]]


@pytest.mark.parametrize("first_told", ["by its owner", "by a restart", "by its lanes"])
@pytest.mark.parametrize(("count", "model"), [(5, BATCHED), (1000, TEXT_BY_TEXT)])
@virtually
async def test_an_engine_that_goes_for_good_fails_everything_at_once(
    first_told: str, count: int, model: ModelIndex
) -> None:
    """What is computed and what is queued, each once and without a pause, with the reason; then there is no engine."""
    bench = Bench()
    tasks = [await bench.ask(text(number), model=model) for number in range(count)]
    if first_told == "by a restart":
        bench.dispatcher.engine_restarts(0.0)
    if first_told != "by its owner":
        bench.engine.gone = True
        bench.engine.lose(next(iter(bench.engine.running)))
    bench.dispatcher.engine_down(EngineLost("gone", retry_after_s=1))
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in found} == {EngineLost}
    assert now() == 0
    bench.assert_nothing_is_left()
    with pytest.raises(NotReady):
        await run_request(bench.dispatcher, BATCHED, [text(1)], now() + 1)


@virtually
async def test_a_late_text_whose_owner_has_ended_it_does_not_stop_the_next_engine() -> None:
    """Whether or not the owner counts as answered."""
    bench = Bench()
    permit = Permit(bench.dispatcher.admission, BATCHED, DEFAULT_PRIORITY, deadline=1.0)
    bench.dispatcher.end(bench.dispatcher.start(permit, [text(1)], asyncio.Future()))
    bench.dispatcher.engine_restarts(2.0)
    bench.engine.lose()
    await asyncio.sleep(2)
    bench.dispatcher.engine_up(bench.engine, costs())
    assert bench.engine.seen == [1]
    bench.assert_nothing_is_left()


@virtually
async def test_late_news_of_an_old_engine_changes_nothing() -> None:
    """The lanes of the new one stay as they are."""
    bench = Bench()
    lost = await bench.ask(text(1))
    bench.dispatcher.engine_down(EngineLost("gone"))
    old, bench.engine = bench.engine, ScriptedEngine(3)
    bench.dispatcher.engine_up(bench.engine, costs())
    task = await bench.ask(text(2))
    old.finish()
    waiting = await bench.ask(text(3))
    assert bench.engine.seen == [2]
    bench.engine.finish_all()
    assert [await rows(task), await rows(waiting)] == [[[2, 1]], [[3, 1]]]
    with pytest.raises(EngineLost):
        await lost


@virtually
async def test_failing_all_leaves_the_engine_in_place() -> None:
    """As at the end of the drain; what comes later would still be served."""
    bench = Bench()
    queued = [await bench.ask(text(number)) for number in range(3)]
    bench.dispatcher.fail_all(NotReady("ends"))
    assert {type(one) for one in await asyncio.gather(*queued, return_exceptions=True)} == {NotReady}
    bench.engine.finish()
    task = await bench.ask(text(7))
    bench.engine.finish()
    assert await rows(task) == [[7, 1]]


@virtually
async def test_an_answered_request_leaves_no_cycle_behind() -> None:
    """Its rows are freed with it: the server's garbage collector looks seldom."""
    bench = Bench()
    task = await bench.ask(text(1), text(2))
    bench.engine.finish()
    gc.disable()
    try:
        pending = weakref.ref(await task)
        del task
        await asyncio.sleep(0)
        assert pending() is None
    finally:
        gc.enable()


@virtually
async def test_a_client_that_leaves_as_its_request_fails_makes_no_noise() -> None:
    """Nobody is left to hear of the error, and that is no reason for a traceback in the log."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    bench = Bench()
    task = await bench.ask(text(1))
    bench.dispatcher.engine_down(EngineLost("gone"))
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task, bench
    gc.collect()
    assert complaints == []


class Request(NamedTuple):
    model: ModelIndex
    texts: list[EncodedText]
    deadline: float
    task: asyncio.Task[PendingRequest]
    cancelled: list[bool]


class Schedule:
    def __init__(self) -> None:
        self.bench = Bench()
        self.requests: list[Request] = []
        self.serial = 0
        self.engine_is_up = True
        self.ever_down = False
        self.engines = [self.bench.engine]

    async def play(self, steps: Sequence[tuple[str, int, int]]) -> None:
        for step, one, other in steps:
            getattr(self, step)(one, other)
            # Without a turn of the loop in between, steps fall into one moment.
            if (one + other) % 3:
                await asyncio.sleep(one / 40 if step == "tick" else 0)
        if not self.engine_is_up:
            self.engine(0, 0)
        while not all(request.task.done() for request in self.requests):
            await asyncio.sleep(0)
            self.bench.engine.finish_all()
        self.bench.engine.finish_all()
        for engine in self.engines:
            engine.finish_all()
        await asyncio.sleep(0)  # batches are counted behind the answers
        assert sorted(self.bench.sizes.started) == sorted(self.bench.sizes.ended)
        self.check()

    def tick(self, _one: int, _other: int) -> None:
        """Only time passes."""

    def ask(self, one: int, other: int) -> None:
        """Sends a request of one to three texts, now and then with a bad one, often with a near deadline."""
        texts = []
        for place in range(1 + one % 3):
            self.serial += 1
            ids = [self.serial] * (1 + (5 * one + 7 * place) % 40)
            if (one * other + place) % 7 == 1:
                ids.append((RAISES, NAN)[other % 2])
            texts.append(text(*ids))
        deadline = now() + (60.0, 0.5, 2.0)[other % 3]
        model = ModelIndex(one // 3 % 2)
        task = asyncio.create_task(run_request(self.bench.dispatcher, model, texts, deadline))
        self.requests.append(Request(model, texts, deadline, task, []))

    def finish(self, one: int, _other: int) -> None:
        running = [(engine, lane) for engine in self.engines for lane in engine.running]
        if running:
            engine, lane = running[one % len(running)]
            engine.finish(lane)

    def cancel(self, one: int, _other: int) -> None:
        if self.requests:
            request = self.requests[one % len(self.requests)]
            request.cancelled.append(request.task.cancel())

    def engine(self, _one: int, _other: int) -> None:
        if self.engine_is_up:
            self.ever_down = True
            self.bench.dispatcher.engine_restarts(0.0)
            for lane in list(self.bench.engine.running):
                self.bench.engine.lose(lane)
        else:
            self.bench.engine = ScriptedEngine(3)
            self.engines.append(self.bench.engine)
            self.bench.dispatcher.engine_up(self.bench.engine, costs())
        self.engine_is_up = not self.engine_is_up

    def check(self) -> None:
        """Each request got its rows, or the one error that it deserves, and nothing is left."""
        for request in self.requests:
            if request.task.cancelled():
                assert any(request.cancelled)
            elif (error := request.task.exception()) is None:
                assert pooled(request.task.result()).tolist() == [answer(one) for one in request.texts]
            else:
                assert self.deserved(request, error), f"{error!r} of a request that did not deserve it"
        self.bench.assert_nothing_is_left()
        runs = Counter(first for engine in self.engines for first in engine.seen)
        # Once in a batch and, if that failed, once more alone; an engine that ended then has it run a third time.
        assert all(count <= 3 for count in runs.values())

    def deserved(self, request: Request, error: BaseException) -> bool:
        """Whether something happened that explains a request's error."""
        ids = {identity for one in request.texts for identity in one.ids}
        # A text is dropped in its turn as soon as what is left is less than even an idle engine needs.
        least_s = costs()[request.model].least_us(max(len(one.ids) for one in request.texts)) / 1e6
        reasons: dict[type[BaseException], bool] = {
            EngineFault: RAISES in ids or self.ever_down,
            NonFiniteOutput: NAN in ids,
            DeadlineExceeded: now() + least_s >= request.deadline,
            NotReady: self.ever_down,
        }
        return reasons[type(error)]


STEPS = ("ask", "ask", "ask", "finish", "finish", "cancel", "tick", "engine")


def play(drawn: bytes) -> None:
    steps = [(STEPS[one % 8], one // 8, other) for one, other in zip(drawn[::2], drawn[1::2], strict=False)]
    complaints: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await Schedule().play(steps)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
    assert complaints == []


@pytest.mark.parametrize(
    ("steps", "examples"), [((5, 30), 1_500), pytest.param((25, 200), 30_000, marks=pytest.mark.endurance)]
)
def test_each_request_has_exactly_one_outcome_and_the_right_rows(steps: tuple[int, int], examples: int) -> None:
    """Over many schedules of requests, ends, faults, cancellations, deadlines and dying engines."""
    each(st.binary(min_size=2 * steps[0], max_size=2 * steps[1]), examples, play)
