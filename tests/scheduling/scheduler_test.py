from __future__ import annotations

import heapq
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import strategies as st

from bertserve.serving.errors import BertserveError, DeadlineExceeded, Overloaded
from bertserve.serving.records import BULK, DEFAULT_PRIORITY, PRIORITIES
from bertserve.serving.scheduling.admission import AdmissionLimits
from bertserve.serving.scheduling.batcher import WIDE, Policy
from bertserve.serving.scheduling.scheduler import Scheduler
from tests.support.costs import constant, model_costs, per_token
from tests.support.fuzzing import each, sizes
from tests.support.schedulers import FIRST, began, items, start, start_one, submit

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.scheduling.batcher import Assignment
    from bertserve.serving.scheduling.cost import ModelCosts
    from bertserve.serving.scheduling.queue import WorkItem

ONE_LANE = Policy(max_batch_tokens=256, batch_invariant=[True], narrow=[False])
TEN_MS = constant(10_000)


def one_lane(cost: Callable[[int, int], float] = TEN_MS) -> Scheduler:
    """A scheduler over an engine with one lane, whose batches cost what `cost` says."""
    scheduler = Scheduler(ONE_LANE, AdmissionLimits(1 << 20), lambda _: None, jitter=lambda: 0.0)
    scheduler.engine_up(1, [model_costs(cost, max_batch_tokens=ONE_LANE.max_batch_tokens)])
    return scheduler


def test_a_lone_text_on_an_idle_engine_starts_at_once() -> None:
    scheduler = one_lane()
    started = start_one(scheduler)
    assert (started.lane, started.tokens, started.predicted_us) == (WIDE, 8, 10_000)
    assert (scheduler.queue.items, scheduler.lanes.load) == (0, [8])
    assert scheduler.next(0.0) is None
    assert scheduler.done(started, 0.0095) == pytest.approx(9_500)
    assert scheduler.lanes.load == [0]


def test_what_arrives_meanwhile_waits_and_runs_together() -> None:
    """Three requests in one batch, once the engine is free."""
    scheduler = one_lane()
    first = start_one(scheduler)
    waiting = [text for _ in range(3) for text in submit(scheduler, 8)]
    assert scheduler.next(0.001) is None
    scheduler.done(first, 0.01)
    batch = began(scheduler, 0.01)
    assert batch.items == waiting
    assert scheduler.queue.items == 0


@pytest.mark.parametrize(
    ("text", "asked", "goes_first"),
    [
        (8, {"now": 0.030}, True),
        (8, {"now": 0.045}, False),
        (65, {"timeout": 0.045}, True),
        (200, {"priority": 1}, True),
    ],
    ids=["a short one overtakes", "for a while only", "a near deadline before a far one", "an earlier class"],
)
def test_which_text_goes_first(text: int, asked: dict[str, Any], *, goes_first: bool) -> None:
    """Of one of 64 tokens with all the time of the world, which costs 8 ms, and of another.

    A text is overtaken for six times its own cost; the latest start that keeps a deadline counts, if that is sooner.
    """
    scheduler = one_lane(per_token(125))
    submit(scheduler, 8)
    (long,), (other,) = submit(scheduler, 64), submit(scheduler, text, **asked)
    assert scheduler.queue.head() is (other if goes_first else long)


@pytest.mark.parametrize(("timeout", "error"), [(0.005, DeadlineExceeded), (0.015, Overloaded), (0.025, None)])
def test_a_deadline_decides_between_too_late_and_too_busy(timeout: float, error: type[BertserveError] | None) -> None:
    """A batch takes 10 ms and one has just begun: 5 ms can never be kept, 15 ms not now, 25 ms can."""
    scheduler = one_lane()
    submit(scheduler, 8)
    if error is None:
        assert submit(scheduler, 8, timeout=timeout)
        return
    with pytest.raises(error):
        submit(scheduler, 8, timeout=timeout)
    assert scheduler.queue.items == 0
    assert sum(scheduler.admission.online.refusals.values()) == 1


