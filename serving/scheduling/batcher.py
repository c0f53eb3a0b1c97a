"""What runs next: a pure choice over the queue and the lanes.

The item that has waited longest decides. A batch-invariant model takes as many items of that item's bucket
as the token budget holds, on the wide lane. A model that is not batch-invariant runs text by text: on the
wide lane when nothing else is there to do, else side by side on the narrow ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.scheduling.queue import WorkItem, WorkQueue

WIDE = 0
"""Lane 0 is the wide one; the others are narrow."""


@dataclass(slots=True, frozen=True)
class Policy:
    """What the batcher must know beside the queue.

    Attributes:
        max_batch_tokens: Padded tokens allowed in a batch; a single text may always run.
        batch_invariant: For each model, whether its texts may share a batch.
    """

    max_batch_tokens: int
    batch_invariant: Sequence[bool]


@dataclass(slots=True, frozen=True)
class Assignment:
    """A batch and the lane it runs on."""

    lane: int
    items: Sequence[WorkItem]


def choose(queue: WorkQueue, busy: Sequence[bool], policy: Policy) -> Assignment | None:
    """The next batch to start, or None where nothing can start now.

    Args:
        queue: What waits; it is not changed.
        busy: For each lane, whether it runs a batch; lane 0 is the wide one.
        policy: Limits and models.
    """
    head = queue.head()
    if head is None or busy[WIDE]:
        return None
    idle = not any(busy)
    narrow = next((lane for lane in range(1, len(busy)) if not busy[lane]), None)
    if policy.batch_invariant[head.model]:
        return Assignment(WIDE, _batch(queue, head, policy.max_batch_tokens)) if idle else None
    if idle and (queue.items == 1 or narrow is None):
        return Assignment(WIDE, [head])
    return Assignment(narrow, [head]) if narrow is not None else None


def _batch(queue: WorkQueue, head: WorkItem, budget: int) -> list[WorkItem]:
    if head.alone:
        return [head]
    batch: list[WorkItem] = []
    longest = 0
    for item in queue.peers(head):
        longest = max(longest, item.tokens)
        if batch and longest * (len(batch) + 1) > budget:
            break
        if not item.alone:
            batch.append(item)
    return batch
