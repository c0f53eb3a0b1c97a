from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.records import EncodedText, ModelIndex
from serving.scheduling.batcher import WIDE, Assignment, Lanes, Policy, choose
from serving.scheduling.queue import WorkItem, WorkQueue
from tests.support.costs import constant, model_costs, per_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.scheduling.cost import ModelCosts

BATCHED, TEXT_BY_TEXT = 0, 1
POLICY = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[False, True])
IDLE = [0, 0, 0]


def queued(*lengths: int, model: int = BATCHED) -> tuple[WorkQueue, list[WorkItem]]:
    """A queue that holds texts of these lengths."""
    items = [WorkItem(ModelIndex(model), EncodedText(array("i", range(tokens))), tokens, None, 0) for tokens in lengths]
    queue = WorkQueue()
    queue.push(items)
    return queue, items


def costs(policy: Policy) -> list[ModelCosts]:
    """Batches that cost the same whatever they hold, so that nothing but the other rules bounds them."""
    return [
        model_costs(
            constant(100),
            constant(100) if narrow else None,
            batched=batched,
            group_tokens=policy.group_tokens,
            max_batch_tokens=policy.max_batch_tokens,
        )
        for batched, narrow in zip(policy.batch_invariant, policy.narrow, strict=True)
    ]


def chosen(queue: WorkQueue, load: Sequence[int], policy: Policy) -> tuple[int, Sequence[WorkItem]] | None:
    """The lane and the batch that are chosen at the time 0."""
    found = choose(queue, Lanes(list(load), [0.0] * len(load)), policy, costs(policy), 0.0)
    return None if found is None else (found.lane, found.items)


def test_an_empty_queue_starts_nothing() -> None:
    """There is nothing to choose."""
    assert chosen(WorkQueue(), IDLE, POLICY) is None


@pytest.mark.parametrize("model", [BATCHED, TEXT_BY_TEXT])
def test_nothing_starts_beside_a_busy_wide_lane(model: int) -> None:
    """The wide lane uses the whole device."""
    queue, _ = queued(4, 4, model=model)
    assert chosen(queue, [1, 0, 0], POLICY) is None


@pytest.mark.parametrize(("load", "lane"), [([10, 0, 0], 2), ([0, 10, 0], 2), ([0, 0, 10], 1), ([10, 0, 10], None)])
def test_cards_work_beside_the_first_one_under_its_other_name(load: list[int], lane: int | None) -> None:
    """Where lanes are GPUs, a lone text on the wide lane keeps the first narrow one busy and no other."""
    policy = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[True, True], apart=True)
    queue, _ = queued(10, 10)
    found = chosen(queue, load, policy)
    assert (found[0] if found else None) == lane


def test_choosing_changes_nothing() -> None:
    """The choice is pure: whoever acts on it takes the items out."""
    queue, _ = queued(4, 4)
    assert chosen(queue, IDLE, POLICY) == chosen(queue, IDLE, POLICY)
    assert queue.items == 2


def test_a_batch_takes_all_that_fits_the_budget() -> None:
    """Sixteen texts of four tokens are 64 padded tokens."""
    queue, items = queued(*[4] * 20)
    assert chosen(queue, IDLE, POLICY) == (WIDE, items[:16])


def test_padding_counts_against_the_budget() -> None:
    """A longer text makes every row longer: five times 14 tokens are more than 64."""
    queue, items = queued(4, 4, 14, 4, 4)
    assert chosen(queue, IDLE, POLICY) == (WIDE, items[:4])


def test_a_text_longer_than_the_budget_runs_by_itself() -> None:
    """It must run at some time; the budget never holds a text back."""
    queue, items = queued(100, 100)
    assert chosen(queue, IDLE, POLICY) == (WIDE, items[:1])


def test_a_batch_holds_one_model_and_one_bucket() -> None:
    """Other texts wait for the next batch, even those that are older than some of it."""
    queue, items = queued(4, 20, 5)
    queue.push([WorkItem(ModelIndex(TEXT_BY_TEXT), items[0].text, items[0].tokens, None, 0)])
    assert chosen(queue, IDLE, POLICY) == (WIDE, [items[0], items[2]])


