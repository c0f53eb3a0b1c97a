"""What runs next: a pure choice over the queue and the lanes.

The item that has waited longest decides. A batch-invariant model takes as many items of that item's bucket
as the token budget holds, on the wide lane. A model that is not batch-invariant runs text by text: on the
wide lane when nothing else is there to do, else side by side on the narrow ones. A narrow lane gets its next
text while it still works on its last few tokens: a lane that had to wait until the event loop has taken its
answer and sent it another text would stand idle for a good part of every short one.
"""

from __future__ import annotations

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
        prefetch_tokens: A narrow lane with fewer tokens than this before it takes another text. It is short,
            because what is given to a lane waits behind it and is computed even if its client goes.
        batch_invariant: For each model, whether its texts may share a batch.
    """

    max_batch_tokens: int
    batch_invariant: Sequence[bool]
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
    if policy.batch_invariant[head.model]:
        return Assignment(WIDE, _batch(queue, head, policy.max_batch_tokens)) if idle else None
    if idle and (queue.items == 1 or len(load) == 1):
        return Assignment(WIDE, [head])
    lane = min(range(1, len(load)), key=load.__getitem__, default=None)
    if lane is None or (load[lane] and load[lane] >= policy.prefetch_tokens):
        return None
    return Assignment(lane, [head])


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
