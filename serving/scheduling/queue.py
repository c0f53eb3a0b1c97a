"""The queue: admitted texts that wait for an engine, by priority class and within it by a static key."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.records import DEFAULT_PRIORITY
from bertserve.serving.scheduling.cost import bucket_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bertserve.serving.records import EncodedText, ModelIndex


BucketKey = tuple[int, int, int]
"""Priority class, model and sequence bucket."""


class WorkItem(msgspec.Struct, eq=False):
    """One text in the queue.

    Attributes:
        tokens: Its length.
        owner: Its request; opaque here.
        index: Its position among the request's inputs.
        alone: Never share a batch: a batch with it failed, and its neighbors must not fail again.
        suspect: An engine crashed while it worked on a batch with it: it runs once with nothing beside it.
        priority: Its class; smaller always goes first.
        key: Its position within the class, in seconds; smaller goes first. It never changes.
        deadline: When its answer becomes useless, in seconds.
        least_us: Its minimum cost; with less time left, it is not worth starting.
        work_us: Its probable work on the device, for predictions.
        order: Decides between equal keys.
        bucket: Set by the queue.
        waits: Whether it is in the queue.
    """

    model: ModelIndex
    text: EncodedText
    tokens: int
    owner: Any
    index: int
    alone: bool = False
    suspect: bool = False
    priority: int = DEFAULT_PRIORITY
    key: float = 0.0
    deadline: float = float("inf")
    least_us: float = 0.0
    work_us: int = 0
    order: int = -1
    bucket: BucketKey = (-1, -1, -1)
    waits: bool = False

    def is_late(self, now: float) -> bool:
        """Whether its deadline cannot be kept even if it starts at once."""
        return now + self.least_us / 1e6 > self.deadline


Entry = tuple[float, int, WorkItem]


class WorkQueue:
    """A list for each (class, model, bucket), sorted by key.

    Keys mostly come in ascending order, so a sorted list takes them at its end; unlike a heap it also lists its items
    in order. Admission limits it: each item in it holds a permit. `items` and `tokens` count what waits.
    """

    def __init__(self) -> None:
        self._buckets: dict[BucketKey, list[Entry]] = {}
        self._orders = count()
        self.items = 0
        self.tokens = 0
        self.backlog = Backlog()
        self._head: WorkItem | None = None

    def push(self, items: Iterable[WorkItem]) -> None:
        """Adds items; one that comes back takes its old position."""
        self._head = None
        for item in items:
            if item.order < 0:
                item.order = next(self._orders)
                item.bucket = (item.priority, item.model, bucket_for(item.tokens))
            entry = (item.key, item.order, item)
            entries = self._buckets.get(item.bucket)
            if entries is None:
                self._buckets[item.bucket] = [entry]
            elif entries[-1] < entry:
                entries.append(entry)
            else:
                insort(entries, entry)
            item.waits = True
            self.items += 1
            self.tokens += item.tokens
            self.backlog.add(item)

    def remove(self, items: Iterable[WorkItem]) -> None:
        """Removes items; those that are no longer queued are skipped."""
        for item in items:
            if not item.waits:
                continue
            self._head = None
            item.waits = False
            entries = self._buckets[item.bucket]
            at = 0 if entries[0][2] is item else bisect_left(entries, (item.key, item.order, item))
            del entries[at]
            if not entries:
                del self._buckets[item.bucket]
            self.items -= 1
            self.tokens -= item.tokens
            self.backlog.remove(item)

    def head(self) -> WorkItem | None:
        if self._head is None and (buckets := self._buckets):  # a choice asks several times
            if len(buckets) > 1:
                self._head = min((bucket[0], entries[0]) for bucket, entries in buckets.items())[1][2]
            else:
                (entries,) = buckets.values()
                self._head = entries[0][2]
        return self._head

    def heads(self) -> list[WorkItem]:
        return [entries[0][2] for entries in self._buckets.values()]

    def company(self, item: WorkItem) -> int:
        """Number of items in a queued item's class, model and bucket, including itself."""
        return len(self._buckets[item.bucket])

    def peers(self, item: WorkItem, most: int) -> Iterator[WorkItem]:
        """The first `most` items of a queued item's class, model and bucket, in order."""
        return self.of_bucket(item.bucket, most)

    def of_bucket(self, bucket: BucketKey, most: int) -> Iterator[WorkItem]:
        for _, _, item in islice(self._buckets.get(bucket, ()), most):
            yield item

    def drain(self) -> list[WorkItem]:
        items = [entry[2] for entries in self._buckets.values() for entry in entries]
        self.remove(items)
        return items


_SLOT_S = 0.01


class Backlog:
    """Waiting work in microseconds of the device, by class and roughly by key."""

    def __init__(self) -> None:
        self._classes: dict[int, _Slots] = {}
        self.total_us = 0

    def add(self, item: WorkItem) -> None:
        slots = self._classes.get(item.priority)
        if slots is None:
            slots = self._classes[item.priority] = _Slots()
        slots.add(item.key, item.work_us)
        self.total_us += item.work_us

    def remove(self, item: WorkItem) -> None:
        self._classes[item.priority].add(item.key, -item.work_us)
        self.total_us -= item.work_us

    def ahead_us(self, priority: int, key: float) -> int:
        """The work before this class and key; work of about the same age counts as before."""
        ahead = 0
        for other, slots in self._classes.items():
            if other < priority:
                ahead += slots.total
            elif other == priority:
                ahead += slots.up_to(key)
        return ahead


class _Slots:
    """Work by hundredths of a second of its key."""

    __slots__ = ("_work", "total")

    def __init__(self) -> None:
        self._work: dict[int, int] = {}
        self.total = 0

    def add(self, key: float, us: int) -> None:
        slot = int(key / _SLOT_S)
        self.total += us
        if work := self._work.get(slot, 0) + us:
            self._work[slot] = work
        else:
            self._work.pop(slot, None)

    def up_to(self, key: float) -> int:
        last = int(key / _SLOT_S)
        return sum([work for slot, work in self._work.items() if slot <= last])
