"""HTTP and gRPC as clients reach them: the same in a server of one process and in a front process.

Each step takes the one before: a `Backend` answers requests, an `Api` decides who may ask it for what, `Listeners`
accept connections.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from bertserve.serving.errors import NotReady, StartupError
from bertserve.serving.grpc.dispatch import CallDispatch
from bertserve.serving.grpc.server import Core as GrpcCore
from bertserve.serving.grpc.server import GrpcListener, methods_of
from bertserve.serving.grpc.services.inference import SERVICE
from bertserve.serving.grpc.services.standard import HealthService
from bertserve.serving.host import installing
from bertserve.serving.http.apis.openai_ids import OpenAiIds
from bertserve.serving.http.app import App
from bertserve.serving.http.app_context import AppContext
from bertserve.serving.http.app_context import Core as HttpCore
from bertserve.serving.http.hosts import known_hosts
from bertserve.serving.http.listener import HttpListener
from bertserve.serving.lifecycle import REPLY_GRACE_S
from bertserve.serving.net.connection import Port
from bertserve.serving.net.observer import RequestObserver
from bertserve.serving.oip.service import SERVER_VERSION, V2Service
from bertserve.serving.security.keys import ApiKeys
from bertserve.serving.security.tls import MIN_GOODBYE_S, Tls
from bertserve.serving.security.watch import FileWatch
from bertserve.serving.telemetry import catalogue
from bertserve.serving.telemetry.requests import Refusals, SpanCounts, write_access_line

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from bertserve.serving.errors import BertserveError
    from bertserve.serving.inference.pipeline import Pipeline
    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.logs import LogWriter
    from bertserve.serving.net.buffers import BufferBudget
    from bertserve.serving.net.connection_limiter import ConnectionLimiter
    from bertserve.serving.oip.service import ModelVersions
    from bertserve.serving.settings import Settings
    from bertserve.serving.telemetry.metrics import Metrics
    from bertserve.serving.telemetry.tracing import SpanSender


class CoreProcess(HttpCore, GrpcCore, Protocol):
    """The core process, in a front."""


@dataclass(frozen=True, slots=True)
class Backend:
    """What answers requests."""

    settings: Settings
    repository: Repository
    lifecycle: Lifecycle
    pipeline: Pipeline
    versions: ModelVersions
    metrics: Metrics
    log_writer: LogWriter


@dataclass(frozen=True, slots=True)
class Api:
    """What clients may ask a backend for.

    Attributes:
        core: The core process in a front; None in the core itself.
    """

    app: App
    metrics: Metrics
    files: FileWatch
    span_sender: SpanSender | None
    core: CoreProcess | None

    @classmethod
    def of(
        cls,
        backend: Backend,
        status: Callable[..., dict[str, Any]],
        gather: Callable[[], Awaitable[None]] | None = None,
        core: CoreProcess | None = None,
    ) -> Api:
        """`status` and `gather` as in `AppContext`."""
        settings, metrics, log_writer = backend.settings, backend.metrics, backend.log_writer
        metrics.total(catalogue.LOG_LOST, lambda: log_writer.lost)
        spans, files = SpanCounts(), FileWatch()
        metrics.total(catalogue.SPANS_DROPPED, lambda: spans.dropped)
        metrics.read(catalogue.RELOADS, files.states)
        span_sender = _span_sender(settings, spans)
        sinks = [write_access_line] if settings.access_log else []
        if span_sender:
            sinks.append(span_sender.record)
        context = AppContext(
            pipeline=backend.pipeline,
            repository=backend.repository,
            lifecycle=backend.lifecycle,
            settings=settings,
            v2=V2Service(backend.pipeline, backend.repository, backend.lifecycle, settings, backend.versions, metrics),
            status=status,
            render_metrics=metrics.render,
            record_error=Refusals(metrics, log_writer.limit).refused,
            keys=_keys(settings, files),
            observer=RequestObserver(metrics.count_outcome, sinks),
            read_ids=ids.texts if (ids := OpenAiIds.open(settings.accept_token_ids)) else None,
            core=core,
            gather=gather,
        )
        return cls(App(context), metrics, files, span_sender, core)

    @property
    def context(self) -> AppContext:
        return self.app.context


@dataclass(frozen=True, slots=True)
class Transport:
    """Where connections come from, and what limits them.

    Attributes:
        http: The listening socket; None in a front, which adopts connections.
        grpc: As `http`.
        host: The address of the HTTP port.
        place: Passes an accepted connection of a port to a front process; returns False if there is none.
    """

    http: socket.socket | None
    grpc: socket.socket | None
    host: str
    limiter: ConnectionLimiter
    budget: BufferBudget
    place: Callable[[str, socket.socket, Callable[[], None]], bool] = lambda *_: False


@dataclass(frozen=True, slots=True)
class Listeners:
    """The two ports of an API."""

    api: Api
    http: HttpListener
    grpc: GrpcListener

    @classmethod
    def of(cls, api: Api, transport: Transport) -> Listeners:
        context, settings, budget = api.context, api.context.settings, transport.budget
        tls = _tls(settings)
        http = HttpListener(
            *(api.app, transport.http, settings),
            tls=tls,
            limiter=transport.limiter,
            budget=budget,
            hosts=known_hosts(settings, transport.host, context.keys),
            place=partial(transport.place, "http"),
        )
        health = HealthService([SERVICE])
        methods = methods_of(context.v2, health, api.core)
        calls = CallDispatch(methods, settings, context.record_error, budget, context.keys, context.observer)
        grpc = GrpcListener(
            *(transport.grpc, calls, health, context.lifecycle),
            tls=tls,
            limiter=transport.limiter,
            place=partial(transport.place, "grpc"),
        )
        if context.keys is not None:
            context.keys.subscribe(calls.keys_changed)
        expires_at = _watch(api.files, tls, http, grpc) if tls else lambda: 0.0
        api.metrics.read(catalogue.CERTIFICATE, expires_at)
        api.metrics.total(catalogue.BUFFER_REFUSALS, lambda: budget.refusals)
        return cls(api, http, grpc)

    async def start(self) -> None:
        await self.http.start()
        await self.grpc.start()

    def close(self) -> None:
        """Stops accepting."""
        self.http.close()
        self.grpc.close()

    async def end(self, limit_s: float, fail_all: Callable[[BertserveError], None]) -> None:
        """Closes the ports, answers requests in flight or in transit, and rejects the rest after `limit_s`."""
        self.http.close()
        closed = asyncio.gather(self.http.emptied(), self.grpc.finish(limit_s, REPLY_GRACE_S))
        try:
            await asyncio.wait_for(asyncio.shield(closed), limit_s)
        except TimeoutError:
            self.api.context.lifecycle.accept_no_more()
            fail_all(NotReady("the server is shutting down", begun=True))
            await asyncio.wait({closed}, timeout=REPLY_GRACE_S)
            closed.cancel()
            await asyncio.gather(closed, return_exceptions=True)


def _span_sender(settings: Settings, counts: SpanCounts) -> SpanSender | None:
    if not settings.otlp_endpoint:
        return None
    try:
        from bertserve.serving.telemetry.tracing import SpanSender  # noqa: PLC0415  needs its libraries
    except ModuleNotFoundError:
        raise StartupError(f"--otlp-endpoint needs OpenTelemetry's SDK: {installing('tracing')}") from None
    return SpanSender(settings.otlp_endpoint, SERVER_VERSION, settings.trace_sample, counts)


def _keys(settings: Settings, files: FileWatch) -> ApiKeys | None:
    if settings.api_keys_file is None:
        return None
    keys = ApiKeys(settings.api_keys_file)

    async def reload() -> str:
        keys.reload()
        return f"{len(keys)} in use"

    files.add("API keys", [settings.api_keys_file], reload)
    return keys


def _tls(settings: Settings) -> Tls | None:
    certificate, key = settings.tls_cert_file, settings.tls_key_file
    if certificate is None or key is None:
        return None
    goodbye_s = max(MIN_GOODBYE_S, Port.body_timeout_s)
    return Tls(certificate, key, settings.tls_client_ca_file, Port.header_timeout_s, goodbye_s)


def _watch(files: FileWatch, tls: Tls, http: HttpListener, grpc: GrpcListener) -> Callable[[], float]:
    """Renews the certificates of the ports when their files change; returns when the one in use expires."""
    expiry = tls.expires_at()

    async def reload() -> str:
        nonlocal expiry
        await http.renew()
        await grpc.renew()
        expiry = tls.expires_at()
        return f"valid until {datetime.fromtimestamp(expiry, UTC):%Y-%m-%d %H:%M} UTC"

    files.add("certificates", tls.paths, reload)
    return lambda: expiry
