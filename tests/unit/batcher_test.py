from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.records import EncodedText, ModelIndex
from serving.scheduling.batcher import WIDE, Assignment, Policy, choose
from serving.scheduling.buckets import bucket_for
from serving.scheduling.queue import WorkItem, WorkQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHED, TEXT_BY_TEXT = 0, 1
POLICY = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[False, True])
IDLE = [False, False, False]


def queued(*lengths: int, model: int = BATCHED) -> tuple[WorkQueue, list[WorkItem]]:
    """A queue that holds texts of these lengths."""
    items = [WorkItem(ModelIndex(model), EncodedText(array("i", range(tokens))), None, 0) for tokens in lengths]
    queue = WorkQueue()
    queue.push(items)
    return queue, items


def test_an_empty_queue_starts_nothing() -> None:
    """There is nothing to choose."""
    assert choose(WorkQueue(), IDLE, POLICY) is None


@pytest.mark.parametrize("model", [BATCHED, TEXT_BY_TEXT])
def test_nothing_starts_beside_a_busy_wide_lane(model: int) -> None:
    """The wide lane uses the whole device."""
    queue, _ = queued(4, 4, model=model)
    assert choose(queue, [True, False, False], POLICY) is None


def test_choosing_changes_nothing() -> None:
    """The choice is pure: whoever acts on it takes the items out."""
    queue, _ = queued(4, 4)
    assert choose(queue, IDLE, POLICY) == choose(queue, IDLE, POLICY)
    assert queue.items == 2


def test_a_batch_takes_all_that_fits_the_budget() -> None:
    """Sixteen texts of four tokens are 64 padded tokens."""
    queue, items = queued(*[4] * 20)
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, items[:16])


def test_padding_counts_against_the_budget() -> None:
    """A longer text makes every row longer: five times 14 tokens are more than 64."""
    queue, items = queued(4, 4, 14, 4, 4)
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, items[:4])


def test_a_text_longer_than_the_budget_runs_by_itself() -> None:
    """It must run at some time; the budget never holds a text back."""
    queue, items = queued(100, 100)
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, items[:1])


def test_a_batch_holds_one_model_and_one_bucket() -> None:
    """Other texts wait for the next batch, even those that are older than some of it."""
    queue, items = queued(4, 20, 5)
    queue.push(queued(4, model=TEXT_BY_TEXT)[1])
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, [items[0], items[2]])


def test_the_oldest_item_decides_which_bucket_runs() -> None:
    """However many wait elsewhere."""
    queue, items = queued(20, *[4] * 10)
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, items[:1])


def test_an_item_that_must_be_alone_is_alone() -> None:
    """A batch with it has failed."""
    queue, items = queued(4, 4, 4)
    items[0].alone = True
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, items[:1])


def test_an_item_that_must_be_alone_joins_no_batch_of_others() -> None:
    """Its neighbours run without it."""
    queue, items = queued(4, 4, 4)
    items[1].alone = True
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, [items[0], items[2]])


def test_a_batch_waits_for_the_narrow_lanes() -> None:
    """What is batched runs on the wide lane, and that runs beside nothing."""
    queue, _ = queued(4)
    assert choose(queue, [False, True, False], POLICY) is None


def test_a_lone_text_of_a_model_that_is_not_batched_gets_the_whole_device() -> None:
    """The wide lane answers a lone text fastest."""
    queue, items = queued(4, model=TEXT_BY_TEXT)
    assert choose(queue, IDLE, POLICY) == Assignment(WIDE, items)


@pytest.mark.parametrize(
    ("busy", "lane"), [([False, False, False], 1), ([False, True, False], 2), ([False, False, True], 1)]
)
def test_several_such_texts_run_side_by_side(busy: list[bool], lane: int) -> None:
    """Each on the first narrow lane that is free, one text at a time."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert choose(queue, busy, POLICY) == Assignment(lane, items[:1])


def test_a_lone_text_beside_busy_narrow_lanes_takes_a_narrow_one() -> None:
    """The wide lane would disturb what runs."""
    queue, items = queued(4, model=TEXT_BY_TEXT)
    assert choose(queue, [False, True, False], POLICY) == Assignment(2, items)


def test_a_text_waits_while_every_narrow_lane_is_busy() -> None:
    """The wide lane is not used beside them."""
    queue, _ = queued(4, model=TEXT_BY_TEXT)
    assert choose(queue, [False, True, True], POLICY) is None


PREFETCH = Policy(max_batch_tokens=64, batch_invariant=[True, False], narrow=[False, True], prefetch_tokens=20)


@pytest.mark.parametrize(("load", "lane"), [([0, 8, 0], 2), ([0, 8, 5], 2), ([0, 5, 8], 1), ([0, 19, 40], 1)])
def test_a_narrow_lane_near_its_end_gets_its_next_text(load: list[int], lane: int) -> None:
    """So that it never waits for the loop; the lane with the least to do first."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert choose(queue, load, PREFETCH) == Assignment(lane, items[:1])


@pytest.mark.parametrize("load", [[0, 20, 20], [0, 500, 21], [1, 0, 0]])
def test_a_lane_with_enough_to_do_gets_nothing_more(load: list[int]) -> None:
    """What waits in the queue can still be cancelled, and goes to whichever lane is free first."""
    queue, _ = queued(4, 4, model=TEXT_BY_TEXT)
    assert choose(queue, load, PREFETCH) is None


def test_batches_are_never_sent_ahead() -> None:
    """A batch that is formed later is larger."""
    queue, _ = queued(4, 4)
    assert choose(queue, [4, 0, 0], PREFETCH) is None
    assert choose(queue, [0, 4, 0], PREFETCH) is None


