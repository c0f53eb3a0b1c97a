from __future__ import annotations

import asyncio
from functools import partial

import pytest

from bertserve.serving.net.connection import FairQueue
from tests.support.virtual_time import asynchronous


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def done_by_turn(pieces: list[tuple[float, float]], turns: int) -> list[int]:
    """How many pieces of work, of what they take themselves and what they begin, are done after each turn."""
    clock, done, counts = Clock(), 0, []

    def work(takes_s: float, more_s: float) -> float:
        nonlocal done
        clock.now += takes_s
        done += 1
        return more_s

    async def run() -> None:
        queue = FairQueue(clock)
        for takes_s, more_s in pieces:
            queue.add(partial(work, takes_s, more_s))
        for _ in range(turns):
            await asyncio.sleep(0)
            counts.append(done)

    asyncio.run(run())
    return counts


@pytest.mark.parametrize(
    ("pieces", "counts"),
    [
        ([(0.0001, 0)] * 12, [3, 6, 9]),
        ([(0, 0.0002)] * 7, [2, 4, 6]),
        ([(0.1, 0)] * 3, [1, 2, 3]),
        ([(0, 0)] * 1000, [1000, 1000, 1000]),
    ],
    ids=["short", "what it begins counts", "long", "none"],
)
def test_a_turn_has_so_much_time(pieces: list[tuple[float, float]], counts: list[int]) -> None:
    """At least one piece is done in each, and no more than fit."""
    assert done_by_turn(pieces, 3) == counts


def test_who_has_more_to_do_waits_behind_the_others() -> None:
    """A connection that is never done keeps others from nothing, within one turn of the loop or over many."""
    said: list[str] = []

    async def run() -> None:
        queue = FairQueue(Clock())

        def greedy() -> float:
            said.append("greedy")
            queue.add(greedy)
            return 0.0

        def other() -> float:
            said.append("other")
            return 0.0

        queue.add(greedy)
        queue.add(other)
        for _ in range(3):
            await asyncio.sleep(0)
        assert said == ["greedy", "other", "greedy", "greedy"]

    asyncio.run(run())


def test_work_that_fails_keeps_nobody_waiting() -> None:
    """Its error is the loop's to log; what waits behind it is done."""
    said: list[str] = []

    async def run() -> list[BaseException]:
        errors: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        queue = FairQueue()

        def other() -> float:
            said.append("other")
            return 0.0

        queue.add(lambda: [0.0].pop(1))
        queue.add(other)
        for _ in range(3):
            await asyncio.sleep(0)
        return errors

    (error,) = asyncio.run(run())
    assert isinstance(error, IndexError)
    assert said == ["other"]


@asynchronous
async def test_who_waits_for_a_turn_may_leave() -> None:
    """The turn goes to the next."""
    queue = FairQueue()
    first, second = (asyncio.ensure_future(queue.wait(0.001)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(10):
        await second
    assert first.cancelled()
