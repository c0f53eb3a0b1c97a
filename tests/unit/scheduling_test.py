"""Buckets, costs, admission, the queue and the batcher: the pure decisions."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import InvalidRequest, Overloaded
from serving.records import EncodedText, ModelIndex
from serving.scheduling.admission import Admission, estimate_tokens
from serving.scheduling.batcher import WIDE, Assignment, Policy, choose
from serving.scheduling.buckets import BUCKETS, bucket_for
from serving.scheduling.cost import CostTable
from serving.scheduling.queue import WorkItem, WorkQueue

INVARIANT, SINGLE = ModelIndex(0), ModelIndex(1)
POLICY = Policy(max_batch_tokens=256, batch_invariant=[True, False])
WIDE_ONLY = [False]


def item(tokens: int = 8, model: ModelIndex = INVARIANT, *, alone: bool = False) -> WorkItem:
    """A text of so many tokens."""
    return WorkItem(model, EncodedText(array("i", [1] * tokens)), owner=None, index=0, alone=alone)


def filled(*items: WorkItem) -> WorkQueue:
    """A queue of these items."""
    queue = WorkQueue()
    queue.push(items)
    return queue


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        (1, 16),
        (16, 16),
        (17, 32),
        (32, 32),
        (128, 128),
        (129, 256),
        (512, 512),
        (513, 1024),
        (1024, 1024),
        (1025, 2048),
    ],
)
def test_bucket_bounds(tokens: int, bucket: int) -> None:
    """A bucket's upper bound belongs to it."""
    assert bucket_for(tokens) == bucket


@given(st.integers(1, 1 << 20))
def test_a_bucket_holds_its_texts(tokens: int) -> None:
    """A text always fits its bucket, and beyond the shortest bucket fills more than half of it."""
    bucket = bucket_for(tokens)
    assert tokens <= bucket
    assert bucket == BUCKETS[0] or tokens > bucket // 2


def test_cost_between_measured_lengths() -> None:
    """Between two measured lengths the cost is linear."""
    table = CostTable([(10, 100.0), (20, 300.0)])
    assert [table.alone_us(tokens) for tokens in (10, 15, 20)] == [100.0, 200.0, 300.0]


def test_cost_below_the_shortest_length() -> None:
    """Below the shortest measured length the cost is the shortest's."""
    assert CostTable([(10, 100.0), (20, 300.0)]).alone_us(1) == 100.0


def test_cost_beyond_the_longest_length() -> None:
    """Beyond the longest measured length the cost grows in proportion."""
    assert CostTable([(10, 100.0), (20, 300.0)]).alone_us(40) == 600.0


def test_cost_ignores_measurements_that_fall() -> None:
    """Noise never makes a longer text cheaper."""
    assert CostTable([(20, 90.0), (10, 100.0)]).alone_us(20) == 100.0


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(-1, 1.0)], [(1, -1.0)]], ids=str)
def test_cost_points_must_make_sense(points: list[tuple[int, float]]) -> None:
    """A table without points, or with impossible ones, is refused."""
    with pytest.raises(ValueError, match="cost"):
        CostTable(points)


@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0, 1e6)), min_size=1, unique_by=lambda point: point[0]),
    st.integers(1, 1000),
)
def test_cost_never_falls_with_length(points: list[tuple[int, float]], tokens: int) -> None:
    """A longer text never costs less."""
    table = CostTable(points)
    assert table.alone_us(tokens) <= table.alone_us(tokens + 1) * (1 + 1e-9)


def test_estimate_counts_special_tokens() -> None:
    """An estimate is a quarter of the bytes and two tokens for each input."""
    assert estimate_tokens(size_bytes=400, inputs=3) == 106


def test_permit_holds_and_returns() -> None:
    """A permit's tokens are in flight inside its block and free after it."""
    admission = Admission(100)
    with admission.acquire(60):
        assert admission.in_flight == 60
    assert admission.in_flight == 0


