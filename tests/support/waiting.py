"""Waiting for what happens in another process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_PAUSE_S = 0.01


def wait_for(condition: Callable[[], T], what: str, seconds: float = 10.0) -> T:
    """The first true value of `condition`.

    Raises:
        TimeoutError: There was none in time; it names `what`.
    """
    limit = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > limit:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(_PAUSE_S)
    return value
