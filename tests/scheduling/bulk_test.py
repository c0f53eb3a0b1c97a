from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st

from bertserve.loadtest.capacity.simulator import Arrival, BulkJob, Device, RequestOutcome, play
from bertserve.serving.errors import BulkOverloaded, DeadlineExceeded
from bertserve.serving.records import BULK, DEFAULT_PRIORITY
from bertserve.serving.scheduling.admission import AdmissionLimits, Permit
from bertserve.serving.scheduling.batcher import WIDE, Policy
from bertserve.serving.scheduling.load_predictor import BULK_SHARE
from bertserve.serving.scheduling.scheduler import Scheduler
from tests.support.costs import constant, model_costs, per_token
from tests.support.fuzzing import each, sizes
from tests.support.schedulers import FIRST, began, start_one, submit

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.scheduling.batcher import Assignment
    from bertserve.serving.scheduling.queue import WorkItem

NEVER = float("inf")


def scheduler(
    cost: Callable[[int, int], float],
    narrow: Callable[[int, int], float] | None = None,
    *,
    lanes: int = 1,
    limits: AdmissionLimits | None = None,
    **options: Any,
) -> Scheduler:
    policy = Policy(1024, batch_invariant=[True], narrow=[narrow is not None], group_tokens=64, **options)
    made = Scheduler(policy, limits or AdmissionLimits(1 << 20), lambda _: None, jitter=lambda: 0.0)
    made.engine_up(lanes, [model_costs(cost, narrow, narrow_lanes=lanes - 1, group_tokens=64)])
    return made


def bulk(into: Scheduler, *lengths: int, now: float = 0.0, timeout: float = NEVER) -> list[WorkItem]:
    return submit(into, *lengths, priority=BULK, now=now, timeout=timeout)


def end(of: Scheduler, batch: Assignment) -> float:
    """A batch takes as long as was predicted; returns when it has ended."""
    at = batch.given_at + batch.predicted_us / 1e6
    of.done(batch, at)
    return at


def busy(cost: Callable[[int, int], float], **options: Any) -> tuple[Scheduler, Assignment]:
    """A scheduler whose only lane has just begun with a text that somebody waits for."""
    made = scheduler(cost, **options)
    return made, start_one(made)


def test_bulk_work_goes_after_every_other_class() -> None:
    """It has what they leave."""
    made, running = busy(constant(1000))
    waiting = bulk(made, 40)
    last = submit(made, 100, priority=3)
    now = end(made, running)
    batch = began(made, now)
    assert list(batch.items) == last
    assert list(began(made, end(made, batch)).items) == waiting


def test_bulk_work_is_aged_within_itself() -> None:
    """Short texts overtake long ones for a while, as in every class."""
    made, running = busy(per_token(100))
    (long,), (short,), (late,) = bulk(made, 200), bulk(made, 40), bulk(made, 20, now=1.0)
    order, now = [], end(made, running)
    for _ in range(3):
        batch = began(made, now)
        now = end(made, batch)
        order += batch.items
    assert order == [short, long, late]


def test_bulk_batches_are_short_while_others_come() -> None:
    """A slice while a query may come at any moment; as large as pays once none has come for five seconds."""
    made, running = busy(per_token(10, 1000))
    bulk(made, *[20] * 100)
    first = began(made, end(made, running))
    assert first.predicted_us <= 8000
    assert len(first.items) > 1
    assert made.next(0.02) is None
    made.done(first, 0.02)
    second = began(made, 6.0)
    assert second.predicted_us > 8000


def test_a_text_longer_than_a_slice_runs_alone() -> None:
    """It cannot be cut in two."""
    made, running = busy(per_token(100))
    bulk(made, 100, 100)
    batch = began(made, end(made, running))
    assert len(batch.items) == 1


def test_beside_queries_bulk_work_runs_on_the_wide_lane() -> None:
    """All lanes are free again when it ends; without queries it runs on the narrow ones, which carry more."""
    made = scheduler(per_token(50, 500), per_token(60, 500), lanes=3)
    submit(made, 20)
    made.engine_up(3, made.costs)
    bulk(made, *[20] * 40)
    batch = began(made, 0.001)
    assert batch.lane == WIDE
    assert made.next(0.001) is None
    made.done(batch, 0.01)
    lanes = [batch.lane for batch in (made.next(6.0), made.next(6.0)) if batch is not None]
    assert lanes == [1, 2]


