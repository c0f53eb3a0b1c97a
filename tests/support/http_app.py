"""An application without a pipeline behind it, and a port that serves one."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from anyio.from_thread import start_blocking_portal

from bertserve.serving.http.app_context import AppContext
from bertserve.serving.http.listener import HttpListener
from bertserve.serving.lifecycle import Lifecycle, State
from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.net.connection_limiter import ConnectionLimiter
from bertserve.serving.net.ports import bind
from bertserve.serving.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from bertserve.serving.http.app import App

LOOPBACK = "127.0.0.1"


def ready_api(settings: Settings | None = None, **parts: Any) -> AppContext:
    """What endpoints of a server that is ready ask; those that are not among `parts` are of no use."""
    lifecycle = Lifecycle()
    lifecycle.to(State.WARMING)
    lifecycle.to(State.READY)
    unused = dict.fromkeys(("pipeline", "repository", "v2"))
    told = {"status": dict, "render_metrics": bytes, "record_error": lambda *_: None}
    given: dict[str, Any] = {"lifecycle": lifecycle, "settings": settings or Settings.load([], {}), **unused, **told}
    return AppContext(**{**given, **parts})


@asynccontextmanager
async def listening(
    app: App, *, budget: BufferBudget | None = None, limiter: ConnectionLimiter | None = None
) -> AsyncIterator[HttpListener]:
    settings = app.context.settings
    opened = bind(LOOPBACK, 0, "HTTP")
    listener = HttpListener(
        *(app, opened, settings),
        budget=budget or BufferBudget.of(settings),
        limiter=limiter or ConnectionLimiter(sys.maxsize),
    )
    await listener.start()
    try:
        yield listener
    finally:
        app.context.lifecycle.to(State.DRAINING)
        listener.close()
        await asyncio.wait_for(listener.emptied(), 10)


@contextmanager
def listening_beside(app: App, budget: BufferBudget | None = None) -> Iterator[str]:
    """The address of a port whose loop runs in a thread of its own."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(listening(app, budget=budget)) as port:
        yield "{}:{}".format(*port.address)