def test_even_an_idle_engine_refuses_what_it_cannot_keep() -> None:
    scheduler = one_lane()
    with pytest.raises(DeadlineExceeded, match=r"about 10\.0 ms on an idle server, and 5\.0 ms are left"):
        submit(scheduler, 8, timeout=0.005)
    with pytest.raises(DeadlineExceeded):
        submit(scheduler, *[256] * 8, timeout=0.015)
    assert scheduler.admission.online.refusals == {"queue_full": 0, "predicted_late": 0, "hopeless": 2, "not_ready": 0}


def test_a_refusal_says_when_the_server_will_have_caught_up() -> None:
    """The rest of what runs and all that waits."""
    scheduler = one_lane(per_token(125))
    submit(scheduler, 64)
    for _ in range(10):
        submit(scheduler, 64)
    with pytest.raises(Overloaded) as refused:
        submit(scheduler, 64, now=0.004, timeout=0.05)
    assert refused.value.retry_after_s == pytest.approx(0.084, abs=0.001)
    assert refused.value.retry_after_ms == pytest.approx(84, abs=1)
    assert scheduler.predictor.drain_s(0.004) == refused.value.retry_after_s


def test_those_who_are_refused_together_come_back_apart() -> None:
    """Up to twice as late, as the jitter says."""
    scheduler = one_lane()
    scheduler.admission._jitter = lambda: 0.5
    assert Overloaded("", retry_after_s=2.0, jitter=0.5).retry_after_ms == 3000
    assert scheduler.admission._overloaded("full", DEFAULT_PRIORITY, 0.0).retry_after_ms == 30


def test_an_earlier_class_does_not_wait_for_the_later_ones() -> None:
    scheduler = one_lane(per_token(125))
    for _ in range(50):
        submit(scheduler, 64)
    with pytest.raises(Overloaded):
        submit(scheduler, 8, timeout=0.1, priority=3)
    assert submit(scheduler, 8, timeout=0.1, priority=1)


def test_a_prediction_counts_what_is_on_its_way_to_the_queue() -> None:
    """A text that is being tokenised in a thread will be there before the next one."""
    scheduler = one_lane(per_token(125))
    submit(scheduler, 64)
    with scheduler.admission.admit(
        FIRST, [4 * 126] * 10, longest=None, arrival=0.0, timeout_ms=60_000.0, priority=DEFAULT_PRIORITY, now=0.0
    ):
        assert scheduler.predictor.drain_s(0.0) == pytest.approx(0.088)
        with pytest.raises(Overloaded):
            submit(scheduler, 64, timeout=0.09)
    assert submit(scheduler, 64, timeout=0.09)


def test_a_lone_text_in_a_pipeline_keeps_one_lane_of_it() -> None:
    """The others take what comes meanwhile, and predictions know that."""
    policy = Policy(max_batch_tokens=256, batch_invariant=[True], narrow=[True], apart=True)
    scheduler = Scheduler(policy, AdmissionLimits(1 << 20), lambda _: None)
    scheduler.engine_up(5, [model_costs(TEN_MS, TEN_MS, narrow_lanes=4, max_batch_tokens=256)])
    start(scheduler, items(8), DEFAULT_PRIORITY, 60.0, 0.0)
    assert scheduler.predictor.drain_s(0.0) == pytest.approx(0.0025)
    assert submit(scheduler, 8, timeout=0.02)


def test_the_items_of_a_request_are_queued_together_or_not_at_all() -> None:
    """Eight texts of 8 ms are refused where four would have been taken."""
    scheduler = one_lane(per_token(125))
    submit(scheduler, 64)
    with pytest.raises(Overloaded):
        submit(scheduler, *[64] * 8, timeout=0.07)
    assert scheduler.queue.items == 0
    assert len(submit(scheduler, *[64] * 4, timeout=0.07)) == scheduler.queue.items == 4


def test_what_comes_too_late_is_dropped_when_its_turn_comes() -> None:
    """It is told, never run, and what waits behind it runs."""
    dropped: list[WorkItem] = []
    scheduler = Scheduler(ONE_LANE, AdmissionLimits(1 << 20), dropped.append)
    scheduler.engine_up(1, [model_costs(per_token(1000))])
    first = start_one(scheduler)
    (late,), (fine,) = submit(scheduler, 8, timeout=0.02), submit(scheduler, 9)
    scheduler.done(first, 0.013)
    batch = began(scheduler, 0.013)
    assert (dropped, list(batch.items)) == ([late], [fine])


