from __future__ import annotations

from array import array
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serving.records import PRIORITIES, EncodedText, ModelIndex
from serving.scheduling.cost import bucket_for
from serving.scheduling.queue import Backlog, WorkItem, WorkQueue


def item(tokens: int, model: int = 0, *, key: float = 0.0, priority: int = 2, work_us: int = 1) -> WorkItem:
    """A text of so many tokens."""
    text = EncodedText(array("i", range(tokens)))
    return WorkItem(ModelIndex(model), text, tokens, None, 0, key=key, priority=priority, work_us=work_us)


def place(one: WorkItem) -> tuple[int, float, int]:
    """What decides who goes first."""
    return (one.priority, one.key, one.order)


def test_an_empty_queue_has_no_head() -> None:
    """Nothing waits."""
    queue = WorkQueue()
    assert queue.head() is None
    assert queue.heads() == queue.drain() == []


def test_the_smallest_key_goes_first() -> None:
    """Of all buckets and models; among equal keys the one that came first."""
    queue = WorkQueue()
    items = [item(40, key=3), item(5, key=1), item(300, model=1, key=2), item(6, key=1)]
    queue.push(items)
    found = []
    while (head := queue.head()) is not None:
        found.append(head)
        queue.remove([head])
    assert found == [items[1], items[3], items[2], items[0]]


def test_a_class_goes_before_every_later_class() -> None:
    """Whatever their keys are."""
    queue = WorkQueue()
    items = [item(4, key=1, priority=3), item(40, key=9, priority=1), item(4, key=2, priority=2)]
    queue.push(items)
    found = []
    while (head := queue.head()) is not None:
        found.append(head.priority)
        queue.remove([head])
    assert found == [1, 2, 3]


def test_peers_are_the_items_of_one_class_model_and_bucket_in_order() -> None:
    """Other lengths, other models and other classes are not in the way."""
    queue = WorkQueue()
    first, long, foreign, urgent, second = item(20), item(40), item(20, model=1), item(20, priority=1), item(32)
    queue.push([first, long, foreign, urgent, second])
    assert list(queue.peers(second, 9)) == [first, second]
    assert list(queue.peers(second, 1)) == [first]
    assert list(queue.peers(foreign, 9)) == [foreign]
    assert sorted(queue.heads(), key=place) == [urgent, first, long, foreign]


def test_an_item_that_was_never_queued_has_no_peers() -> None:
    """It belongs to no bucket yet."""
    assert list(WorkQueue().peers(item(3), 9)) == []


def test_items_tokens_and_work_are_counted() -> None:
    """As the metrics show them."""
    queue = WorkQueue()
    items = [item(4, work_us=10), item(30, work_us=50)]
    queue.push(items)
    assert (queue.items, queue.tokens, queue.backlog.total_us) == (2, 34, 60)
    queue.remove(items[:1])
    assert (queue.items, queue.tokens, queue.backlog.total_us) == (1, 30, 50)


def test_removing_what_is_not_there_changes_nothing() -> None:
    """An item may be removed twice, or without ever having been queued."""
    queue = WorkQueue()
    gone, stays = item(4), item(4)
    queue.push([gone, stays])
    queue.remove([gone, item(4)])
    queue.remove([gone])
    assert (queue.items, queue.tokens, queue.head()) == (1, 4, stays)


def test_draining_takes_everything() -> None:
    """All items come out once, whatever their buckets."""
    queue = WorkQueue()
    items = [item(4), item(40), item(4, model=1), item(5)]
    queue.push(items)
    assert sorted(queue.drain(), key=place) == items
    assert (queue.items, queue.tokens, queue.head(), queue.backlog.total_us) == (0, 0, None, 0)


def test_what_comes_back_takes_its_old_place() -> None:
    """Before everything that has the same key and came since, in its old order."""
    queue = WorkQueue()
    batch, later = [item(4) for _ in range(3)], [item(4) for _ in range(2)]
    queue.push(batch)
    queue.remove(batch)
    queue.push(later)
    queue.push(batch)
    assert list(queue.peers(batch[0], 9)) == [*batch, *later]