def test_the_oldest_item_decides_which_bucket_runs() -> None:
    """However many wait elsewhere."""
    queue, items = queued(20, *[4] * 10)
    assert chosen(queue, IDLE, POLICY) == (WIDE, items[:1])


def test_an_item_that_must_be_alone_is_alone() -> None:
    """A batch with it has failed."""
    queue, items = queued(4, 4, 4)
    items[0].alone = True
    assert chosen(queue, IDLE, POLICY) == (WIDE, items[:1])


def test_an_item_that_must_be_alone_joins_no_batch_of_others() -> None:
    """Its neighbours run without it."""
    queue, items = queued(4, 4, 4)
    items[1].alone = True
    assert chosen(queue, IDLE, POLICY) == (WIDE, [items[0], items[2]])


def test_a_batch_waits_for_the_narrow_lanes() -> None:
    """What is batched runs on the wide lane, and that runs beside nothing."""
    queue, _ = queued(4)
    assert chosen(queue, [0, 1, 0], POLICY) is None


def test_a_lone_text_of_a_model_that_is_not_batched_gets_the_whole_device() -> None:
    """The wide lane answers a lone text fastest."""
    queue, items = queued(4, model=TEXT_BY_TEXT)
    assert chosen(queue, IDLE, POLICY) == (WIDE, items)


@pytest.mark.parametrize(("busy", "lane"), [([0, 0, 0], 1), ([0, 1, 0], 2), ([0, 0, 1], 1)])
def test_several_such_texts_run_side_by_side(busy: list[int], lane: int) -> None:
    """Each on the first narrow lane that is free, one text at a time."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert chosen(queue, busy, POLICY) == (lane, items[:1])


def test_a_lone_text_beside_busy_narrow_lanes_takes_a_narrow_one() -> None:
    """The wide lane would disturb what runs."""
    queue, items = queued(4, model=TEXT_BY_TEXT)
    assert chosen(queue, [0, 1, 0], POLICY) == (2, items)


def test_a_text_waits_while_every_narrow_lane_is_busy() -> None:
    """The wide lane is not used beside them."""
    queue, _ = queued(4, model=TEXT_BY_TEXT)
    assert chosen(queue, [0, 1, 1], POLICY) is None


PREFETCH = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[False, True], prefetch_tokens=20)


@pytest.mark.parametrize(("load", "lane"), [([0, 8, 0], 2), ([0, 8, 5], 2), ([0, 5, 8], 1), ([0, 19, 40], 1)])
def test_a_narrow_lane_near_its_end_gets_its_next_text(load: list[int], lane: int) -> None:
    """So that it never waits for the loop; the lane with the least to do first."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert chosen(queue, load, PREFETCH) == (lane, items[:1])


@pytest.mark.parametrize("load", [[0, 20, 20], [0, 500, 21], [1, 0, 0]])
def test_a_lane_with_enough_to_do_gets_nothing_more(load: list[int]) -> None:
    """What waits in the queue can still be cancelled, and goes to whichever lane is free first."""
    queue, _ = queued(4, 4, model=TEXT_BY_TEXT)
    assert chosen(queue, load, PREFETCH) is None


def test_batches_are_never_sent_ahead() -> None:
    """A batch that is formed later is larger."""
    queue, _ = queued(4, 4)
    assert chosen(queue, [4, 0, 0], PREFETCH) is None
    assert chosen(queue, [0, 4, 0], PREFETCH) is None


GROUPS = Policy(
    max_batch_tokens=640, batch_invariant=[True, False], narrow=[False, True], group_tokens=20, prefetch_tokens=25
)


@pytest.mark.parametrize(("waiting", "given"), [(2, 1), (3, 2), (4, 2), (8, 4), (30, 5)])
def test_a_narrow_lane_gets_its_share_of_short_texts(waiting: int, given: int) -> None:
    """Two lanes divide what waits between them, up to so many tokens each."""
    queue, items = queued(*[4] * waiting, model=TEXT_BY_TEXT)
    assert chosen(queue, IDLE, GROUPS) == (1, items[:given])