def test_a_batch_is_filled_up_with_what_costs_nothing() -> None:
    """A batch of three that the engine pads to four has room for a text of the bulk work, and not for two."""
    policy = Policy(1024, batch_invariant=[True], narrow=[False])
    made = Scheduler(policy, AdmissionLimits(1 << 20), lambda _: None)
    made.engine_up(1, [model_costs(per_token(10, 1000), padded_to=(1, 2, 4, 8))])
    running = start_one(made)
    own = [text for _ in range(3) for text in submit(made, 20)]
    longer = bulk(made, 24)
    extra = [text for _ in range(3) for text in bulk(made, 18)]
    batch = began(made, end(made, running))
    assert list(batch.items) == [*own, extra[0]]
    assert (batch.padded_length, batch.bulk) == (20, 0.0)
    assert all(item.waits for item in [*longer, *extra[1:]])


def test_filling_up_breaks_no_deadline() -> None:
    """Where the next text has just the time that the batch without bulk work takes, nothing is added."""
    for spare_s, size in ((0.0, 1), (0.001, 3)):
        made, running = busy(per_token(1, 10_000))
        (own,), _ = submit(made, 20), bulk(made, 20, 20)
        now = end(made, running)
        own.deadline = now + made.costs[0].batch_us(WIDE, 20, 1) / 1e6 + spare_s
        batch = began(made, now)
        assert len(batch.items) == size


def test_what_runs_of_bulk_work_is_not_owed_once_more() -> None:
    """A batch on one lane that takes what is owed leaves nothing to fill up the batch of another lane with."""
    made = scheduler(per_token(25, 300), per_token(30, 300), lanes=3)
    running = start_one(made)
    due, _ = bulk(made, 600, 600)
    own = submit(made, 20, 20)
    made._owed_us = due.work_us
    now = end(made, running)
    first = began(made, now)
    assert list(first.items) == [due]
    bulk(made, 20, 20, now=now)
    second = began(made, now)
    assert (second.lane != first.lane, list(second.items)) == (True, own[:1])


def test_a_flood_of_bulk_work_refuses_bulk_work_alone() -> None:
    """Its queue is bounded apart, and nothing that waits in it counts for other requests."""
    made, _ = busy(per_token(100), limits=AdmissionLimits(1000))
    made.admission.bulk.capacity = 300
    held = [bulk(made, 100) for _ in range(2)]
    with pytest.raises(BulkOverloaded, match="bulk work") as refused:
        bulk(made, 101)
    assert refused.value.retry_after_s == pytest.approx(0.02, abs=0.01)
    assert submit(made, 100, timeout=0.05)
    assert made.admission.online.refusals == {"queue_full": 0, "predicted_late": 0, "hopeless": 0, "not_ready": 0}
    assert made.admission.bulk.refusals["queue_full"] == 1
    assert all(item.waits for request in held for item in request)


def test_bulk_work_has_no_deadline_but_its_own() -> None:
    """The server's default and its longest do not count; what the client says does, and nothing else."""
    made = scheduler(constant(1000), limits=AdmissionLimits(1000, default_timeout_ms=10, max_timeout_ms=20))

    def admitted(timeout_ms: float | None) -> Permit:
        return made.admission.admit(
            FIRST, [40], longest=None, arrival=1.0, timeout_ms=timeout_ms, priority=BULK, now=1.0
        )

    assert admitted(None).deadline == NEVER
    assert admitted(60_000).deadline == pytest.approx(61.0)
    with pytest.raises(DeadlineExceeded):
        admitted(0.5).confirm([10], 1.0)


def test_bulk_work_with_a_deadline_is_refused_where_it_cannot_be_kept() -> None:
    """By what waits before it; other requests do not wait for it."""
    made, _ = busy(per_token(125))
    for _ in range(20):
        bulk(made, 64)
    with pytest.raises(BulkOverloaded):
        bulk(made, 64, timeout=0.1)
    assert submit(made, 64, timeout=0.1)


def test_predictions_leave_bulk_work_its_share() -> None:
    """While it waits, everything else takes a little longer."""
    made, _ = busy(per_token(125))
    for _ in range(10):
        submit(made, 64)
    alone_s = made.predictor.drain_s(0.0)
    bulk(made, 64)
    assert made.predictor.drain_s(0.0) == pytest.approx(alone_s / 0.95, rel=0.01)


def test_what_is_cancelled_or_put_back_keeps_its_queue() -> None:
    """A batch of both classes that failed returns text by text, each to its own."""
    made, running = busy(constant(1000))
    (own,), extra = submit(made, 20), bulk(made, 20, 20)
    batch = began(made, end(made, running))
    assert list(batch.items) == [own, *extra]
    made.put_back(batch.items)
    assert (made.queue.items, made.bulk.items) == (1, 2)
    made.cancel(extra)
    assert (made.queue.items, made.bulk.items) == (1, 0)


