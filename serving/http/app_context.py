"""The dependencies of the endpoints of all protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from bertserve.serving.http.exchange import HttpReply, HttpRequest

if TYPE_CHECKING:
    from bertserve.serving.inference.pipeline import Pipeline
    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.net.observer import RequestObserver
    from bertserve.serving.net.requests import RecordError
    from bertserve.serving.oip.service import V2Service
    from bertserve.serving.security.keys import ApiKeys
    from bertserve.serving.settings import Settings


class Core(Protocol):
    """The core process, in a front."""

    async def call_http(self, method: str, route: str, request: HttpRequest) -> HttpReply:
        """The core's reply to a request of a route; raises the `BertserveError` of its endpoint."""


Endpoint: TypeAlias = Callable[["AppContext", HttpRequest], Coroutine[Any, Any, HttpReply]]
"""Answers a request of one route, or raises a `BertserveError`."""

ReadIds: TypeAlias = Callable[[Sequence[str | list[int]]], list[str]]


@dataclass(slots=True, frozen=True)
class AppContext:
    """The dependencies of endpoints.

    Attributes:
        v2: The Open Inference Protocol, shared by HTTP and gRPC.
        status: Returns the body of `/status`; without cost tables if `costs` is false.
        render_metrics: Returns the body of `/metrics`.
        record_error: Called with each error that a client receives.
        keys: API keys; None if no key is needed.
        observer: Receives the traces of finished requests; None if nothing observes them.
        read_ids: Decodes token ids of another tokenizer to texts; None if such ids are rejected.
        core: The core process in a front; None in the core itself.
        gather: Gathers the counts of front processes, before counts are shown; None without such processes.
        large_body_lock: Held while a large body is decompressed or scanned: one at a time.
    """

    pipeline: Pipeline
    repository: Repository
    lifecycle: Lifecycle
    settings: Settings
    v2: V2Service
    status: Callable[..., dict[str, Any]]
    render_metrics: Callable[[], bytes]
    record_error: RecordError
    keys: ApiKeys | None = None
    observer: RequestObserver | None = None
    read_ids: ReadIds | None = None
    core: Core | None = None
    gather: Callable[[], Awaitable[None]] | None = None
    large_body_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