GROUPS = Policy(
    max_batch_tokens=640, batch_invariant=[True, False], narrow=[False, True], group_tokens=20, prefetch_tokens=25
)


@pytest.mark.parametrize(("waiting", "given"), [(2, 1), (3, 2), (4, 2), (8, 4), (30, 5)])
def test_a_narrow_lane_gets_its_share_of_short_texts(waiting: int, given: int) -> None:
    """Two lanes divide what waits between them, up to so many tokens each."""
    queue, items = queued(*[4] * waiting, model=TEXT_BY_TEXT)
    assert choose(queue, IDLE, GROUPS) == Assignment(1, items[:given])


@pytest.mark.parametrize("lengths", [(30, 30, 30, 30), (15, 15, 15, 15), (12, 4, 17, 4, 4, 4)])
def test_a_group_keeps_its_token_budget(lengths: tuple[int, ...]) -> None:
    """A long text runs by itself; what would make a group too long starts the next one."""
    queue, items = queued(*lengths, model=TEXT_BY_TEXT)
    chosen = choose(queue, IDLE, GROUPS)
    assert chosen is not None
    assert chosen.items[0] is items[0]
    assert len(chosen.items) == 1 or sum(item.tokens for item in chosen.items) <= 20


@pytest.mark.parametrize("model", [BATCHED, TEXT_BY_TEXT])
def test_narrow_lanes_run_every_model_that_they_hold(model: int) -> None:
    """What may be computed together goes there in groups as well, and a lone text to the wide lane."""
    policy = Policy(640, batch_invariant=[True, False], narrow=[True, True], group_tokens=20)
    queue, items = queued(*[4] * 8, model=model)
    assert choose(queue, IDLE, policy) == Assignment(1, items[:4])
    queue, items = queued(4, model=model)
    assert choose(queue, IDLE, policy) == Assignment(WIDE, items)


def test_the_next_group_is_sent_ahead() -> None:
    """While a lane works on its last group, and not while it has two."""
    queue, items = queued(*[4] * 10, model=TEXT_BY_TEXT)
    assert choose(queue, [0, 20, 24], GROUPS) == Assignment(1, items[:5])
    assert choose(queue, [0, 40, 44], GROUPS) is None


def test_a_group_that_could_still_grow_is_not_sent_ahead() -> None:
    """Beside a lane that works, less than half a group waits for company until a lane is free."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert choose(queue, [0, 20, 24], GROUPS) is None
    assert choose(queue, [0, 0, 24], GROUPS) == Assignment(1, items[:1])


def test_without_narrow_lanes_texts_run_one_by_one_on_the_wide_lane() -> None:
    """As on a machine with one core."""
    queue, items = queued(4, 4, model=TEXT_BY_TEXT)
    assert choose(queue, [False], POLICY) == Assignment(WIDE, items[:1])


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[WorkItem], list[bool], Policy]:
    """Items in order of arrival, busy lanes and limits."""
    items = [
        WorkItem(ModelIndex(model), EncodedText(array("i", range(tokens))), None, 0, alone=alone)
        for model, tokens, alone in draw(
            st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80), st.sampled_from([False, False, True])))
        )
    ]
    busy = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    invariant = draw(st.lists(st.booleans(), min_size=3, max_size=3))
    narrow = [draw(st.booleans()) or not together for together in invariant]
    return items, busy, Policy(draw(st.integers(16, 256)), invariant, narrow, draw(st.integers(0, 64)))


@given(situations())
@settings(derandomize=True, max_examples=500, deadline=None)
def test_every_choice_keeps_every_rule(situation: tuple[list[WorkItem], list[bool], Policy]) -> None:
    """One model and bucket, the oldest item first, the order kept, the budget kept, lanes free, loners alone."""
    items, busy, policy = situation
    queue = WorkQueue()
    queue.push(items)
    chosen = choose(queue, busy, policy)
    if chosen is None:
        # Something may wait only for a lane.
        assert not items or any(busy)
        return
    batch = list(chosen.items)
    assert batch[0] is items[0]
    assert [one for one in items if one in batch] == batch
    assert len({(one.model, bucket_for(one.tokens)) for one in batch}) == 1
    budget = policy.max_batch_tokens if chosen.lane == WIDE else policy.group_tokens
    assert len(batch) == 1 or max(one.tokens for one in batch) * len(batch) <= budget
    assert len(batch) == 1 or not any(one.alone for one in batch)
    assert not busy[chosen.lane]
    assert not busy[WIDE]
    if chosen.lane == WIDE:
        assert not any(busy)
        assert len(batch) == 1 or policy.batch_invariant[batch[0].model]
    else:
        assert policy.narrow[batch[0].model]


@given(situations())
@settings(derandomize=True, max_examples=300, deadline=None)
def test_whatever_waits_runs_once_and_oldest_first_in_its_bucket(
    situation: tuple[list[WorkItem], list[bool], Policy],
) -> None:
    """Running every choice to its end answers each item once, and no item overtakes one of its own bucket."""
    items, lanes, policy = situation
    queue = WorkQueue()
    queue.push(items)
    done: list[WorkItem] = []
    while (chosen := choose(queue, [False] * len(lanes), policy)) is not None:
        queue.remove(chosen.items)
        done += chosen.items
    assert sorted(done, key=lambda one: one.order) == items
    assert_no_loner_makes_others_overtake(done)


def assert_no_loner_makes_others_overtake(done: Sequence[WorkItem]) -> None:
    """In each bucket, those that may share batches keep their order, and so do those that may not."""
    for loners in (False, True):
        kept = [one for one in done if one.alone is loners]
        for key in {one.key for one in kept}:
            orders = [one.order for one in kept if one.key == key]
            assert orders == sorted(orders)
