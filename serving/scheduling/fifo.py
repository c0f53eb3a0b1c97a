"""FIFO with one token budget: a baseline for comparison.

The rule is that of text-embeddings-inference (https://github.com/huggingface/text-embeddings-inference,
`core/src/queue.rs`): one batch at a time, the oldest texts first whatever their lengths, as many as fit the budget of
padded tokens. Costs are ignored, a deadline only counts once it has passed, and nothing is rejected while there is
room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.scheduling.batcher import WIDE, assigned
from serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from serving.scheduling.batcher import Assignment
    from serving.scheduling.load_predictor import Demand
    from serving.scheduling.queue import WorkItem, WorkQueue


class FifoScheduler(Scheduler):
    _refuses_late = False

    def _key(self, demand: Demand, deadline: float, now: float) -> float:  # noqa: ARG002  for those who predict
        return now

    def next(self, now: float) -> Assignment | None:
        """The oldest texts that fit the budget together, once the engine is idle; bulk work comes last."""
        self.wake_at = None
        if any(self.lanes.load):
            return None
        batch = self._oldest(self.queue, now) or self._oldest(self.bulk, now)
        if not batch:
            return None
        longest = max([item.tokens for item in batch])
        return self._start(assigned(WIDE, batch, longest, self.policy, self.costs[batch[0].model], now), now)

    def _oldest(self, queue: WorkQueue, now: float) -> list[WorkItem]:
        batch: list[WorkItem] = []
        longest = 0
        while (head := queue.head()) is not None:
            if head.deadline <= now:
                queue.remove([head])
                self._drop(head)
                continue
            larger = max(longest, head.tokens)
            if batch and not self._fits(batch, head, larger):
                break
            longest = larger
            queue.remove([head])
            batch.append(head)
        return batch

    def _fits(self, batch: list[WorkItem], head: WorkItem, longest: int) -> bool:
        apart = head.alone or batch[0].alone or head.model != batch[0].model
        return not apart and longest * (len(batch) + 1) <= self.policy.max_batch_tokens