@pytest.mark.parametrize("lengths", [(30, 30, 30, 30), (15, 15, 15, 15), (12, 4, 17, 4, 4, 4)])
def test_a_group_keeps_its_token_budget(lengths: tuple[int, ...]) -> None:
    """A long text runs by itself; what would make a group too long starts the next one."""
    queue, items = queued(*lengths, model=TEXT_BY_TEXT)
    found = chosen(queue, IDLE, GROUPS)
    assert found is not None
    assert found[1][0] is items[0]
    assert len(found[1]) == 1 or sum(item.tokens for item in found[1]) <= 20


@pytest.mark.parametrize("model", [BATCHED, TEXT_BY_TEXT])
def test_narrow_lanes_run_every_model_that_they_hold(model: int) -> None:
    """What may be computed together goes there in groups as well, and a lone text to the wide lane."""
    policy = Policy(20, batch_invariant=[True, False], narrow=[True, True], group_tokens=20)
    queue, items = queued(*[4] * 8, model=model)
    assert chosen(queue, IDLE, policy) == (1, items[:4])
    queue, items = queued(4, model=model)
    assert chosen(queue, IDLE, policy) == (WIDE, items)


def test_the_next_group_is_sent_ahead() -> None:
    """While a lane works on its last group, and not while it has two."""
    queue, items = queued(*[4] * 10, model=TEXT_BY_TEXT)
    assert chosen(queue, [0, 20, 24], GROUPS) == (1, items[:5])
    assert chosen(queue, [0, 40, 44], GROUPS) is None


def test_a_group_that_could_still_grow_is_not_sent_ahead() -> None:
    """Beside a lane that works, less than half a group waits for company until a lane is free."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert chosen(queue, [0, 20, 24], GROUPS) is None
    assert chosen(queue, [0, 0, 24], GROUPS) == (1, items[:1])


def test_without_narrow_lanes_texts_run_one_by_one_on_the_wide_lane() -> None:
    """As on a machine with one core."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert chosen(queue, [0], POLICY) == (WIDE, items[:1])


MILLISECOND = 1e-3
ONE_LANE = Policy(max_batch_tokens=1024, batch_invariant=[True], narrow=[False])
TWO_NARROW = Policy(max_batch_tokens=1024, batch_invariant=[True], narrow=[True], group_tokens=64, prefetch_tokens=72)


def pick(queue: WorkQueue, policy: Policy, known: ModelCosts, now: float = 0.0) -> Assignment:
    """The choice of an engine without work, with narrow lanes where the policy has them."""
    found = choose(queue, Lanes.idle(3 if policy.narrow[0] else 1), policy, [known], now)
    assert found is not None
    return found


def test_a_batch_stops_growing_where_texts_get_no_cheaper() -> None:
    """The published times of BERT-base on a T4 at 128 tokens gain a tenth by doubling up to 4, and not to 8."""
    times = {1: 1760.0, 2: 2500.0, 4: 4170.0, 8: 8360.0}
    known = model_costs(lambda tokens, texts: times.get(texts, 1045.0 * texts) * tokens / 128)
    queue, items = queued(*[128] * 8)
    assert list(pick(queue, ONE_LANE, known).items) == items[:4]


def test_where_every_text_costs_its_own_time_batches_do_not_grow() -> None:
    """As on a CPU from 32 tokens on."""
    queue, items = queued(*[40] * 8)
    assert list(pick(queue, ONE_LANE, model_costs(per_token(30))).items) == items[:1]


def test_a_group_travels_together_even_so() -> None:
    """Up to 64 tokens, since the frame and the wake-up cost about as much as they do."""
    queue, items = queued(*[8] * 40)
    assert list(pick(queue, TWO_NARROW, model_costs(per_token(30), per_token(50), group_tokens=64)).items) == items[:8]


