"""Chooses the next batch from the queue, the lanes, the cost table and a clock that is passed in.

The first item decides. A single item runs on the wide lane, which has the lowest latency. Several run in parallel on
the narrow lanes, which have a higher throughput, unless the cost table favors batches on the wide lane. A model that is
loaded only once runs on the wide lane.

A batch takes texts of the first one's bucket. It grows while doublings make a text cheaper by `MIN_BATCH_GAIN` each,
within the budget of padded tokens. It never breaks a deadline that the smaller batch would keep: of a text in it, of
one left behind, or at the head of another bucket.

Bulk work has a queue of its own. While other requests arrive, its batches are short and run on the wide lane, so that
the whole device is free soon. Its texts also fill other batches if that costs almost nothing.

Short texts would leave a narrow lane idle between them, and keep the event loop busy. So a lane gets several at once,
if enough texts wait for all lanes, and the next ones while it still works on the last. An engine computes them as one
batch if the model is batch-invariant, otherwise one by one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.records import BULK
from bertserve.serving.scheduling.cost import is_worthwhile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.scheduling.cost import ModelCosts
    from bertserve.serving.scheduling.queue import WorkItem, WorkQueue

WIDE = 0
"""Lane 0 is wide; the others are narrow."""

_ROUNDING_S = 1e-9

_FREE = 0.02
"""Maximum share by which bulk work may lengthen another batch."""

MAX_LOOKED_AT = 256
"""Maximum items of a bucket that a choice considers, and so the largest batch."""

GROUP_TOKENS = 64
"""About four milliseconds of MiniLM on one core: short compared with any deadline. With 32 clients of 8 tokens this had
a fifth more throughput than single texts."""

PREFETCH_TOKENS = 72
"""A lane with one group left gets the next one: longer than the event loop usually takes to send it."""


@dataclass(slots=True, frozen=True)
class Policy:
    """The batcher's settings and models.

    Attributes:
        max_batch_tokens: Maximum padded tokens in a batch; a single text may always run.
        batch_invariant: For each model, whether its texts may be computed together.
        narrow: For each model, whether narrow lanes run it too.
        group_tokens: Padded tokens that a narrow lane gets at once regardless of the gain, unless its library asks for
            more (`cost.GROUP_TOKENS`); a single text may always run.
        prefetch_tokens: A narrow lane with fewer tokens than this takes more, as does one with a single group of up to
            twice `group_tokens`. Both are small, because a lane computes what it was given even if the client
            disconnects or more urgent work arrives.
        apart: Lanes are GPUs: the wide lane is another name of the first narrow one, and does not block the others.
    """

    max_batch_tokens: int
    batch_invariant: Sequence[bool]
    narrow: Sequence[bool]
    group_tokens: int = 0
    prefetch_tokens: int = 0
    apart: bool = False


class Assignment(msgspec.Struct, frozen=True):
    """A batch and the lane it runs on.

    Attributes:
        tokens: Tokens of all texts without padding.
        padded_length: Tokens of the longest text.
        padding: Tokens of padding.
        given_at: When the lane got it, in seconds.
        predicted_us: Predicted time that it holds the lane.
        bulk: The share of its time for bulk work.
    """

    lane: int
    items: Sequence[WorkItem]
    tokens: int
    padded_length: int
    padding: int
    given_at: float
    predicted_us: float
    bulk: float = 0.0


class Lanes(msgspec.Struct):
    """The state of the lanes of a device slot; lane 0 is the wide one.

    Attributes:
        load: For each lane, the tokens that were given to it and not answered.
        free_at: For each lane, when it will probably be idle, in seconds; any past time for an idle one.
    """

    load: list[int]
    free_at: list[float]

    @classmethod
    def idle(cls, count: int) -> Lanes:
        return cls([0] * count, [0.0] * count)


def choose(
    queue: WorkQueue,
    lanes: Lanes,
    policy: Policy,
    costs: Sequence[ModelCosts],
    now: float,
    *,
    most_us: float = math.inf,
    on_wide: bool = False,
) -> Assignment | None:
    """The next batch to start, or None if nothing can start now; the queue does not change.

    Args:
        queue: Waiting items.
        lanes: The state of the lanes.
        policy: The settings.
        costs: The costs of each model.
        now: The time, in seconds.
        most_us: Maximum time of the batch; a single text may always run.
        on_wide: Use only the wide lane.
    """
    head = queue.head()
    load = lanes.load
    if head is None or (load[WIDE] and not policy.apart):
        return None
    idle = not any(load)
    model_costs = costs[head.model]
    if idle and queue.items == 1:
        alone_us = model_costs.batch_us(WIDE, head.tokens, 1)
        bulk = float(head.priority == BULK)
        return Assignment(WIDE, [head], head.tokens, head.tokens, 0, now, alone_us, bulk)
    together = policy.batch_invariant[head.model]
    if on_wide or len(load) == 1 or _belongs_to_the_wide_lane(head, policy, model_costs, now, idle=idle):
        most = MAX_LOOKED_AT if together else 1
        return _batch(queue, head, WIDE, policy, model_costs, now, now, most, most_us) if idle else None
    if load[WIDE]:  # the same GPU as the first narrow lane
        load = [load[WIDE], load[WIDE] + load[1], *load[2:]]
    lane = min(range(1, len(load)), key=load.__getitem__)
    ahead = load[lane] > 0
    if ahead:
        if 2 * queue.tokens < policy.group_tokens:
            return None
        group = model_costs.group(head.tokens)
        if 2 * queue.company(head) < group or load[lane] >= max(
            policy.prefetch_tokens, min(group * head.tokens, 2 * policy.group_tokens) + 1
        ):
            return None
    most = min(math.ceil(queue.items / (len(load) - 1)), MAX_LOOKED_AT)
    begin = max(now, lanes.free_at[lane])
    batch = _batch(queue, head, lane, policy, model_costs, now, begin, most, most_us)
    # A prefetched group does not grow any more: a small one should wait and grow.
    return batch if not ahead or 2 * len(batch.items) >= model_costs.group(head.tokens) else None


def fill_groups(
    batch: Assignment,
    bulk: WorkQueue,
    queue: WorkQueue,
    begin: float,
    owed_us: float,
    policy: Policy,
    costs: ModelCosts,
) -> Assignment:
    """The batch with bulk work of its bucket added: what costs almost nothing, and what bulk work is owed.

    It does not change the padded length, and breaks no deadline: of its texts, of the first one left behind, or at the
    head of another bucket.

    Args:
        batch: A batch of other requests.
        bulk: Waiting bulk work.
        queue: Other waiting requests.
        begin: When the lane begins with the batch, in seconds.
        owed_us: Time that bulk work is owed; negative if more of it runs.
        policy: The settings.
        costs: The costs of the batch's model.
    """
    items, length = batch.items, batch.padded_length
    first, count = items[0], len(items)
    if first.alone or not policy.batch_invariant[first.model]:
        return batch
    room = min(MAX_LOOKED_AT, policy.max_batch_tokens // length) - count
    inside = set(map(id, items))
    behind = [item for item in (*queue.heads(), *queue.peers(first, count + 1)) if id(item) not in inside]
    tightest = min([*[item.deadline for item in items], *[item.deadline - item.least_us / 1e6 for item in behind]])
    most_us = min(batch.predicted_us * (1 + _FREE) + max(0.0, owed_us), (tightest - begin) * 1e6)
    if room <= 0 or costs.batch_us(batch.lane, length, count + 1) > most_us:
        return batch
    company = [
        item
        for item in bulk.of_bucket((BULK, first.model, first.bucket[2]), MAX_LOOKED_AT)
        if not item.alone and item.tokens <= length and begin + most_us / 1e6 <= item.deadline
    ][:room]
    sizes = range(count + 1, count + len(company) + 1)
    more = bisect_right(sizes, most_us, key=lambda size: costs.batch_us(batch.lane, length, size))
    if not more:
        return batch
    larger = assign(batch.lane, [*items, *company[:more]], length, policy, costs, batch.given_at)
    return msgspec.structs.replace(larger, bulk=1 - batch.predicted_us / larger.predicted_us)


def _belongs_to_the_wide_lane(head: WorkItem, policy: Policy, costs: ModelCosts, now: float, *, idle: bool) -> bool:
    if not policy.narrow[head.model] or costs.prefers_wide(head.tokens):
        return True
    # Alone on the whole device it may still be in time.
    left_us = (head.deadline - now) * 1e6
    return idle and costs.batch_us(WIDE, head.tokens, 1) <= left_us < costs.batch_us(1, head.tokens, 1)


def _batch(  # noqa: PLR0917  two callers with everything at hand
    queue: WorkQueue,
    head: WorkItem,
    lane: int,
    policy: Policy,
    costs: ModelCosts,
    now: float,
    begin: float,
    most: int,
    most_us: float,
) -> Assignment:
    """The batch that the head starts: as many candidates as are worthwhile, and end within `most_us`."""
    together = policy.batch_invariant[head.model]
    budget = policy.max_batch_tokens if together else policy.group_tokens
    candidates, left = _candidates(queue, head, begin, most, budget)
    longest = list(accumulate([item.tokens for item in candidates], max))
    size = 1
    if len(candidates) > 1:
        free = _within(longest, costs.group_tokens(head.tokens), lane) if together else len(candidates)
        heads = [other for other in queue.heads() if other is not head]
        if left is not None:
            heads.append(left)
        size = _grow_batch(candidates, longest, heads, free, costs, lane, begin)
        while size > 1 and costs.batch_us(lane, longest[size - 1], size) > most_us:
            size -= 1
    return assign(lane, candidates[:size], longest[size - 1], policy, costs, now)


def assign(
    lane: int, batch: Sequence[WorkItem], padded_length: int, policy: Policy, costs: ModelCosts, now: float
) -> Assignment:
    tokens = sum([item.tokens for item in batch])
    padding = padded_length * len(batch) - tokens if policy.batch_invariant[batch[0].model] else 0
    predicted_us = costs.batch_us(lane, padded_length, len(batch))
    bulk = float(batch[0].priority == BULK)
    return Assignment(lane, batch, tokens, padded_length, padding, now, predicted_us, bulk)


def _candidates(
    queue: WorkQueue, head: WorkItem, begin: float, most: int, budget: int
) -> tuple[list[WorkItem], WorkItem | None]:
    """Candidates to run with the head, itself first, and the first item of its bucket that does not fit."""
    batch = [head]
    longest = head.tokens
    for item in queue.peers(head, 1 if head.alone else MAX_LOOKED_AT):
        # A late one is dropped when its turn comes.
        if item is head or item.alone or begin + item.least_us / 1e6 > item.deadline:
            continue
        longest = max(longest, item.tokens)
        if len(batch) == most or longest * (len(batch) + 1) > budget:
            return batch, item
        batch.append(item)
    return batch, None


def _within(longest: Sequence[int], most_tokens: int, lane: int) -> int:
    """The number of candidates that a lane gets regardless of the gain."""
    if lane == WIDE:
        return 1
    fitting = [size for size, tokens in enumerate(longest, 1) if tokens * size <= most_tokens]
    return fitting[-1] if fitting else 1


def _grow_batch(
    candidates: Sequence[WorkItem],
    longest: Sequence[int],
    heads: Sequence[WorkItem],
    free: int,
    costs: ModelCosts,
    lane: int,
    begin: float,
) -> int:
    """The size of the batch: doubled up to `free`, and further while its texts get cheaper by enough.

    A doubling that gains too little does not end the search: a later one may gain more, and measurements are noisy.
    """
    most = len(candidates)
    size, us = 1, costs.batch_us(lane, longest[0], 1)
    first_end = begin + us / 1e6
    tightest = min([item.deadline - item.least_us / 1e6 for item in (*candidates, *heads)])
    smaller, end = size, first_end
    while smaller < most:
        larger = min(2 * smaller, free if smaller < free else most)
        larger_us = costs.batch_us(lane, longest[larger - 1], larger)
        later = begin + larger_us / 1e6
        if later + _ROUNDING_S > tightest:  # mostly no deadline is near
            behind = [*heads, candidates[larger]] if larger < most else heads
            if (
                # Deadlines of its texts; of one taken in, which would be in time behind the smallest batch or at the
                # end of one that does not grow; of one behind it.
                any(end <= item.deadline < later for item in candidates[:smaller])
                or any(first_end + item.least_us / 1e6 <= item.deadline < later for item in candidates[smaller:larger])
                or any(
                    begin + costs.batch_us(lane, longest[at], at + 1) / 1e6 <= candidates[at].deadline < later
                    for at in range(smaller, larger - 1)
                )
                or any(end + item.least_us / 1e6 <= item.deadline < later + item.least_us / 1e6 for item in behind)
            ):
                break
        if larger <= free or is_worthwhile(us, size, larger_us, larger):
            size, us = larger, larger_us
        smaller, end = larger, later
    return size
