"""HTTP and gRPC as clients reach them: the same in a server of one process and in a front process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bertserve.serving.errors import NotReady, StartupError
from bertserve.serving.grpc.server import GrpcListener
from bertserve.serving.host import installing
from bertserve.serving.http.apis.openai_ids import OpenAiIds
from bertserve.serving.http.app import App
from bertserve.serving.http.app_context import AppContext
from bertserve.serving.http.listener import HttpListener
from bertserve.serving.http.middleware import known_hosts
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
    from bertserve.serving.fronts.remote import CoreLink
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


@dataclass(frozen=True, slots=True)
class Listeners:
    """The two ports, and what belongs to them."""

    http: HttpListener
    grpc: GrpcListener
    app: App
    files: FileWatch
    spans: SpanCounts
    span_sender: SpanSender | None

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        http: socket.socket | None,
        grpc: socket.socket | None,
        host: str,
        pipeline: Pipeline,
        repository: Repository,
        lifecycle: Lifecycle,
        versions: ModelVersions,
        metrics: Metrics,
        log_writer: LogWriter,
        limiter: ConnectionLimiter,
        budget: BufferBudget,
        status: Callable[..., dict[str, Any]],
        gather: Callable[[], Awaitable[None]] | None = None,
        core: CoreLink | None = None,
    ) -> Listeners:
        """Assembles the ports; `http` and `grpc` are listening sockets, or None in a front of the process `core`.

        `host` is the address of the HTTP port.
        """
        spans = SpanCounts()
        span_sender = _span_sender(settings, spans)
        sinks = [write_access_line] if settings.access_log else []
        if span_sender:
            sinks.append(span_sender.record)
        observer = RequestObserver(metrics.count_outcome, sinks)
        record_error = Refusals(metrics, log_writer.limit).refused
        files = FileWatch()

        def keys_changed() -> None:
            grpc_listener.keys_changed()

        async def renew() -> None:
            await http_listener.renew()
            await grpc_listener.renew()

        keys, tls = _keys(settings, files, keys_changed), _tls(settings, files, renew, metrics)
        v2 = V2Service(pipeline, repository, lifecycle, settings, versions, metrics)
        context = AppContext(
            pipeline=pipeline,
            repository=repository,
            lifecycle=lifecycle,
            settings=settings,
            v2=v2,
            status=status,
            render_metrics=metrics.render,
            record_error=record_error,
            keys=keys,
            observer=observer,
            read_ids=ids.texts if (ids := OpenAiIds.open(settings.accept_token_ids)) else None,
            core=core,
            gather=gather,
        )
        app = App(context)
        http_listener = HttpListener(
            *(app, http, settings),
            tls=tls,
            limiter=limiter,
            budget=budget,
            hosts=known_hosts(settings, host, keys),
        )
        grpc_listener = GrpcListener(
            *(grpc, v2, settings, record_error),
            keys=keys,
            tls=tls,
            limiter=limiter,
            observer=observer,
            budget=budget,
            core=core,
        )
        return cls(http_listener, grpc_listener, app, files, spans, span_sender)

    @property
    def context(self) -> AppContext:
        return self.app.context

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
            self.context.lifecycle.accept_no_more()
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


def _keys(settings: Settings, files: FileWatch, changed: Callable[[], None]) -> ApiKeys | None:
    if settings.api_keys_file is None:
        return None
    keys = ApiKeys(settings.api_keys_file)

    async def reload() -> str:
        keys.reload()
        changed()
        return f"{len(keys)} in use"

    files.add("API keys", [settings.api_keys_file], reload)
    return keys


def _tls(settings: Settings, files: FileWatch, renew: Callable[[], Awaitable[None]], metrics: Metrics) -> Tls | None:
    expiry = 0.0
    metrics.read(catalogue.CERTIFICATE, lambda: expiry)
    metrics.read(catalogue.RELOADS, files.states)
    certificate, key = settings.tls_cert_file, settings.tls_key_file
    if certificate is None or key is None:
        return None
    goodbye_s = max(MIN_GOODBYE_S, Port.body_timeout_s)
    tls = Tls(certificate, key, settings.tls_client_ca_file, Port.header_timeout_s, goodbye_s)
    expiry = tls.expires_at()

    async def reload() -> str:
        nonlocal expiry
        await renew()
        expiry = tls.expires_at()
        return f"valid until {datetime.fromtimestamp(expiry, UTC):%Y-%m-%d %H:%M} UTC"

    files.add("certificates", tls.paths, reload)
    return tls