def test_a_group_takes_what_fits_though_it_is_no_power_of_two() -> None:
    """Nine texts of seven tokens are 63."""
    queue, items = queued(*[7] * 40)
    assert list(pick(queue, TWO_NARROW, model_costs(per_token(30), per_token(50), group_tokens=64)).items) == items[:9]


def test_openvino_gets_groups_that_a_disturbed_warm_up_speaks_against() -> None:
    """Up to 256 tokens: that its batches gain is known. A deadline still keeps them small."""
    queue, items = queued(*[128] * 8)
    known = [
        model_costs(per_token(30), per_token(50), group_tokens=64, library=library)
        for library in ("onnxruntime", "openvino")
    ]
    assert [list(pick(queue, TWO_NARROW, costs).items) for costs in known] == [items[:1], items[:2]]
    items[0].deadline = 10 * MILLISECOND
    assert list(pick(queue, TWO_NARROW, known[1]).items) == items[:1]


def test_no_group_is_larger_than_a_batch_may_be() -> None:
    """Whatever the library that computes it would like."""
    policy = Policy(128, batch_invariant=[True], narrow=[True], group_tokens=64)
    known = model_costs(per_token(30), per_token(50), group_tokens=64, library="openvino", max_batch_tokens=128)
    queue, items = queued(*[64] * 8)
    assert (known.group_tokens(64), known.group(64)) == (128, 2)
    assert list(pick(queue, policy, known).items) == items[:2]


def test_a_group_grows_beyond_its_tokens_where_that_pays() -> None:
    """A narrow lane whose batches have a price of their own gets larger ones."""
    known = model_costs(per_token(30, 900), per_token(30, 5000), group_tokens=64)
    queue, _ = queued(*[8] * 64)
    found = pick(queue, TWO_NARROW, known)
    assert found.lane != WIDE or len(found.items) > 8


def test_the_wide_lane_has_what_it_carries_better() -> None:
    """Where its batches carry more texts than the narrow lanes side by side, by the cost table."""
    known = model_costs(constant(500), per_token(50), group_tokens=64)
    queue, items = queued(*[40] * 8)
    assert pick(queue, TWO_NARROW, known).lane == WIDE
    assert pick(queue, TWO_NARROW, model_costs(per_token(30), per_token(50))).lane != WIDE
    # Not beside narrow lanes that still work.
    assert choose(queue, Lanes([0, 40, 0], [0.0] * 3), TWO_NARROW, [known], 0.0) is None
    assert items


def test_a_text_in_a_hurry_gets_the_whole_device_if_only_that_is_in_time() -> None:
    """2 ms on one core and 1.2 ms on both, with 1.5 ms left: the wide lane; with 3 ms left, a narrow one."""
    known = model_costs(per_token(30), per_token(50))
    for left_ms, wide in ((1.5, True), (3.0, False), (1.0, False)):
        queue, items = queued(40, 40)
        items[0].deadline = left_ms * MILLISECOND
        assert (pick(queue, TWO_NARROW, known).lane == WIDE) is wide


def doubling(tokens: int, texts: int) -> float:
    """A batch that costs 1 ms and a tenth of one more for each text: a larger one always pays."""
    del tokens
    return 900 + 100 * texts


@pytest.mark.parametrize(("left_ms", "size"), [(10, 8), (1.75, 8), (1.65, 4), (1.25, 2), (1.05, 1), (0.9, 8)])
def test_a_batch_breaks_no_deadline_that_a_smaller_one_keeps(left_ms: float, size: int) -> None:
    """1.0, 1.1, 1.3 and 1.7 ms for 1, 2, 4 and 8 texts; what no batch keeps bounds none."""
    queue, items = queued(*[8] * 8)
    items[0].deadline = left_ms * MILLISECOND
    assert len(pick(queue, ONE_LANE, model_costs(doubling)).items) == size


