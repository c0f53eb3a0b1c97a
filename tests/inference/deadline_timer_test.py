from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.serving.inference.deadline_timer import Deadline, DeadlineTimer
from tests.support.virtual_time import now, virtually

if TYPE_CHECKING:
    from collections.abc import Callable


class Rings(DeadlineTimer):
    """A timer that keeps which of its deadlines fired, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.fired: list[tuple[float, object]] = []

    def set(self, when: float, name: object = None) -> Deadline:
        return self.at(when, lambda: self.fired.append((round(now(), 3), name)))


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=20))
@settings(max_examples=150)
@virtually
async def test_every_deadline_that_is_not_cancelled_fires_once_at_its_time(plan: list[tuple[int, bool]]) -> None:
    """In whatever order they were set, and of equal times the first first; to cancel twice, or late, is harmless."""
    timer = Rings()
    deadlines = [timer.set(when, number) for number, (when, _) in enumerate(plan)]
    for deadline, (_, cancelled) in zip(deadlines, plan, strict=True):
        if cancelled:
            deadline.cancel()
            deadline.cancel()
    await asyncio.sleep(30)
    for deadline in deadlines:
        deadline.cancel()
    assert timer.fired == sorted((when, number) for number, (when, cancelled) in enumerate(plan) if not cancelled)


@virtually
async def test_cancelled_deadlines_do_not_pile_up() -> None:
    """Ten thousand that were cancelled long before their time leave little behind, and the others are kept."""
    timer = Rings()
    for number in range(10_000):
        deadline = timer.set(30.0, number)
        if number % 1000:
            deadline.cancel()
    assert len(timer._heap) < 2000
    await asyncio.sleep(31)
    assert [number for _, number in timer.fired] == list(range(0, 10_000, 1000))


@virtually
async def test_a_deadline_for_the_past_fires_at_once() -> None:
    """It still fires from the loop, not from the call that sets it."""
    await asyncio.sleep(10)
    timer = Rings()
    timer.set(3.0)
    assert timer.fired == []
    await asyncio.sleep(0.001)
    assert timer.fired == [(10.0, None)]


@virtually
async def test_a_cancelled_deadline_lets_its_callback_go() -> None:
    """What a request held is free at once, not at its deadline."""
    deadline = DeadlineTimer().at(60.0, list)
    deadline.cancel()
    assert deadline.callback is None


@virtually
async def test_a_callback_may_set_a_deadline_nearer_than_all_others() -> None:
    """The timer is armed for the nearest again."""
    timer = Rings()
    timer.at(1.0, lambda: timer.set(2.0))
    timer.set(9.0)
    await asyncio.sleep(10)
    assert timer.fired == [(2.0, None), (9.0, None)]


@virtually
async def test_a_callback_may_cancel_a_deadline_that_is_due_with_it() -> None:
    """The other one stays silent, although its time has come."""
    timer, later = Rings(), list[Deadline]()
    timer.at(1.0, lambda: [deadline.cancel() for deadline in later])
    later.append(timer.set(1.0))
    await asyncio.sleep(2)
    assert timer.fired == []


@virtually
async def test_one_timer_serves_many_deadlines() -> None:
    """Setting and cancelling ten thousand later deadlines does not touch the loop's timers."""
    loop = asyncio.get_running_loop()
    armed: list[float] = []
    call_at = loop.call_at

    def counting(when: float, callback: Callable[..., object], *args: Any, **keywords: Any) -> asyncio.TimerHandle:
        armed.append(when)
        return call_at(when, callback, *args, **keywords)

    loop.call_at = counting  # type: ignore[method-assign]  counts what the deadlines ask of the loop
    timer = DeadlineTimer()
    timer.at(1.0, list)
    for number in range(10_000):
        timer.at(2.0 + number, list).cancel()
    assert armed == [1.0]
