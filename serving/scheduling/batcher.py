"""What runs next: a pure choice over the queue and the lanes.

The item that has waited longest decides. A lone item runs on the wide lane, which answers it fastest; several
run side by side on the narrow ones, which carry more. What is held once only runs on the wide lane, with as many
items of the first one's bucket as the token budget holds.

Short texts would keep a narrow lane waiting, and the event loop busy, for a good part of their own time. So it
gets several at once, where so many wait that every lane has its share, and its next ones while it still works on
the last. An engine computes them together where the model is batch-invariant, and else one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

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
        batch_invariant: For each model, whether its texts may be computed together.
        narrow: For each model, whether narrow lanes run it too.
        group_tokens: Padded tokens that a narrow lane is given at once; a single text may always run.
        prefetch_tokens: A narrow lane with fewer tokens than this before it takes more. Both are small, because
            what is given to a lane is computed even if its client goes, and waits for nothing better.
    """

    max_batch_tokens: int
    batch_invariant: Sequence[bool]
    narrow: Sequence[bool]
    group_tokens: int = 0
    prefetch_tokens: int = 0


class Assignment(msgspec.Struct, frozen=True):
    """A batch and the lane it runs on."""

    lane: int
    items: Sequence[WorkItem]

    @property
    def tokens(self) -> int:
        """Tokens of all its texts."""
        return sum([item.tokens for item in self.items])


def choose(queue: WorkQueue, load: Sequence[int], policy: Policy) -> Assignment | None:
    """The next batch to start, or None where nothing can start now.

    Args:
        queue: What waits; it is not changed.
        load: For each lane, the tokens it has been given and not answered; lane 0 is the wide one.
        policy: Limits and models.
    """
    head = queue.head()
    if head is None or load[WIDE]:
        return None
    idle = not any(load)
    if not policy.narrow[head.model] or len(load) == 1 or (idle and queue.items == 1):
        most = queue.items if policy.batch_invariant[head.model] else 1
        return Assignment(WIDE, _batch(queue, head, policy.max_batch_tokens, most)) if idle else None
    lane = min(range(1, len(load)), key=load.__getitem__)
    if load[lane] and load[lane] >= policy.prefetch_tokens:
        return None
    share = math.ceil(queue.items / (len(load) - 1))
    group = Assignment(lane, _batch(queue, head, policy.group_tokens, share))
    # A group that is sent ahead grows no more: a small one is better left to grow.
    return group if not load[lane] or 2 * group.tokens >= policy.group_tokens else None


def _batch(queue: WorkQueue, head: WorkItem, budget: int, most: int) -> list[WorkItem]:
    if head.alone:
        return [head]
    batch: list[WorkItem] = []
    longest = 0
    for item in queue.peers(head):
        longest = max(longest, item.tokens)
        if batch and (len(batch) == most or longest * (len(batch) + 1) > budget):
            break
        if not item.alone:
            batch.append(item)
    return batch
