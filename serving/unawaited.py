"""Background work: its exceptions are logged, and what would wait for it forever is ended."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from bertserve.serving.errors import BertserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

_PAUSE_S = 1.0

log = logging.getLogger("bertserve")


def start(work: Coroutine[Any, Any, T], failed: Callable[[], None] | None = None) -> asyncio.Task[T]:
    """Starts a task. `failed` is called if it raises; a listed error is reported by whoever raises it, not logged."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(partial(_ended, failed))
    return task


async def keep_running(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs an endless task; restarts it if it raises."""
    while True:
        try:
            await work()
        except Exception:  # the boundary of what nobody awaits
            log.exception("a background task failed; restarting it")
            await asyncio.sleep(_PAUSE_S)
        else:
            return


def is_cancelled() -> bool:
    """Whether the current task is cancelled, and not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _ended(failed: Callable[[], None] | None, task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is None:
        return
    try:
        if not isinstance(error, BertserveError):
            log.error("an unawaited task failed", exc_info=error)
    finally:
        if failed is not None:
            failed()


def log_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an unhandled exception. The loop's own message is dropped: its arguments may contain a client's data."""
    log.error("unhandled exception", exc_info=context.get("exception"))


def run_guarded(failed: Callable[[], None], work: Callable[..., object], *arguments: object) -> None:
    """Wraps a callback of a timer or the event loop: an exception is logged, and `failed` ends its owner."""
    try:
        work(*arguments)
    except Exception:  # noqa: BLE001  the boundary of what nobody awaits
        try:
            log.exception("a callback failed")
        finally:
            failed()