def test_permit_returns_after_an_error() -> None:
    """Also when the block fails."""
    admission = Admission(100)
    with pytest.raises(KeyError), admission.acquire(60):
        raise KeyError
    assert admission.in_flight == 0


def test_permit_is_corrected() -> None:
    """The exact count replaces the estimate, up or down."""
    admission = Admission(100)
    with admission.acquire(60) as permit:
        permit.resize(100)
        assert admission.in_flight == 100
        permit.resize(5)
        assert admission.in_flight == 5
    assert admission.in_flight == 0


def test_full_is_refused_with_a_time() -> None:
    """Without room a request is refused and told when there should be some."""
    admission = Admission(100, us_per_token=100_000.0)
    with admission.acquire(90), pytest.raises(Overloaded) as refused:
        admission.acquire(11)
    assert refused.value.retry_after_s == 9
    assert admission.in_flight == 0


def test_exactly_full_is_admitted() -> None:
    """The capacity itself may be used."""
    admission = Admission(100)
    with admission.acquire(90), admission.acquire(10):
        assert admission.in_flight == 100


def test_retry_after_is_at_least_a_second() -> None:
    """Clients are never asked to hammer."""
    admission = Admission(1)
    with admission.acquire(1), pytest.raises(Overloaded) as refused:
        admission.acquire(1)
    assert refused.value.retry_after_s == 1


def test_more_than_the_server_holds_is_the_clients_error() -> None:
    """A request larger than the whole capacity would never fit: it is invalid, not early."""
    with pytest.raises(InvalidRequest):
        Admission(100).acquire(101)


def test_a_refused_correction_keeps_the_estimate() -> None:
    """When the exact count does not fit, the permit still holds and returns its estimate."""
    admission = Admission(100)
    with admission.acquire(50), admission.acquire(30) as permit:
        with pytest.raises(Overloaded):
            permit.resize(60)
        assert admission.in_flight == 80
    assert admission.in_flight == 0


@given(st.lists(st.integers(1, 60), max_size=30))
def test_admission_never_exceeds_its_capacity(sizes: list[int]) -> None:
    """Whatever is asked, what is in flight stays within the capacity and all of it comes back."""
    admission = Admission(100)
    held = []
    for size in sizes:
        try:
            held.append(admission.acquire(size))
        except Overloaded:
            assert admission.in_flight + size > 100
        assert admission.in_flight == sum(permit.tokens for permit in held) <= 100
    for permit in held:
        permit.__exit__()
    assert admission.in_flight == 0


def test_queue_is_first_in_first_out() -> None:
    """Without other reasons the oldest item is the head, whatever its bucket."""
    first, second, third = item(100), item(8), item(8)
    queue = filled(first, second, third)
    assert queue.head() is first
    queue.remove([first])
    assert queue.head() is second
    assert list(queue.peers(second)) == [second, third]


def test_queue_counts() -> None:
    """Items and tokens are counted in and out."""
    items = [item(8), item(100)]
    queue = filled(*items)
    assert (queue.items, queue.tokens) == (2, 108)
    queue.remove(items[:1])
    assert (queue.items, queue.tokens) == (1, 100)


def test_queue_passes_over_what_is_not_there() -> None:
    """Removing an item twice, or one of another queue, changes nothing."""
    mine, stranger = item(), item()
    queue = filled(mine)
    queue.remove([stranger])
    queue.remove([mine, mine])
    queue.remove([mine])
    assert (queue.items, queue.tokens, queue.head()) == (0, 0, None)


def test_queue_peers_share_model_and_bucket() -> None:
    """Texts of another model or bucket are no peers."""
    head = item(8)
    queue = filled(head, item(8, SINGLE), item(64), item(16))
    assert [peer.tokens for peer in queue.peers(head)] == [8, 16]


def test_queue_returning_items_keep_their_place() -> None:
    """Items that come back stand before what came after them."""
    old, new = item(), item()
    queue = filled(old, new)
    queue.remove([old])
    queue.push([old])
    assert queue.head() is old
    assert list(queue.peers(new)) == [old, new]


