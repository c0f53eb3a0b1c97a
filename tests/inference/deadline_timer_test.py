from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.inference.deadline_timer import Deadline, DeadlineTimer
from tests.support.virtual_time import now, virtually

if TYPE_CHECKING:
    from collections.abc import Callable


@virtually
async def test_a_deadline_fires_once_at_its_time() -> None:
    """Not before and not again."""
    fired: list[float] = []
    DeadlineTimer().at(5.0, lambda: fired.append(now()))
    await asyncio.sleep(4.9)
    assert fired == []
    await asyncio.sleep(10)
    assert fired == [pytest.approx(5.0)]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
@virtually
async def test_deadlines_fire_in_the_order_of_their_times(order: tuple[int, ...]) -> None:
    """Whatever the order in which they were set; a nearer one re-arms the timer."""
    fired: list[tuple[int, float]] = []
    timer = DeadlineTimer()
    for when in order:
        timer.at(when, lambda when=when: fired.append((when, now())))
    await asyncio.sleep(4)
    assert fired == [(1, pytest.approx(1)), (2, pytest.approx(2)), (3, pytest.approx(3))]


@virtually
async def test_deadlines_of_one_time_fire_in_the_order_in_which_they_were_set() -> None:
    """Equal deadlines are first come, first served."""
    fired: list[int] = []
    timer = DeadlineTimer()
    for number in range(5):
        timer.at(1.0, lambda number=number: fired.append(number))
    await asyncio.sleep(2)
    assert fired == [0, 1, 2, 3, 4]


@virtually
async def test_cancelled_deadlines_do_not_pile_up() -> None:
    """Ten thousand that were cancelled long before their time leave little behind, and the others are kept."""
    fired: list[int] = []
    timer = DeadlineTimer()
    for number in range(10_000):
        deadline = timer.at(30.0, lambda number=number: fired.append(number))
        if number % 1000:
            deadline.cancel()
    assert len(timer._heap) < 2000
    await asyncio.sleep(31)
    assert fired == list(range(0, 10_000, 1000))


@virtually
async def test_a_deadline_for_the_past_fires_at_once() -> None:
    """It still fires from the loop, not from the call that sets it."""
    await asyncio.sleep(10)
    fired: list[float] = []
    DeadlineTimer().at(3.0, lambda: fired.append(now()))
    assert fired == []
    await asyncio.sleep(0.001)
    assert fired == [10.0]


@virtually
async def test_a_cancelled_deadline_stays_silent() -> None:
    """Its neighbours ring; cancelling it again, or after it has fired, is harmless."""
    fired: list[str] = []
    timer = DeadlineTimer()
    first = timer.at(1.0, lambda: fired.append("first"))
    second = timer.at(2.0, lambda: fired.append("second"))
    third = timer.at(3.0, lambda: fired.append("third"))
    first.cancel()
    third.cancel()
    third.cancel()
    await asyncio.sleep(5)
    second.cancel()
    assert fired == ["second"]


@virtually
async def test_a_cancelled_deadline_lets_its_callback_go() -> None:
    """What a request held is free at once, not at its deadline."""
    deadline = DeadlineTimer().at(60.0, list)
    deadline.cancel()
    assert deadline.callback is None


@virtually
async def test_a_callback_may_deadlines_nearer_than_all_others() -> None:
    """The timer is armed for the nearest again."""
    fired: list[float] = []
    timer = DeadlineTimer()
    timer.at(1.0, lambda: timer.at(2.0, lambda: fired.append(now())))
    timer.at(9.0, lambda: fired.append(now()))
    await asyncio.sleep(10)
    assert fired == [pytest.approx(2.0), pytest.approx(9.0)]


@virtually
async def test_a_callback_may_cancel_a_deadline_that_is_due_with_it() -> None:
    """The other one stays silent, although its time has come."""
    fired: list[str] = []
    timer = DeadlineTimer()
    later: list[Deadline] = []
    timer.at(1.0, lambda: [deadline.cancel() for deadline in later])
    later.append(timer.at(1.0, lambda: fired.append("too late")))
    await asyncio.sleep(2)
    assert fired == []


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


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=20))
@settings(derandomize=True, max_examples=150, deadline=None)
@virtually
async def test_every_deadline_that_is_not_cancelled_fires_exactly_once(plan: list[tuple[int, bool]]) -> None:
    """For any times and cancellations, in order of time."""
    fired: list[tuple[int, int]] = []
    timer = DeadlineTimer()
    deadlines = [
        timer.at(when, lambda when=when, number=number: fired.append((when, number)))
        for number, (when, _) in enumerate(plan)
    ]
    for deadline, (_, cancelled) in zip(deadlines, plan, strict=True):
        if cancelled:
            deadline.cancel()
    await asyncio.sleep(30)
    assert fired == sorted((when, number) for number, (when, cancelled) in enumerate(plan) if not cancelled)