def test_costs_are_corrected_by_what_is_seen() -> None:
    """Batches that take twice as long as predicted move the prediction towards it, and refusals with it."""
    scheduler = one_lane()
    now = 0.0
    for _ in range(200):
        started = start(scheduler, items(8), DEFAULT_PRIORITY, now + 1, now)
        assert started is not None
        now += 0.025
        scheduler.learn(started, 20_000, scheduler.done(started, now))
    assert started.predicted_us == pytest.approx(25_000, rel=0.05)


def test_slow_batches_never_lock_everybody_out() -> None:
    """An idle engine is tried where the times of warm-up would be in time, and so its recovery is noticed."""
    scheduler = one_lane()
    for _ in range(1000):
        scheduler.costs[0].observe(0, 8, 1, 40_000, 60_000)
    started = start_one(scheduler, 0.012)
    assert started.predicted_us > 50_000


def test_no_text_starves_however_many_shorter_ones_arrive() -> None:
    """Under more short texts than the engine can do, a long one starts when its virtual time has come."""
    scheduler = one_lane(per_token(125))
    running = start(scheduler, items(8), DEFAULT_PRIORITY, 1e6, 0.0)
    (long,) = submit(scheduler, 256, timeout=1e6)
    now = 0.0
    while long.waits:
        submit(scheduler, 8, 9, now=now, timeout=1e6)
        assert running is not None
        now += running.predicted_us / 1e6
        scheduler.learn(running, running.predicted_us, scheduler.done(running, now))
        running = scheduler.next(now)
    # 32 ms of cost: overtaken by what came within six times as long, which was twice as much as could be done.
    assert 6 * 0.032 <= now < 2.5 * 6 * 0.032


class Arrival(NamedTuple):
    at_ms: int
    lengths: tuple[int, ...]
    model: int
    priority: int
    timeout_ms: int
    cancel_after_ms: int