@pytest.mark.parametrize(("left_ms", "size"), [(10, 8), (2.75, 8), (2.65, 4), (2.25, 2), (2.05, 1), (1.9, 8)])
def test_a_batch_breaks_no_deadline_of_what_waits_behind_it(left_ms: float, size: int) -> None:
    """A text of another bucket that needs 1 ms after it."""
    queue, items = queued(*[8] * 8, 40)
    items[8].deadline = left_ms * MILLISECOND
    items[8].least_us = 1000
    assert len(pick(queue, ONE_LANE, model_costs(doubling)).items) == size


def test_a_text_of_the_same_bucket_that_is_left_behind_waits_behind_it_too() -> None:
    """Only four of five fit the budget; the last is in time after two, and not after four."""
    queue, items = queued(*[8] * 5)
    items[4].deadline, items[4].least_us = 2.2 * MILLISECOND, 1000
    policy = Policy(max_batch_tokens=32, batch_invariant=[True], narrow=[False])
    assert len(pick(queue, policy, model_costs(doubling)).items) == 2


def test_a_text_that_is_taken_in_was_not_better_off_behind() -> None:
    """Behind one text the fourth would be in time; behind two it would not, and inside four not either."""
    known = model_costs(lambda _, texts: {1: 1000.0, 2: 1700.0}.get(texts, 600.0 * texts))
    queue, items = queued(*[8] * 4)
    items[3].deadline, items[3].least_us = 2.2 * MILLISECOND, 1000
    assert len(pick(queue, ONE_LANE, known).items) == 2


def test_a_text_that_is_too_late_is_left_out() -> None:
    """It would be computed for nobody."""
    queue, items = queued(8, 8, 8)
    items[1].deadline, items[1].least_us = 0.5 * MILLISECOND, 1000
    assert list(pick(queue, ONE_LANE, model_costs(constant(1000))).items) == [items[0], items[2]]


def test_the_time_that_a_lane_still_works_counts() -> None:
    """A group that is sent ahead starts when the lane is free, and deadlines are kept from then on."""
    known = model_costs(per_token(30), doubling, group_tokens=64)
    queue, items = queued(*[8] * 16)
    items[1].deadline = 3.2 * MILLISECOND
    for free_at_ms, size in ((0.5, 8), (1.8, 4), (2.0, 2), (2.15, 1)):
        lanes = Lanes([0, 64, 300], [0.0, free_at_ms * MILLISECOND, 0.0])
        found = choose(queue, lanes, Policy(1024, [True], [True], 64, 72), [known], 0.0)
        assert found is None or len(found.items) == size


@pytest.mark.parametrize(
    ("cost", "could_grow"), [(constant(100), True), (per_token(100), False)], ids=["pays", "does not pay"]
)
def test_a_batch_says_whether_it_wants_company(cost: Callable[[int, int], float], *, could_grow: bool) -> None:
    """It does if it took all that waits; not if it stopped for another reason."""
    queue, _ = queued(40, 40, 40)
    assert pick(queue, ONE_LANE, model_costs(cost)).could_grow is could_grow


def test_a_batch_knows_what_it_computes_in_vain() -> None:
    """Padding: three texts of up to 16 tokens."""
    queue, _ = queued(9, 16, 10)
    found = pick(queue, ONE_LANE, model_costs(constant(100)))
    assert (found.tokens, found.padded_length, found.padding) == (35, 16, 13)
    assert found.predicted_us == 100


