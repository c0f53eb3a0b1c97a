"""The boundary around endpoints."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from bertserve.serving.http.app import App
from bertserve.serving.http.exchange import HttpReply, HttpRequest
from bertserve.serving.http.routes import Router
from tests.support.http_app import ready_api

if TYPE_CHECKING:
    from bertserve.serving.http.app_context import AppContext, Endpoint

REQUEST = HttpRequest("POST", "/embed", {}, b"", "r-1", 0.0)


def _app(endpoint: Endpoint, recorded: list[str]) -> App:
    router = Router("Test")
    router.post("/embed")(endpoint)
    context = ready_api(record_error=lambda error, *_: recorded.append(error.reason))
    return App(context, [router], documented=False)


def test_what_waits_for_work_that_is_cancelled_is_answered() -> None:
    """As when the server ends while a version is loaded: 503, and nobody says that the client had gone."""
    recorded: list[str] = []

    async def endpoint(_: AppContext, __: HttpRequest) -> HttpReply:
        load = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(load.cancel)
        await load
        return HttpReply(b"")

    reply = asyncio.run(_app(endpoint, recorded).answer(REQUEST))
    assert (reply.status, reply.error and reply.error.reason, recorded) == (503, "not_ready", [])


def test_a_request_whose_client_has_gone_is_not_answered() -> None:
    """It is counted, and its cancellation goes on."""
    recorded: list[str] = []

    async def endpoint(_: AppContext, __: HttpRequest) -> HttpReply:
        await asyncio.get_running_loop().create_future()
        return HttpReply(b"")

    async def leave() -> None:
        exchange = asyncio.create_task(_app(endpoint, recorded).answer(REQUEST))
        await asyncio.sleep(0)
        exchange.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange

    asyncio.run(leave())
    assert recorded == ["client_gone"]
