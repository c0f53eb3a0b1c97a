"""Probes, metrics and status, for operators and orchestrators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from bertserve.serving.http.exchange import HttpReply
from bertserve.serving.http.routes import Docs, Router

if TYPE_CHECKING:
    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpRequest

router = Router("Operations")
"""Routes of the metrics port and of the main port."""

_PROMETHEUS_TEXT = b"text/plain; version=0.0.4; charset=utf-8"

_MINIMAL = b"return=minimal"
"""Value of the header `Prefer` (RFC 7240) that omits cost tables, for clients that poll every other second."""


class StateReply(msgspec.Struct):
    """The server's state."""

    state: str


@router.get("/livez", Docs(gives=StateReply, statuses={503: "The server is not live; restart it."}), public=True)
async def livez(context: AppContext, _: HttpRequest) -> HttpReply:
    """Liveness probe: 200 while the server is live."""
    return _state(context, good=context.lifecycle.live)


@router.get(
    "/readyz",
    Docs(gives=StateReply, statuses={503: "The server is not ready; send requests to another replica."}),
    public=True,
)
async def readyz(context: AppContext, _: HttpRequest) -> HttpReply:
    """Readiness probe: 200 while the server accepts requests."""
    return _state(context, good=context.lifecycle.ready)


@router.get("/metrics", Docs(), of_core=True)
async def metrics(context: AppContext, _: HttpRequest) -> HttpReply:
    """Prometheus metrics."""
    if context.gather is not None:
        await context.gather()
    return HttpReply(context.render_metrics(), content_type=_PROMETHEUS_TEXT)


@router.get(
    "/status",
    Docs(gives=dict[str, Any], takes_headers=["Prefer"], gives_headers=["Preference-Applied"]),
    of_core=True,
)
async def status(context: AppContext, http: HttpRequest) -> HttpReply:
    """Get the server's state: last minute, queue, admission, costs and models."""
    if context.gather is not None:
        await context.gather()
    if http.headers.get(b"prefer") == _MINIMAL:
        return HttpReply(orjson.dumps(context.status(costs=False)), head=b"preference-applied: %b\r\n" % _MINIMAL)
    return HttpReply(orjson.dumps(context.status()))


def _state(context: AppContext, *, good: bool) -> HttpReply:
    return HttpReply(orjson.dumps({"state": context.lifecycle.state}), 200 if good else 503)