@st.composite
def situations(draw: st.DrawFn) -> tuple[WorkQueue, Lanes, Policy, list[ModelCosts]]:
    """Texts with deadlines, lanes with work, limits and costs."""
    numbers = iter(draw(st.binary(min_size=16, max_size=150)))
    lanes = (1, 2, 3)[next(numbers) % 3]
    policy = Policy(
        max_batch_tokens=32 + 2 * next(numbers),
        batch_invariant=[True, next(numbers) % 2 == 0],
        narrow=[lanes > 1 and next(numbers) % 2 == 0, lanes > 1],
        group_tokens=next(numbers) % 65,
        prefetch_tokens=next(numbers) % 73,
        min_batch_gain=(0.0, 0.1, 0.3)[next(numbers) % 3],
    )
    known = [
        model_costs(
            per_token(1 + next(numbers) % 9, 100),
            per_token(10, 100) if narrow else None,
            narrow_lanes=lanes - 1,
            batched=batched,
            max_batch_tokens=policy.max_batch_tokens,
            group_tokens=policy.group_tokens,
            corners=True,
        )
        for batched, narrow in zip(policy.batch_invariant, policy.narrow, strict=True)
    ]
    load = [0] + [next(numbers) * (next(numbers) % 2) for _ in range(lanes - 1)]
    queue = WorkQueue()
    for length, rest in zip(numbers, numbers, strict=False):
        tokens = 1 + length % 80
        text = EncodedText(array("i", range(tokens)))
        item = WorkItem(ModelIndex(rest % 2), text, tokens, None, 0, alone=rest % 11 == 0, priority=1 + rest % 7 % 2)
        item.key, item.deadline = rest / 10, (0.1 + rest * length % 40 / 10) * MILLISECOND
        item.least_us = known[item.model].least_us(item.tokens)
        queue.push([item])
    return queue, Lanes(load, [tokens * 1e-5 for tokens in load]), policy, known


def check(situation: tuple[WorkQueue, Lanes, Policy, list[ModelCosts]]) -> None:
    """A choice keeps every rule, and changes nothing."""
    queue, lanes, policy, known = situation
    waiting, head = queue.items, queue.head()
    found = choose(queue, lanes, policy, known, 0.0)
    assert queue.items == waiting
    if found is None or head is None:
        # Something may wait only for a lane.
        assert not waiting or any(lanes.load)
        return
    batch, costs = list(found.items), known[head.model]
    assert batch[0] is head
    peers = [item for item in queue.peers(head, 1000) if item in batch]
    assert peers == batch
    longest = max(item.tokens for item in batch)
    together = policy.batch_invariant[head.model]
    assert len(batch) == 1 or longest * len(batch) <= (policy.max_batch_tokens if together else policy.group_tokens)
    assert len(batch) == 1 or not any(item.alone for item in batch)
    assert len(batch) == 1 or together or found.lane != WIDE
    assert not lanes.load[WIDE]
    assert policy.narrow[head.model] if found.lane else not any(lanes.load)
    assert_no_deadline_is_broken(queue, batch, costs, found.lane, lanes.free_at[found.lane])


def assert_no_deadline_is_broken(
    queue: WorkQueue, batch: list[WorkItem], costs: ModelCosts, lane: int, begin: float
) -> None:
    """Whatever a smaller batch would have kept, inside this one or at the heads behind it, this one keeps."""
    end = begin + costs.batch_us(lane, max(item.tokens for item in batch), len(batch)) / 1e6
    behind = [item for item in queue.heads() if item is not batch[0]]
    for size in range(1, len(batch)):
        sooner = begin + costs.batch_us(lane, max(item.tokens for item in batch[:size]), size) / 1e6
        assert not any(sooner <= item.deadline < end for item in batch[:size])
        assert not any(sooner + item.least_us / 1e6 <= item.deadline < end for item in batch[size:])
        late_s = [item.least_us / 1e6 for item in behind]
        kept = [sooner + late <= item.deadline for late, item in zip(late_s, behind, strict=True)]
        keeps = [end + late <= item.deadline for late, item in zip(late_s, behind, strict=True)]
        assert not any(before and not now for before, now in zip(kept, keeps, strict=True))


FULL = 100_000


@given(situations())
@settings(derandomize=True, max_examples=FULL // 20, deadline=None)
def test_every_choice_keeps_every_rule(situation: tuple[WorkQueue, Lanes, Policy, list[ModelCosts]]) -> None:
    """The head first, one bucket, the budget, loners alone, lanes free, and no deadline broken for a larger batch."""
    check(situation)


@pytest.mark.endurance
@given(situations())
@settings(derandomize=True, max_examples=FULL, deadline=None)
def test_every_choice_keeps_every_rule_at_full_size(
    situation: tuple[WorkQueue, Lanes, Policy, list[ModelCosts]],
) -> None:
    """The same over a hundred thousand."""
    check(situation)