def shares(seed: int, *, lanes: int) -> list[float]:
    """The share of bulk work in each of several windows while queries and bulk work both always wait."""
    dice = random.Random(seed)
    narrow = per_token(50, 300) if lanes > 1 else None
    made = scheduler(per_token(30, 300), narrow, lanes=lanes)
    running: list[tuple[float, Assignment]] = []
    now, found = 0.0, []
    for _ in range(5):
        before = made.online_us, made.bulk_us
        for _ in range(200):
            for of, most in ((made.queue, 10), (made.bulk, 20)):
                while of.items < most:
                    priority = BULK if of is made.bulk else DEFAULT_PRIORITY
                    submit(made, dice.randint(4, 100), dice.randint(4, 60), priority=priority, now=now)
            while (batch := made.next(now)) is not None:
                running.append((now + batch.predicted_us * dice.uniform(0.7, 1.5) / 1e6, batch))
            running.sort(key=lambda one: one[0])
            now, batch = running.pop(0)
            made.learn(batch, batch.predicted_us, made.done(batch, now))
        online, own = made.online_us - before[0], made.bulk_us - before[1]
        found.append(own / (online + own))
    return found


def check_shares(drawn: tuple[int, int]) -> None:
    """In every window but the first, where nothing is owed yet. What fills up batches nearly for nothing is on top."""
    seed, lanes = drawn
    found = shares(seed, lanes=lanes)[1:]
    assert all(BULK_SHARE - 0.015 < one < BULK_SHARE + 0.03 for one in found), found


@sizes(400)
def test_bulk_work_has_its_share_of_a_device_that_never_rests(examples: int) -> None:
    """In every window of two hundred batches, and hardly more."""
    drawn = st.tuples(st.integers(0, 1 << 30), st.sampled_from([1, 3, 5]))
    each(drawn, examples, check_shares)


def device(cost: Callable[[int, int], float], narrow: Callable[[int, int], float] | None = None) -> Device:
    costs = model_costs(cost, narrow)
    return Device(points=list(costs.points), narrow_lanes=2 if narrow else 0)


def poisson(rate: float, seconds: float, seed: int, timeout_s: float = 100.0) -> list[Arrival]:
    dice, at, made = random.Random(seed), 0.0, []
    while (at := at + dice.expovariate(rate)) < seconds:
        made.append(Arrival(at, (dice.randint(8, 64),), timeout_s))
    return made


JOB = BulkJob(10.0, {16: 1.0, 40: 1.0, 64: 1.0}, texts=16, requests=8)


@pytest.mark.parametrize("narrow", [None, per_token(40, 200)], ids=["one lane", "three lanes"])
def test_queries_hardly_wait_for_a_saturating_bulk_job(narrow: Callable[[int, int], float] | None) -> None:
    """At half of the capacity: each waits for a slice more, at most, and bulk work gets four fifths of the rest."""
    machine = device(per_token(25, 200), narrow)
    policy = Policy(1024, batch_invariant=[True], narrow=[narrow is not None], group_tokens=64)
    queries = poisson(0.5 / 0.0011, 10.0, 1)
    without = play(machine, policy, queries)
    beside = play(machine, policy, queries, JOB)
    alone = play(machine, policy, [], JOB)
    assert all(outcome.fate is RequestOutcome.ANSWERED for outcome in beside.outcomes)
    mean_s = [sum(outcome.latency_s for outcome in of.outcomes) / len(queries) for of in (without, beside)]
    assert mean_s[1] < mean_s[0] + 0.008
    assert beside.bulk.texts >= 0.8 * 0.5 * alone.bulk.texts


def test_deadlines_hold_beside_a_saturating_bulk_job() -> None:
    """Of what is admitted nothing comes too late, and hardly anything is refused at half of the capacity."""
    machine = device(per_token(25, 200))
    policy = Policy(1024, batch_invariant=[True], narrow=[False])
    queries = poisson(0.5 / 0.0011, 10.0, 2, timeout_s=0.04)
    fates = [outcome.fate for outcome in play(machine, policy, queries, JOB).outcomes]
    assert fates.count(RequestOutcome.ANSWERED) >= 0.98 * len(fates)
    assert fates.count(RequestOutcome.LATE) <= 0.002 * len(fates)


def test_bulk_work_goes_on_while_queries_overload_the_server() -> None:
    """At twice the capacity it has its twentieth."""
    machine = device(per_token(25, 200))
    policy = Policy(1024, batch_invariant=[True], narrow=[False])
    queries = poisson(2 / 0.0011, 10.0, 3, timeout_s=0.2)
    done = play(machine, policy, queries, JOB).bulk
    assert done.device_us == pytest.approx(0.05 * 10e6, rel=0.1)
