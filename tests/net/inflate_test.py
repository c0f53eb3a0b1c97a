"""Bodies are decompressed one at a time, within a budget."""

from __future__ import annotations

import asyncio
import tracemalloc
import zlib

import pytest

from bertserve.serving.errors import BodyTooLarge, BuffersFull
from bertserve.serving.net.requests import inflate, inflated
from tests.support.virtual_time import asynchronous


@asynchronous
async def test_a_turn_ends_with_its_thread() -> None:
    """A client that leaves while its body grows does not let another one begin beside it."""
    turn, held = asyncio.Lock(), []
    body = zlib.compress(bytes(64 << 20))
    task = asyncio.create_task(inflate(turn, lambda size: not held.append(size), body, zlib.MAX_WBITS, 64 << 20))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert turn.locked()
    async with asyncio.timeout(30), turn:
        assert held == [64 << 20]


@asynchronous
async def test_what_finds_no_room_gives_its_turn_back() -> None:
    """And is not touched."""
    turn = asyncio.Lock()
    with pytest.raises(BuffersFull):
        await inflate(turn, lambda _: False, b"", zlib.MAX_WBITS, 1)
    assert not turn.locked()


def test_no_more_than_the_limit_is_decompressed() -> None:
    """However much the body would become."""
    bomb = zlib.compress(bytes(32 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLarge):
            inflated(bomb, zlib.MAX_WBITS, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
