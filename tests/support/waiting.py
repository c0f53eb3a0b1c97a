"""Waiting for what happens in another process or thread."""

from __future__ import annotations

import asyncio
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")
T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.05
_SHARE = 0.1
"""Of the time waited so far, each pause: a look costs some milliseconds of CPU here and in the server."""


def asynchronous(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test; see `virtually` for one that waits for timers alone."""

    @wraps(test)
    def run(*args: P.args, **keywords: P.kwargs) -> None:
        asyncio.run(test(*args, **keywords))

    return run


def wait_for(condition: Callable[[], T], what: str, seconds: float = 10.0) -> T:
    """The first true value of `condition`.

    Raises:
        TimeoutError: There was none in time; it names `what`.
    """
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        if waited > seconds:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(min(max(_FIRST_PAUSE_S, _SHARE * waited), _LONGEST_PAUSE_S))
    return value


async def until(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    """`wait_for` that lets the event loop work meanwhile.

    Raises:
        TimeoutError: The condition was not true in time; it names `what`.
    """
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        await asyncio.sleep(_FIRST_PAUSE_S / 10)