def test_queue_drain() -> None:
    """Draining returns every item and leaves an empty queue."""
    items = [item(8), item(100), item(8, SINGLE)]
    queue = filled(*items)
    assert {id(found) for found in queue.drain()} == {id(one) for one in items}
    assert (queue.items, queue.tokens, queue.head()) == (0, 0, None)


def test_nothing_to_choose() -> None:
    """An empty queue gives no batch."""
    assert choose(WorkQueue(), WIDE_ONLY, POLICY) is None


def test_a_batch_shares_one_bucket() -> None:
    """A batch takes the oldest item and its peers, oldest first."""
    head, other, peer = item(8), item(64), item(16)
    chosen = choose(filled(head, other, peer), WIDE_ONLY, POLICY)
    assert chosen == Assignment(WIDE, [head, peer])


def test_a_batch_stays_within_the_token_budget() -> None:
    """Padded tokens, not texts, bound a batch."""
    items = [item(60) for _ in range(10)]
    chosen = choose(filled(*items), WIDE_ONLY, POLICY)
    assert chosen is not None
    assert list(chosen.items) == items[:4]


def test_padding_counts_against_the_budget() -> None:
    """A longer text makes every place of the batch longer."""
    items = [item(33), item(33), item(33), item(64), item(33)]
    chosen = choose(filled(*items), WIDE_ONLY, POLICY)
    assert chosen is not None
    assert list(chosen.items) == items[:4]  # five times 64 would be too many


def test_a_single_text_may_exceed_the_budget() -> None:
    """A text longer than the budget runs, by itself."""
    items = [item(500), item(500)]
    chosen = choose(filled(*items), WIDE_ONLY, POLICY)
    assert chosen == Assignment(WIDE, items[:1])


def test_an_item_marked_alone_runs_alone() -> None:
    """What failed in company runs without it."""
    suspect, other = item(alone=True), item()
    queue = filled(suspect, other)
    assert choose(queue, WIDE_ONLY, POLICY) == Assignment(WIDE, [suspect])
    queue.remove([suspect])
    assert choose(queue, WIDE_ONLY, POLICY) == Assignment(WIDE, [other])


def test_an_item_marked_alone_joins_no_batch() -> None:
    """Nor does it join the batch of others."""
    head, suspect, other = item(), item(alone=True), item()
    assert choose(filled(head, suspect, other), WIDE_ONLY, POLICY) == Assignment(WIDE, [head, other])


def test_a_batch_waits_for_the_whole_device() -> None:
    """A batch-invariant model runs on the wide lane when every lane is idle."""
    queue = filled(item())
    assert choose(queue, [False, True, False], POLICY) is None
    assert choose(queue, [True, False, False], POLICY) is None
    assert choose(queue, [False, False, False], POLICY) is not None


def test_a_lone_text_takes_the_wide_lane() -> None:
    """Of a model that is not batch-invariant, a lone text on an idle device runs wide."""
    only = item(8, SINGLE)
    assert choose(filled(only), [False, False, False], POLICY) == Assignment(WIDE, [only])


def test_several_texts_run_side_by_side() -> None:
    """Several such texts run on the narrow lanes, one on each."""
    first, second, third = (item(8, SINGLE) for _ in range(3))
    queue = filled(first, second, third)
    assert choose(queue, [False, False, False], POLICY) == Assignment(1, [first])
    queue.remove([first])
    assert choose(queue, [False, True, False], POLICY) == Assignment(2, [second])
    queue.remove([second])
    assert choose(queue, [False, True, True], POLICY) is None


def test_a_text_beside_running_ones_stays_narrow() -> None:
    """The wide lane is not used while a narrow one works."""
    only = item(8, SINGLE)
    assert choose(filled(only), [False, True, False], POLICY) == Assignment(2, [only])


def test_without_narrow_lanes_the_wide_one_is_used() -> None:
    """On one core there is one lane for everything."""
    items = [item(8, SINGLE) for _ in range(2)]
    assert choose(filled(*items), [False], POLICY) == Assignment(WIDE, items[:1])
    assert choose(filled(*items), [True], POLICY) is None


