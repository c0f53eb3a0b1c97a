"""Waiting for what happens in another process or thread."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.05
_SHARE = 0.1
"""Of the time waited so far, each pause: a look costs some milliseconds of CPU here and in the server."""


def wait_for(condition: Callable[[], T], what: str, seconds: float = 10.0) -> T:
    """The first true value of `condition`; `TimeoutError` with `what` where there is none in time."""
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        if waited > seconds:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(min(max(_FIRST_PAUSE_S, _SHARE * waited), _LONGEST_PAUSE_S))
    return value


async def until(condition: Callable[[], object], what: str, seconds: float = 10.0) -> None:
    """`wait_for` that lets the event loop work meanwhile."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        await asyncio.sleep(_FIRST_PAUSE_S / 10)


async def turns() -> None:
    """A hundred turns of the event loop, of which a few are enough to read from a socket."""
    for _ in range(100):
        await asyncio.sleep(0)
