"""Sequence buckets: the lengths that inputs are grouped by, so that a batch wastes little padding."""

from __future__ import annotations

from bisect import bisect_left

BUCKETS = (16, 32, 64, 128, 256, 512)
"""Upper bounds in tokens; longer inputs fall into buckets that go on doubling."""


def bucket_index(tokens: int) -> int:
    """The index in `BUCKETS` for an input of so many tokens; `len(BUCKETS)` for longer ones.

    >>> bucket_index(16), bucket_index(17), bucket_index(513)
    (0, 1, 6)
    """
    return bisect_left(BUCKETS, tokens)


def bucket_for(tokens: int) -> int:
    """The smallest bucket that holds an input of so many tokens.

    >>> bucket_for(1), bucket_for(16), bucket_for(17), bucket_for(513)
    (16, 16, 32, 1024)
    """
    at = bucket_index(tokens)
    if at < len(BUCKETS):
        return BUCKETS[at]
    return 1 << (tokens - 1).bit_length()