lengths = st.integers(1, 300)
models = st.sampled_from([INVARIANT, SINGLE])


@given(
    st.lists(st.tuples(lengths, models, st.booleans()), min_size=1, max_size=60),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.integers(16, 2048),
)
def test_a_choice_keeps_every_rule(
    given_items: list[tuple[int, ModelIndex, bool]], busy: list[bool], budget: int
) -> None:
    """A chosen batch runs on an idle lane, holds one model and bucket, respects the budget and what must be alone."""
    policy = Policy(budget, [True, False])
    queue = filled(*[item(tokens, model, alone=alone) for tokens, model, alone in given_items])
    before = queue.items
    chosen = choose(queue, busy, policy)
    assert queue.items == before, "choosing changes nothing"
    if chosen is None:
        assert any(busy)
        return
    assert not busy[chosen.lane]
    batch = chosen.items
    assert len({id(one) for one in batch}) == len(batch) >= 1
    assert len({(one.model, bucket_for(one.tokens)) for one in batch}) == 1
    if len(batch) > 1:
        assert max(one.tokens for one in batch) * len(batch) <= budget
        assert not any(one.alone for one in batch)
        assert policy.batch_invariant[batch[0].model]
    if policy.batch_invariant[batch[0].model] or chosen.lane == WIDE:
        assert not any(busy)
    assert queue.head() in batch, "the oldest never waits for younger ones"


@given(
    st.lists(st.tuples(lengths, models, st.booleans()), max_size=60),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_every_item_runs_exactly_once(
    given_items: list[tuple[int, ModelIndex, bool]], lanes: int, dice: object
) -> None:
    """Driven to the end, with batches that sometimes come back to run alone, no item is lost or runs twice."""
    items = [item(tokens, model, alone=alone) for tokens, model, alone in given_items]
    queue = filled(*items)
    running: dict[int, list[WorkItem]] = {}
    finished: list[int] = []
    while queue.items or running:
        chosen = choose(queue, [lane in running for lane in range(lanes)], POLICY)
        if chosen is not None:
            queue.remove(chosen.items)
            running[chosen.lane] = list(chosen.items)
            continue
        assert running, "an idle device with work to do starts some"
        batch = running.pop(dice.choice(sorted(running)))  # type: ignore[attr-defined]
        if len(batch) > 1 and dice.random() < 0.3:  # type: ignore[attr-defined]
            for one in batch:
                one.alone = True
            queue.push(reversed(batch))
        else:
            finished += [id(one) for one in batch]
    assert sorted(finished) == sorted(id(one) for one in items)
    assert queue.tokens == 0


@given(
    st.lists(st.tuples(st.sampled_from(["push", "remove", "return"]), lengths, models, st.integers(0, 99)), max_size=80)
)
def test_queue_keeps_its_books(steps: list[tuple[str, int, ModelIndex, int]]) -> None:
    """After any sequence of steps the counts, the head and the order within buckets are right."""
    queue = WorkQueue()
    inside: list[WorkItem] = []
    outside: list[WorkItem] = []
    for step, tokens, model, pick in steps:
        if step == "push":
            inside.append(item(tokens, model))
            queue.push(inside[-1:])
        elif step == "remove" and inside:
            outside.append(inside.pop(pick % len(inside)))
            queue.remove(outside[-1:])
        elif step == "return" and outside:
            # Only a whole batch comes back before anything else of its bucket leaves; one item is the smallest.
            back = max(outside, key=lambda one: one.order)
            if all(one.order > back.order for one in inside if bucket_for(one.tokens) == bucket_for(back.tokens)):
                outside.remove(back)
                inside.append(back)
                queue.push([back])
        assert queue.items == len(inside)
        assert queue.tokens == sum(one.tokens for one in inside)
        assert queue.head() is min(inside, key=lambda one: one.order, default=None)
        for one in inside:
            orders = [peer.order for peer in queue.peers(one)]
            assert orders == sorted(orders)