class _QueueBesideAList(RuleBasedStateMachine):
    """The queue beside the simplest thing that could be right: a list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WorkQueue()
        self.expected: list[WorkItem] = []
        self.removed: list[WorkItem] = []

    @rule(
        lengths=st.lists(st.integers(1, 70), max_size=5),
        model=st.integers(0, 2),
        key=st.floats(0, 100),
        priority=st.sampled_from(PRIORITIES),
    )
    def push(self, lengths: list[int], model: int, key: float, priority: int) -> None:
        items = [item(tokens, model, key=key, priority=priority, work_us=10 * tokens) for tokens in lengths]
        self.queue.push(items)
        self.expected = sorted(self.expected + items, key=place)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.expected) - 1), max_size=4))
        items = [self.expected[at] for at in chosen]
        self.queue.remove(items)
        self.removed += set(items)
        self.expected = [one for one in self.expected if one not in items]

    @precondition(lambda self: self.removed)
    @rule(data=st.data())
    def remove_again(self, data: st.DataObject) -> None:
        self.queue.remove([data.draw(st.sampled_from(self.removed))])

    @precondition(lambda self: self.expected)
    @rule(count=st.integers(1, 4))
    def take_and_return(self, count: int) -> None:
        """As the dispatcher does with a batch that failed."""
        head = self.queue.head()
        assert head is not None
        batch = list(self.queue.peers(head, count))
        self.queue.remove(batch)
        self.queue.push(batch)

    @rule()
    def drain(self) -> None:
        assert sorted(self.queue.drain(), key=place) == self.expected
        self.expected.clear()

    @invariant()
    def nothing_is_lost_and_the_order_stands(self) -> None:
        assert self.queue.items == len(self.expected)
        assert self.queue.tokens == sum(one.tokens for one in self.expected)
        assert self.queue.backlog.total_us == sum(one.work_us for one in self.expected)
        assert self.queue.head() is (self.expected[0] if self.expected else None)

        def key(one: WorkItem) -> tuple[int, int, int]:
            return (one.priority, one.model, bucket_for(one.tokens))

        for _, group in groupby(sorted(self.expected, key=key), key):
            peers = list(group)
            assert list(self.queue.peers(peers[0], 1000)) == peers


def test_no_item_is_lost_doubled_or_overtaken() -> None:
    """Over random sequences of pushes, removals and returns, the queue agrees with a list."""
    short = settings(derandomize=True, max_examples=100, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(_QueueBesideAList, settings=short)


@pytest.mark.endurance
def test_no_item_is_lost_doubled_or_overtaken_at_full_size() -> None:
    """The same, for longer."""
    full = settings(derandomize=True, max_examples=3000, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(_QueueBesideAList, settings=full)


keys = st.floats(0, 50) | st.floats(0, 1e4)
works = st.lists(st.tuples(keys, st.integers(1, 1000), st.sampled_from(PRIORITIES)), max_size=40)


@given(works, keys, st.data())
@settings(derandomize=True, max_examples=200, deadline=None)
def test_the_work_ahead_is_that_of_smaller_keys_and_earlier_classes(
    added: list[tuple[float, int, int]], key: float, data: st.DataObject
) -> None:
    """To a hundredth of a second, after any removals, and however far keys lie apart: bulk work may wait for hours."""
    items = [item(1, key=at, priority=priority, work_us=us) for at, us, priority in added]
    backlog = Backlog()
    for one in items:
        backlog.add(one)
    if items:
        for one in data.draw(st.sets(st.sampled_from(range(len(items))))):
            backlog.remove(items[one])
            items[one].work_us = 0
    for priority in PRIORITIES:
        before = sum(one.work_us for one in items if one.priority < priority)
        own = [one for one in items if one.priority == priority]
        ahead = backlog.ahead_us(priority, key) - before
        assert ahead >= sum(one.work_us for one in own if one.key < key)
        assert ahead <= sum(one.work_us for one in own if one.key < key + 0.011)
    assert backlog.total_us == sum(one.work_us for one in items)


def test_keys_that_lie_far_apart_take_no_more_memory() -> None:
    """A deadline of an hour does not make a slot for each hundredth of it, and what has gone leaves none."""
    backlog = Backlog()
    items = [item(1, key=key, work_us=5) for key in (1e6, 0.0, 5e5, 3600.0, 1e9)]
    for one in items:
        backlog.add(one)
    assert backlog.ahead_us(2, 2e9) == backlog.total_us == 25
    assert [len(slots._work) for slots in backlog._classes.values()] == [len(items)]
    for one in items:
        backlog.remove(one)
    assert backlog.ahead_us(2, 2e9) == backlog.total_us == 0
    assert [len(slots._work) for slots in backlog._classes.values()] == [0]
