"""The queue: admitted texts that wait for an engine, first come first served within each bucket."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from serving.scheduling.buckets import bucket_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from serving.records import EncodedText, ModelIndex


BucketKey = tuple[int, int]
"""Model and sequence bucket."""


class WorkItem(msgspec.Struct, eq=False):
    """One text in the queue.

    Attributes:
        model: Which model it is for.
        text: The text's token ids.
        owner: The request it belongs to; opaque here.
        index: Its position among the request's inputs.
        alone: Never share a batch: a batch with it failed, and its neighbours must not fail again.
        order: Place in the queue; smaller goes first.
        key: Model and bucket; the queue sets it.
        tokens: Of the text; asked for often.
    """

    model: ModelIndex
    text: EncodedText
    owner: object
    index: int
    alone: bool = False
    order: int = -1
    key: BucketKey = (-1, -1)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.tokens = len(self.text.ids)


class WorkQueue:
    """A first-in first-out queue per (model, bucket); every operation takes constant time.

    What bounds it is admission: each item in it holds a permit.
    """

    def __init__(self) -> None:
        self._buckets: dict[BucketKey, OrderedDict[int, WorkItem]] = {}
        self._orders = count()
        self.items = 0
        self.tokens = 0

    def push(self, items: Iterable[WorkItem]) -> None:
        """Adds items at the end.

        Items that come back go to the front, as they were older than all that waits: hand them over newest first.
        """
        for item in items:
            returning = item.order >= 0
            if not returning:
                item.order = next(self._orders)
                item.key = (item.model, bucket_for(item.tokens))
            bucket = self._buckets.setdefault(item.key, OrderedDict())
            bucket[item.order] = item
            if returning:
                bucket.move_to_end(item.order, last=False)
            self.items += 1
            self.tokens += item.tokens

    def remove(self, items: Iterable[WorkItem]) -> None:
        """Takes items out; those that are not queued any more are passed over."""
        for item in items:
            bucket = self._buckets.get(item.key)
            if bucket is not None and bucket.pop(item.order, None) is not None:
                self.items -= 1
                self.tokens -= item.tokens
                if not bucket:
                    del self._buckets[item.key]

    def head(self) -> WorkItem | None:
        """The item that has waited longest."""
        buckets = self._buckets
        if len(buckets) > 1:
            return min((next(iter(bucket.values())) for bucket in buckets.values()), key=lambda item: item.order)
        for bucket in buckets.values():
            for item in bucket.values():
                return item
        return None

    def peers(self, item: WorkItem) -> Iterator[WorkItem]:
        """The items of an item's model and bucket, itself included, oldest first."""
        return iter(self._buckets.get(item.key, {}).values())

    def drain(self) -> list[WorkItem]:
        """Empties the queue and returns what was in it."""
        items = [item for bucket in self._buckets.values() for item in bucket.values()]
        self._buckets.clear()
        self.items = self.tokens = 0
        return items
