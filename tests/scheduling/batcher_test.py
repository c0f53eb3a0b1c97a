from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import strategies as st

from bertserve.serving.records import EncodedText, ModelIndex
from bertserve.serving.scheduling.batcher import WIDE, Assignment, Lanes, Policy, choose
from bertserve.serving.scheduling.queue import WorkItem, WorkQueue
from tests.support.costs import constant, model_costs, per_token
from tests.support.fuzzing import each, sizes
from tests.support.schedulers import items as made

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.scheduling.cost import ModelCosts

BATCHED, TEXT_BY_TEXT = 0, 1
POLICY = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[False, True])
IDLE = [0, 0, 0]


def queued(*lengths: int, model: int = BATCHED) -> tuple[WorkQueue, list[WorkItem]]:
    items = made(*lengths, model=model)
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


CARDS = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[True, True], apart=True)
PREFETCH = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[False, True], prefetch_tokens=20)
GROUPS = Policy(
    max_batch_tokens=640, batch_invariant=[True, False], narrow=[False, True], group_tokens=20, prefetch_tokens=25
)
ALL_NARROW = Policy(20, batch_invariant=[True, False], narrow=[True, True], group_tokens=20)


class Case(NamedTuple):
    """Texts that wait, tokens that each lane has to do, and the lane and the texts that are chosen, if any."""

    lengths: Sequence[int]
    load: Sequence[int]
    lane: int | None
    taken: Sequence[int] = ()
    model: int = BATCHED
    policy: Policy = POLICY
    alone: int | None = None


