"""Probes, metrics, status and the start page: what operators and probes ask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from serving.transport.http.exchange import HttpReply, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.lifecycle import Lifecycle
    from serving.repository import Repository
    from serving.transport.http.exchange import HttpRequest

_PAGE = Path(__file__).parents[2] / "web" / "index.html"
TAG = "Operations"


class StateReply(msgspec.Struct):
    """The server's state."""

    state: str


def probes(
    lifecycle: Lifecycle, render_metrics: Callable[[], bytes], metrics_type: str, status: Callable[[], dict[str, Any]]
) -> list[Operation]:
    """What the metrics port serves, and the main port too."""

    async def livez(_: HttpRequest) -> HttpReply:
        return HttpReply(orjson.dumps({"state": lifecycle.state}), 200 if lifecycle.live else 503)

    async def readyz(_: HttpRequest) -> HttpReply:
        return HttpReply(orjson.dumps({"state": lifecycle.state}), 200 if lifecycle.ready else 503)

    async def metrics(_: HttpRequest) -> HttpReply:
        return HttpReply(render_metrics(), content_type=metrics_type.encode())

    async def show_status(_: HttpRequest) -> HttpReply:
        return HttpReply(orjson.dumps(status()))

    return [
        Operation(
            "GET", "/livez", livez, "200 unless the server should be restarted.", TAG, reply=StateReply, statuses=(503,)
        ),
        Operation(
            "GET", "/readyz", readyz, "200 while new requests should come here.", TAG, reply=StateReply, statuses=(503,)
        ),
        Operation("GET", "/metrics", metrics, "Prometheus metrics.", TAG),
        Operation(
            "GET",
            "/status",
            show_status,
            "State, queue, admission, costs and the last batches.",
            TAG,
            reply=dict[str, Any],
        ),
    ]


def start_page(repository: Repository) -> list[Operation]:
    """The page at `/`."""
    template = _PAGE.read_text(encoding="utf-8")
    model = repository.models[0]
    page = template.replace("{{model}}", model.name).replace("{{precision}}", model.artifact.precision).encode()

    async def index(_: HttpRequest) -> HttpReply:
        return HttpReply(page, content_type=b"text/html; charset=utf-8")

    return [Operation("GET", "/", index, "The start page.", TAG)]
