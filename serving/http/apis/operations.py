"""Probes, metrics and status: what operators and probes ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from serving.http.exchange import HttpReply, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.http.exchange import HttpRequest
    from serving.lifecycle import Lifecycle

TAG = "Operations"

_MINIMAL = b"return=minimal"
"""The header `Prefer` (RFC 7240) of whoever asks for the status every other second: without the cost tables."""


class StateReply(msgspec.Struct):
    """The server's state."""

    state: str


def probes(
    lifecycle: Lifecycle, render_metrics: Callable[[], bytes], metrics_type: str, status: Callable[..., dict[str, Any]]
) -> list[Operation]:
    """What the metrics port serves, and the main port too.

    Args:
        lifecycle: The server's state.
        render_metrics: Makes the metrics' text.
        metrics_type: Its content type.
        status: What `/status` tells.
    """

    async def livez(_: HttpRequest) -> HttpReply:
        return HttpReply(orjson.dumps({"state": lifecycle.state}), 200 if lifecycle.live else 503)

    async def readyz(_: HttpRequest) -> HttpReply:
        return HttpReply(orjson.dumps({"state": lifecycle.state}), 200 if lifecycle.ready else 503)

    async def metrics(_: HttpRequest) -> HttpReply:
        return HttpReply(render_metrics(), content_type=metrics_type.encode())

    async def show_status(http: HttpRequest) -> HttpReply:
        if http.header(b"prefer") == _MINIMAL:
            return HttpReply(orjson.dumps(status(costs=False)), head=b"preference-applied: %b\r\n" % _MINIMAL)
        return HttpReply(orjson.dumps(status()))

    return [
        Operation(
            *("GET", "/livez", livez, "200 unless the server should be restarted.", TAG),
            reply=StateReply,
            statuses=(503,),
            open=True,
        ),
        Operation(
            *("GET", "/readyz", readyz, "200 while new requests should come here.", TAG),
            reply=StateReply,
            statuses=(503,),
            open=True,
        ),
        Operation("GET", "/metrics", metrics, "Prometheus metrics.", TAG),
        Operation(
            "GET",
            "/status",
            show_status,
            "State, the last minute, queue, admission, costs and the models.",
            TAG,
            reply=dict[str, Any],
        ),
    ]