class Replay:
    """Drives a scheduler through a schedule with a list of events, as a simulator does, and checks every step."""

    def __init__(self, arrivals: list[Arrival], seed: int, *, lanes: int) -> None:
        narrow = lanes > 1
        self.policy = Policy(
            max_batch_tokens=64 + 64 * (seed % 3),
            batch_invariant=[True, seed % 2 == 0],
            narrow=[narrow and seed % 5 > 1, narrow],
            group_tokens=64,
            prefetch_tokens=72,
        )
        self.scheduler = Scheduler(self.policy, AdmissionLimits(1 << 20), self.drop, jitter=lambda: 0.0)
        self.scheduler.engine_up(lanes, [self.costs(model, lanes) for model in (0, 1)])
        self.slowness = (0.8, 1.0, 1.5)[seed % 3]
        self.arrivals = arrivals
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = count()
        self.now = 0.0
        self.accepted: dict[int, list[WorkItem]] = {}
        self.fate: dict[tuple[int, int], str] = {}

    def costs(self, model: int, lanes: int) -> ModelCosts:
        return model_costs(
            per_token(30, 300),
            per_token(50, 300) if self.policy.narrow[model] else None,
            narrow_lanes=lanes - 1,
            batched=self.policy.batch_invariant[model],
            max_batch_tokens=self.policy.max_batch_tokens,
            group_tokens=64,
            corners=True,
        )

    def run(self) -> None:
        for number, arrival in enumerate(self.arrivals):
            self.at(arrival.at_ms / 1e3, lambda number=number: self.arrive(number))
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
            self.start()
        self.check()

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.serial), event))

    def arrive(self, number: int) -> None:
        """A request comes, and is refused whole or taken whole."""
        arrival = self.arrivals[number]
        request = items(*arrival.lengths, model=arrival.model, owner=number)
        before = self.scheduler.waiting
        deadline = self.now + arrival.timeout_ms / 1e3
        try:
            started = start(self.scheduler, request, arrival.priority, deadline, self.now)
        except BertserveError:
            assert self.scheduler.waiting == before
            assert not any(item.waits for item in request)
            return
        self.accepted[number] = request
        if started is None:
            assert self.scheduler.waiting == before + len(request)
        else:
            self.begin(started)
        if arrival.cancel_after_ms:
            self.at(self.now + arrival.cancel_after_ms / 1e3, lambda: self.cancel(number))

    def cancel(self, number: int) -> None:
        for item in self.accepted[number]:
            if item.waits:
                self.settle(item, "cancelled")
        self.scheduler.cancel(self.accepted[number])
        assert not any(item.waits for item in self.accepted[number])

    def drop(self, item: WorkItem) -> None:
        """Its turn came too late, and that is true."""
        assert self.now + item.least_us / 1e6 > item.deadline
        self.settle(item, "late")

    def start(self) -> None:
        while (assignment := self.scheduler.next(self.now)) is not None:
            self.begin(assignment)
        if self.scheduler.waiting:
            assert any(self.scheduler.lanes.load), "something waits and nothing runs"

    def begin(self, assignment: Assignment) -> None:
        batch = list(assignment.items)
        first = batch[0]
        own = [item for item in batch if item.priority == first.priority]
        assert len({item.model for item in batch}) == 1
        assert batch[: len(own)] == own
        assert {item.priority for item in batch[len(own) :]} <= {BULK}
        assert assignment.padded_length == max(item.tokens for item in own)
        longest = max(item.tokens for item in batch)
        assert len(batch) == 1 or longest * len(batch) <= self.policy.max_batch_tokens
        together = self.policy.batch_invariant[first.model]
        assert len(batch) == 1 or together or longest * len(batch) <= 64
        assert assignment.lane == WIDE or self.policy.narrow[first.model]
        for item in batch:
            assert not item.waits
            self.settle(item, "run")
        predicted_us = assignment.predicted_us
        self.at(self.now + predicted_us * self.slowness / 1e6, lambda: self.end(assignment, predicted_us))

    def end(self, assignment: Assignment, predicted_us: float) -> None:
        self.scheduler.learn(assignment, predicted_us * self.slowness, self.scheduler.done(assignment, self.now))

    def settle(self, item: WorkItem, fate: str) -> None:
        assert isinstance(item.owner, int)
        place = (item.owner, item.index)
        assert place not in self.fate, f"{fate} after {self.fate[place]}"
        self.fate[place] = fate

    def check(self) -> None:
        for queue in (self.scheduler.queue, self.scheduler.bulk):
            assert (queue.items, queue.tokens, queue.backlog.total_us) == (0, 0, 0)
        assert not any(self.scheduler.lanes.load)
        expected = {(number, item.index) for number, request in self.accepted.items() for item in request}
        assert self.fate.keys() == expected


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[Arrival], int, int]:
    """Arrivals within a tenth of a second, a seed for everything else, and a number of lanes."""
    drawn = draw(st.binary(min_size=8, max_size=120))
    arrivals = []
    for a, b, c, d in zip(drawn[::4], drawn[1::4], drawn[2::4], drawn[3::4], strict=False):
        texts = 1 if a % 4 else 1 + a // 4 % 7
        lengths = tuple(1 + (b * (place + 1) + c) % (200 if b % 5 == 0 else 40) for place in range(texts))
        timeout = (5, 20, 60, 1000)[c % 4]
        cancel = 1 + d % 16 if c % 9 == 0 else 0
        arrivals.append(Arrival(d % 64, lengths, b % 3 % 2, PRIORITIES[a % 4 if d % 2 else 1], timeout, cancel))
    return arrivals, drawn[0] + drawn[1], (1, 3, 4)[drawn[2] % 3]


def replay(schedule: tuple[list[Arrival], int, int]) -> None:
    arrivals, seed, lanes = schedule
    Replay(arrivals, seed, lanes=lanes).run()


@sizes(100_000)
def test_no_item_is_lost_doubled_or_started_against_the_rules(examples: int) -> None:
    """Over thousands of schedules of requests, cancellations, deadlines, classes, lanes and slow engines."""
    each(schedules(), examples, replay)
