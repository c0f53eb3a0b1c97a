from __future__ import annotations

import asyncio
import functools
import selectors
from typing import TYPE_CHECKING, Any, ParamSpec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.inference.deadline_timer import Alarm, Alarms

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer once there is nothing else to do.

    Attributes:
        now: The clock, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_LeapingSelector(self))

    def time(self) -> float:
        """The virtual clock."""
        return self.now


class _LeapingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits and no timer is set: this would last for ever")
        self._loop.now += max(timeout, 0.0)
        return super().select(0)


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test on a clock of its own; what waits for ever fails instead."""

    @functools.wraps(test)
    def run(*args: P.args, **keywords: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **keywords))

    return run


def now() -> float:
    """The running loop's clock."""
    return asyncio.get_running_loop().time()


@virtually
async def test_an_alarm_rings_once_at_its_time() -> None:
    """Not before and not again."""
    rung: list[float] = []
    Alarms().at(5.0, lambda: rung.append(now()))
    await asyncio.sleep(4.9)
    assert rung == []
    await asyncio.sleep(10)
    assert rung == [pytest.approx(5.0)]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
@virtually
async def test_alarms_ring_in_the_order_of_their_times(order: tuple[int, ...]) -> None:
    """Whatever the order in which they were set; a nearer one re-arms the timer."""
    rung: list[tuple[int, float]] = []
    alarms = Alarms()
    for when in order:
        alarms.at(when, lambda when=when: rung.append((when, now())))
    await asyncio.sleep(4)
    assert rung == [(1, pytest.approx(1)), (2, pytest.approx(2)), (3, pytest.approx(3))]


@virtually
async def test_alarms_of_one_time_ring_in_the_order_in_which_they_were_set() -> None:
    """Equal deadlines are first come, first served."""
    rung: list[int] = []
    alarms = Alarms()
    for number in range(5):
        alarms.at(1.0, lambda number=number: rung.append(number))
    await asyncio.sleep(2)
    assert rung == [0, 1, 2, 3, 4]


@virtually
async def test_an_alarm_for_the_past_rings_at_once() -> None:
    """It still rings from the loop, not from the call that sets it."""
    await asyncio.sleep(10)
    rung: list[float] = []
    Alarms().at(3.0, lambda: rung.append(now()))
    assert rung == []
    await asyncio.sleep(0.001)
    assert rung == [10.0]


@virtually
async def test_a_cancelled_alarm_stays_silent() -> None:
    """Its neighbours ring; cancelling it again, or after it has rung, is harmless."""
    rung: list[str] = []
    alarms = Alarms()
    first = alarms.at(1.0, lambda: rung.append("first"))
    second = alarms.at(2.0, lambda: rung.append("second"))
    third = alarms.at(3.0, lambda: rung.append("third"))
    first.cancel()
    third.cancel()
    third.cancel()
    await asyncio.sleep(5)
    second.cancel()
    assert rung == ["second"]


@virtually
async def test_a_cancelled_alarm_lets_its_callback_go() -> None:
    """What a request held is free at once, not at its deadline."""
    alarm = Alarms().at(60.0, list)
    alarm.cancel()
    assert alarm.callback is None


@virtually
async def test_a_callback_may_set_alarms_nearer_than_all_others() -> None:
    """The timer is armed for the nearest again."""
    rung: list[float] = []
    alarms = Alarms()
    alarms.at(1.0, lambda: alarms.at(2.0, lambda: rung.append(now())))
    alarms.at(9.0, lambda: rung.append(now()))
    await asyncio.sleep(10)
    assert rung == [pytest.approx(2.0), pytest.approx(9.0)]


@virtually
async def test_a_callback_may_cancel_an_alarm_that_is_due_with_it() -> None:
    """The other one stays silent, although its time has come."""
    rung: list[str] = []
    alarms = Alarms()
    later: list[Alarm] = []
    alarms.at(1.0, lambda: [alarm.cancel() for alarm in later])
    later.append(alarms.at(1.0, lambda: rung.append("too late")))
    await asyncio.sleep(2)
    assert rung == []


@virtually
async def test_one_timer_serves_many_alarms() -> None:
    """Setting and cancelling ten thousand later alarms does not touch the loop's timers."""
    loop = asyncio.get_running_loop()
    armed: list[float] = []
    call_at = loop.call_at

    def counting(when: float, callback: Callable[..., object], *args: Any, **keywords: Any) -> asyncio.TimerHandle:
        armed.append(when)
        return call_at(when, callback, *args, **keywords)

    loop.call_at = counting  # type: ignore[method-assign]  counts what the alarms ask of the loop
    alarms = Alarms()
    alarms.at(1.0, list)
    for number in range(10_000):
        alarms.at(2.0 + number, list).cancel()
    assert armed == [1.0]


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=20))
@settings(derandomize=True, max_examples=150, deadline=None)
@virtually
async def test_every_alarm_that_is_not_cancelled_rings_exactly_once(plan: list[tuple[int, bool]]) -> None:
    """For any times and cancellations, in order of time."""
    rung: list[tuple[int, int]] = []
    alarms = Alarms()
    set_alarms = [
        alarms.at(when, lambda when=when, number=number: rung.append((when, number)))
        for number, (when, _) in enumerate(plan)
    ]
    for alarm, (_, cancelled) in zip(set_alarms, plan, strict=True):
        if cancelled:
            alarm.cancel()
    await asyncio.sleep(30)
    assert rung == sorted((when, number) for number, (when, cancelled) in enumerate(plan) if not cancelled)
