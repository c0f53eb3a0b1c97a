"""Asynchronous tests, on the machine's clock or on one that jumps, so that deadlines take no time."""

from __future__ import annotations

import asyncio
import functools
import selectors
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
P = ParamSpec("P")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer once there is nothing else to do."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_LeapingSelector(self))

    def time(self) -> float:
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


def asynchronous(
    test: Callable[P, Coroutine[Any, Any, None]],
    make_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Callable[P, None]:
    """Runs an asynchronous test in a loop of its own, on the machine's clock unless `make_loop` makes another."""

    @functools.wraps(test)
    def run(*args: P.args, **keywords: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(test(*args, **keywords))

    return run


def virtually(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test on a clock of its own; what waits for ever fails instead."""
    return asynchronous(test, VirtualLoop)


def now() -> float:
    return asyncio.get_running_loop().time()
