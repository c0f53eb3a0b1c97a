from __future__ import annotations

from array import array
from itertools import groupby

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from serving.records import EncodedText, ModelIndex
from serving.scheduling.buckets import bucket_for
from serving.scheduling.queue import WorkItem, WorkQueue


def item(tokens: int, model: int = 0) -> WorkItem:
    """A text of so many tokens."""
    return WorkItem(ModelIndex(model), EncodedText(array("i", range(tokens))), None, 0)


def test_an_empty_queue_has_no_head() -> None:
    """Nothing waits."""
    queue = WorkQueue()
    assert queue.head() is None
    assert queue.drain() == []


def test_the_head_is_the_oldest_item_of_all_buckets() -> None:
    """Neither length nor model lets an item overtake."""
    queue = WorkQueue()
    items = [item(40), item(5), item(300, model=1), item(6)]
    queue.push(items)
    found = []
    while (head := queue.head()) is not None:
        found.append(head)
        queue.remove([head])
    assert found == items


def test_peers_are_the_items_of_one_model_and_bucket_oldest_first() -> None:
    """Other lengths and other models are not in the way."""
    queue = WorkQueue()
    first, long, foreign, second = item(20), item(40), item(20, model=1), item(32)
    queue.push([first, long, foreign, second])
    assert list(queue.peers(second)) == [first, second]
    assert list(queue.peers(foreign)) == [foreign]


def test_an_item_that_was_never_queued_has_no_peers() -> None:
    """It belongs to no bucket yet."""
    assert list(WorkQueue().peers(item(3))) == []


def test_items_and_tokens_are_counted() -> None:
    """As the metrics show them."""
    queue = WorkQueue()
    items = [item(4), item(30)]
    queue.push(items)
    assert (queue.items, queue.tokens) == (2, 34)
    queue.remove(items[:1])
    assert (queue.items, queue.tokens) == (1, 30)


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
    assert sorted(queue.drain(), key=lambda one: one.order) == items
    assert (queue.items, queue.tokens, queue.head()) == (0, 0, None)


def test_a_batch_that_comes_back_keeps_its_place() -> None:
    """Returned newest first, its items stand before everything that arrived since, in their old order."""
    queue = WorkQueue()
    batch, later = [item(4) for _ in range(3)], [item(4) for _ in range(2)]
    queue.push(batch)
    queue.remove(batch)
    queue.push(later)
    queue.push(reversed(batch))
    head = queue.head()
    assert head is batch[0]
    assert list(queue.peers(head)) == [*batch, *later]


class _QueueBesideAList(RuleBasedStateMachine):
    """The queue beside the simplest thing that could be right: a list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WorkQueue()
        self.expected: list[WorkItem] = []
        self.removed: list[WorkItem] = []

    @rule(lengths=st.lists(st.integers(1, 70), max_size=5), model=st.integers(0, 2))
    def push(self, lengths: list[int], model: int) -> None:
        items = [item(tokens, model) for tokens in lengths]
        self.queue.push(items)
        self.expected += items

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.expected) - 1), max_size=4))
        items = [self.expected[place] for place in chosen]
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
        batch = list(self.queue.peers(head))[:count]
        self.queue.remove(batch)
        self.queue.push(reversed(batch))

    @rule()
    def drain(self) -> None:
        assert sorted(self.queue.drain(), key=lambda one: one.order) == self.expected
        self.expected.clear()

    @invariant()
    def nothing_is_lost_and_the_order_stands(self) -> None:
        assert self.queue.items == len(self.expected)
        assert self.queue.tokens == sum(one.tokens for one in self.expected)
        assert self.queue.head() is (self.expected[0] if self.expected else None)

        def key(one: WorkItem) -> tuple[int, int]:
            return (one.model, bucket_for(one.tokens))

        for _, group in groupby(sorted(self.expected, key=key), key):
            peers = list(group)
            assert list(self.queue.peers(peers[0])) == peers


def test_no_item_is_lost_doubled_or_overtaken() -> None:
    """Over random sequences of pushes, removals and returns, the queue agrees with a list."""
    short = settings(derandomize=True, max_examples=100, stateful_step_count=30, deadline=None)
    run_state_machine_as_test(_QueueBesideAList, settings=short)


@pytest.mark.long
def test_no_item_is_lost_doubled_or_overtaken_at_full_size() -> None:
    """The same, for longer."""
    full = settings(derandomize=True, max_examples=3000, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(_QueueBesideAList, settings=full)
