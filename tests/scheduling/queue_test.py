from __future__ import annotations

from array import array
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from bertserve.serving.records import PRIORITIES, EncodedText, ModelIndex
from bertserve.serving.scheduling.cost import bucket_for
from bertserve.serving.scheduling.queue import Backlog, WorkItem, WorkQueue


def item(tokens: int, model: int = 0, *, key: float = 0.0, priority: int = 2, work_us: int = 1) -> WorkItem:
    text = EncodedText(array("i", range(tokens)))
    return WorkItem(ModelIndex(model), text, tokens, None, 0, key=key, priority=priority, work_us=work_us)


def place(one: WorkItem) -> tuple[int, float, int]:
    return (one.priority, one.key, one.order)


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

    @rule()
    def remove_what_was_never_queued(self) -> None:
        self.queue.remove([item(4)])
        assert list(self.queue.peers(item(4), 9)) == []

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

        groups = [list(group) for _, group in groupby(sorted(self.expected, key=key), key)]
        for peers in groups:
            assert list(self.queue.peers(peers[-1], 1000)) == peers
            assert list(self.queue.peers(peers[-1], 1)) == peers[:1]
        assert sorted(self.queue.heads(), key=place) == sorted((peers[0] for peers in groups), key=place)


@pytest.mark.parametrize(("examples", "steps"), [(100, 30), pytest.param(3000, 100, marks=pytest.mark.endurance)])
def test_no_item_is_lost_doubled_or_overtaken(examples: int, steps: int) -> None:
    """Over random sequences of pushes, removals and returns, the queue agrees with a list."""
    size = settings(max_examples=examples, stateful_step_count=steps)
    run_state_machine_as_test(_QueueBesideAList, settings=size)


keys = st.floats(0, 50) | st.floats(0, 1e4)
works = st.lists(st.tuples(keys, st.integers(1, 1000), st.sampled_from(PRIORITIES)), max_size=40)


@given(works, keys, st.data())
@settings(max_examples=200)
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