CASES: dict[str, Case] = {
    "an empty queue starts nothing": Case([], IDLE, None),
    "no batch starts beside a busy wide lane": Case([4, 4], [1, 0, 0], None),
    "no text starts beside a busy wide lane": Case([4, 4], [1, 0, 0], None, model=TEXT_BY_TEXT),
    # Where lanes are GPUs, a lone text on the wide lane keeps the first narrow one busy and no other.
    "cards: beside the wide lane the second": Case([10, 10], [10, 0, 0], 2, [0], policy=CARDS),
    "cards: beside the first the second": Case([10, 10], [0, 10, 0], 2, [0], policy=CARDS),
    "cards: beside the second the first": Case([10, 10], [0, 0, 10], 1, [0], policy=CARDS),
    "cards: both are busy": Case([10, 10], [10, 0, 10], None, policy=CARDS),
    "a batch takes all that fits the budget": Case([4] * 20, IDLE, WIDE, range(16)),
    "padding counts against the budget": Case([4, 4, 14, 4, 4], IDLE, WIDE, range(4)),
    "a text longer than the budget runs by itself": Case([100, 100], IDLE, WIDE, [0]),
    "the oldest decides which bucket runs": Case([20, *[4] * 10], IDLE, WIDE, [0]),
    "what must be alone is alone": Case([4, 4, 4], IDLE, WIDE, [0], alone=0),
    "what must be alone joins no batch of others": Case([4, 4, 4], IDLE, WIDE, [0, 2], alone=1),
    "a batch waits for the narrow lanes": Case([4], [0, 1, 0], None),
    # Texts of a model that is not batched: the wide lane answers a lone one fastest, but disturbs what runs.
    "a lone text gets the whole device": Case([4], IDLE, WIDE, [0], TEXT_BY_TEXT),
    "a lone text beside busy narrow lanes": Case([4], [0, 1, 0], 2, [0], TEXT_BY_TEXT),
    "side by side: the first lane": Case([4, 4], IDLE, 1, [0], TEXT_BY_TEXT),
    "side by side: the second lane": Case([4, 4], [0, 1, 0], 2, [0], TEXT_BY_TEXT),
    "side by side: the first lane again": Case([4, 4], [0, 0, 1], 1, [0], TEXT_BY_TEXT),
    "every narrow lane is busy": Case([4], [0, 1, 1], None, model=TEXT_BY_TEXT),
    "without narrow lanes texts run one by one": Case([4, 4], [0], WIDE, [0], TEXT_BY_TEXT),
    # A narrow lane near its end gets its next text, so that it never waits; the one with the least to do first.
    "ahead: an idle lane first": Case([4, 4], [0, 8, 0], 2, [0], TEXT_BY_TEXT, PREFETCH),
    "ahead: the second has less": Case([4, 4], [0, 8, 5], 2, [0], TEXT_BY_TEXT, PREFETCH),
    "ahead: the first has less": Case([4, 4], [0, 5, 8], 1, [0], TEXT_BY_TEXT, PREFETCH),
    "ahead: just near its end": Case([4, 4], [0, 19, 40], 1, [0], TEXT_BY_TEXT, PREFETCH),
    "ahead: both have enough to do": Case([4, 4], [0, 20, 20], None, (), TEXT_BY_TEXT, PREFETCH),
    "ahead: both have more than enough": Case([4, 4], [0, 500, 21], None, (), TEXT_BY_TEXT, PREFETCH),
    "ahead: not beside the wide lane": Case([4, 4], [1, 0, 0], None, (), TEXT_BY_TEXT, PREFETCH),
    "ahead: no batch behind the wide lane": Case([4, 4], [4, 0, 0], None, (), BATCHED, PREFETCH),
    "ahead: no batch behind a narrow lane": Case([4, 4], [0, 4, 0], None, (), BATCHED, PREFETCH),
    # Two lanes divide what waits between them, up to so many tokens each.
    "groups: two texts": Case([4] * 2, IDLE, 1, range(1), TEXT_BY_TEXT, GROUPS),
    "groups: three texts": Case([4] * 3, IDLE, 1, range(2), TEXT_BY_TEXT, GROUPS),
    "groups: four texts": Case([4] * 4, IDLE, 1, range(2), TEXT_BY_TEXT, GROUPS),
    "groups: eight texts": Case([4] * 8, IDLE, 1, range(4), TEXT_BY_TEXT, GROUPS),
    "groups: thirty texts": Case([4] * 30, IDLE, 1, range(5), TEXT_BY_TEXT, GROUPS),
    "groups: a long text runs by itself": Case([30] * 4, IDLE, 1, [0], TEXT_BY_TEXT, GROUPS),
    "groups: two would be too long": Case([15] * 4, IDLE, 1, [0], TEXT_BY_TEXT, GROUPS),
    "groups: the next would make it too long": Case([12, 4, 17, 4, 4, 4], IDLE, 1, [0], TEXT_BY_TEXT, GROUPS),
    "groups: the next is sent ahead": Case([4] * 10, [0, 20, 24], 1, range(5), TEXT_BY_TEXT, GROUPS),
    "groups: but no third one": Case([4] * 10, [0, 40, 44], None, (), TEXT_BY_TEXT, GROUPS),
    "groups: less than half of one waits for company": Case([4, 4], [0, 20, 24], None, (), TEXT_BY_TEXT, GROUPS),
    "groups: until a lane is free": Case([4, 4], [0, 0, 24], 1, [0], TEXT_BY_TEXT, GROUPS),
    # Narrow lanes that hold both models run what may be computed together in groups as well.
    "all narrow: a group of the batched model": Case([4] * 8, IDLE, 1, range(4), BATCHED, ALL_NARROW),
    "all narrow: a lone text of it": Case([4], IDLE, WIDE, [0], BATCHED, ALL_NARROW),
    "all narrow: a group of the other model": Case([4] * 8, IDLE, 1, range(4), TEXT_BY_TEXT, ALL_NARROW),
    "all narrow: a lone text of that": Case([4], IDLE, WIDE, [0], TEXT_BY_TEXT, ALL_NARROW),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_runs_next_and_where(case: Case) -> None:
    queue, items = queued(*case.lengths, model=case.model)
    if case.alone is not None:
        items[case.alone].alone = True
    expected = None if case.lane is None else (case.lane, [items[at] for at in case.taken])
    assert chosen(queue, case.load, case.policy) == expected


def test_a_batch_holds_one_model_and_one_bucket() -> None:
    """Other texts wait for the next batch, even those that are older than some of it."""
    queue, items = queued(4, 20, 5)
    queue.push([WorkItem(ModelIndex(TEXT_BY_TEXT), items[0].text, items[0].tokens, None, 0)])
    assert chosen(queue, IDLE, POLICY) == (WIDE, [items[0], items[2]])


MILLISECOND = 1e-3
ONE_LANE = Policy(max_batch_tokens=1024, batch_invariant=[True], narrow=[False])
TWO_NARROW = Policy(max_batch_tokens=1024, batch_invariant=[True], narrow=[True], group_tokens=64, prefetch_tokens=72)


def pick(queue: WorkQueue, policy: Policy, known: ModelCosts) -> Assignment:
    """The choice of an engine without work, with narrow lanes where the policy has them."""
    found = choose(queue, Lanes.idle(3 if policy.narrow[0] else 1), policy, [known], 0.0)
    assert found is not None
    return found


T4_US = {1: 1760.0, 2: 2500.0, 4: 4170.0, 8: 8360.0}
"""The published times of BERT-base on a T4 at 128 tokens: they gain a tenth by doubling up to 4, and not to 8."""


@pytest.mark.parametrize(
    ("lengths", "policy", "known", "taken"),
    [
        ([128] * 8, ONE_LANE, model_costs(lambda tokens, texts: T4_US.get(texts, 1045.0 * texts) * tokens / 128), 4),
        ([40] * 8, ONE_LANE, model_costs(per_token(30)), 1),
        ([8] * 40, TWO_NARROW, model_costs(per_token(30), per_token(50), group_tokens=64), 8),
        ([7] * 40, TWO_NARROW, model_costs(per_token(30), per_token(50), group_tokens=64), 9),
    ],
    ids=["texts get no cheaper", "every text costs its own time", "a group of 64 tokens", "no power of two"],
)
def test_how_far_batches_grow(lengths: list[int], policy: Policy, known: ModelCosts, taken: int) -> None:
    """As far as that pays; a group travels together even so, as the wake-up costs about as much as its texts."""
    queue, items = queued(*lengths)
    assert list(pick(queue, policy, known).items) == items[:taken]


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


FEW_TOKENS = Policy(max_batch_tokens=32, batch_invariant=[True], narrow=[False])
DEAR = model_costs(lambda _, texts: {1: 1000.0, 2: 1700.0}.get(texts, 600.0 * texts))


@pytest.mark.parametrize(
    ("lengths", "hurried", "left_ms", "size", "policy", "known"),
    [
        # 1.0, 1.1, 1.3 and 1.7 ms for 1, 2, 4 and 8 texts; a deadline that no batch keeps bounds none.
        *[
            ([8] * 8, 0, left_ms, size, ONE_LANE, model_costs(doubling))
            for left_ms, size in ((10, 8), (1.75, 8), (1.65, 4), (1.25, 2), (1.05, 1), (0.9, 8))
        ],
        # The deadline of a text of another bucket that needs 1 ms after the batch.
        *[
            ([*[8] * 8, 40], 8, left_ms, size, ONE_LANE, model_costs(doubling))
            for left_ms, size in ((10, 8), (2.75, 8), (2.65, 4), (2.25, 2), (2.05, 1), (1.9, 8))
        ],
        # Only four of five fit the budget; the last is in time after two, and not after four.
        ([8] * 5, 4, 2.2, 2, FEW_TOKENS, model_costs(doubling)),
        # Behind one text the fourth would be in time; behind two it would not, and inside four not either.
        ([8] * 4, 3, 2.2, 2, ONE_LANE, DEAR),
    ],
)
def test_a_batch_breaks_no_deadline_that_a_smaller_one_keeps(
    lengths: list[int], hurried: int, left_ms: float, size: int, policy: Policy, known: ModelCosts
) -> None:
    """Neither of its own texts nor of those that wait behind it."""
    queue, items = queued(*lengths)
    items[hurried].deadline = left_ms * MILLISECOND
    items[hurried].least_us = 1000 if hurried else 0
    assert len(pick(queue, policy, known).items) == size


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
    queue, lanes, policy, known = situation
    waiting, head = queue.items, queue.head()
    found = choose(queue, lanes, policy, known, 0.0)
    assert queue.items == waiting
    assert choose(queue, lanes, policy, known, 0.0) == found
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


@sizes(100_000)
def test_every_choice_keeps_every_rule(examples: int) -> None:
    """The head first, one bucket, the budget, loners alone, lanes free, and no deadline broken for a larger batch."""
    each(situations(), examples, check)
