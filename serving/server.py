"""The server process: assembly (`build`), and its life from start to shutdown (`serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import uvloop

from serving.bulk.batches_api.records import JobState
from serving.bulk.batches_api.runner import BatchesApiRunner
from serving.bulk.batches_api.service import BatchesApiService
from serving.errors import NotReady, StartupError
from serving.grpc.server import GrpcListener
from serving.host import installing
from serving.http.apis import openai, operations, tei
from serving.http.apis.batch_lines import BatchLines
from serving.http.apis.openai_ids import OpenAiIds
from serving.http.app import App
from serving.http.app_context import AppContext
from serving.http.listener import HttpListener
from serving.http.middleware import is_loopback, known_hosts
from serving.inference.answer_cache import AnswerCache
from serving.inference.dispatcher import Dispatcher
from serving.inference.pipeline import Pipeline
from serving.lifecycle import REPLY_GRACE_S, TRACES_GRACE_S, Lifecycle, State
from serving.logs import members, tell
from serving.net.buffers import BufferBudget, give_back_free_memory
from serving.net.connection_limiter import ConnectionLimiter
from serving.net.observer import RequestObserver
from serving.net.orca import LoadReports
from serving.oip.service import SERVER_VERSION, V2Service
from serving.operations.announcement import Addresses, Announcement
from serving.operations.ports import AgentPort, ProbeListener, load_report
from serving.operations.status import Status
from serving.rollout.engine_build import EngineBuilder
from serving.rollout.engine_load import LoadBuilder
from serving.rollout.engine_slot import EngineSlot
from serving.rollout.repository_watch import RepositoryWatch
from serving.rollout.upgrade import Upgrade
from serving.rollout.versions import Versions
from serving.scheduling.admission import AdmissionLimits
from serving.scheduling.batcher import GROUP_TOKENS, PREFETCH_TOKENS, Policy
from serving.scheduling.fifo import FifoScheduler
from serving.scheduling.scheduler import Scheduler
from serving.security.keys import ApiKeys
from serving.security.tls import MIN_GOODBYE_S, Tls
from serving.security.watch import FileWatch
from serving.tei.service import TeiService
from serving.telemetry import catalogue
from serving.telemetry.metrics import CONTENT_TYPE, Metrics
from serving.telemetry.recent import Recent
from serving.telemetry.requests import Refusals, SpanCounts, write_access_line
from serving.unawaited import kept, start

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from serving.engine.process.remote_engine import EngineLife
    from serving.http.apis.batch_lines import LineRoute
    from serving.inference.served_models import Repository
    from serving.logs import LogWriter
    from serving.net.ports import Ports
    from serving.rollout.engine_choice import Choice, Chooser
    from serving.settings import Settings
    from serving.telemetry.tracing import SpanSender

log = logging.getLogger("bertserve")

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_LINE_ROUTES: Sequence[LineRoute[Any, Any]] = (openai.LINES, tei.SPARSE_LINES)
"""The routes whose requests can be lines of batch files."""


@dataclass(frozen=True, slots=True)
class Server:
    settings: Settings
    lifecycle: Lifecycle
    repository: Repository
    dispatcher: Dispatcher
    slot: EngineSlot
    versions: Versions
    builder: EngineBuilder | None
    http: HttpListener
    grpc: GrpcListener
    probes: ProbeListener
    agent: AgentPort | None
    limiter: ConnectionLimiter
    budget: BufferBudget
    recent: Recent
    jobs: BatchesApiService | None
    runner: BatchesApiRunner | None
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]]
    span_sender: SpanSender | None


def run(
    settings: Settings, choice: Choice, chooser: Chooser, ports: Ports, log_writer: LogWriter, noted: Sequence[int]
) -> int:
    """Serves until a signal or a failure; returns the exit code. `noted` holds signals that came before."""
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for number in _END_SIGNALS:
        signal.signal(number, lambda number, _: signals.put_nowait(signal.Signals(number)))
    for earlier in noted:
        signals.put_nowait(signal.Signals(earlier))

    async def main() -> int:
        asyncio.get_running_loop().set_exception_handler(_on_loop_error)
        return await serve(build(settings, choice, chooser, ports, log_writer), signals)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def _on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an unhandled exception. The loop's own message is dropped: its arguments may contain a client's data."""
    log.error("unhandled exception", exc_info=context.get("exception"))


def build(settings: Settings, choice: Choice, chooser: Chooser, ports: Ports, log_writer: LogWriter) -> Server:
    repository, lifecycle, metrics = choice.repository, Lifecycle(), Metrics()
    recent = Recent(metrics)

    # The path of a request: tracing, parsing, scheduling, inference.
    spans = SpanCounts()
    span_sender = _span_sender(settings, spans)
    sinks = [write_access_line] if settings.access_log else []
    if span_sender:
        sinks.append(span_sender.record)
    observer = RequestObserver(metrics.count_outcome, sinks)
    dispatcher = Dispatcher(
        _policy(settings, repository),
        AdmissionLimits(
            settings.max_queue_tokens, settings.default_timeout_ms, settings.max_timeout_ms, settings.max_bulk_tokens
        ),
        metrics,
        scheduler=FifoScheduler if settings.scheduling == "fifo" else Scheduler,
    )
    cache = AnswerCache(settings.response_cache_mb << 20) if settings.response_cache_mb else None
    pipeline = Pipeline(
        settings=settings,
        repository=repository,
        lifecycle=lifecycle,
        dispatcher=dispatcher,
        metrics=metrics,
        cache=cache,
    )
    if cache is not None:
        repository.subscribe(cache.clear)
    _show_cache(metrics, cache)

    # The engine and its replacements.
    loads = LoadBuilder(settings, chooser, metrics.registry)
    slot = EngineSlot(
        choice,
        settings=settings,
        chooser=chooser,
        loads=loads,
        dispatcher=dispatcher,
        pipeline=pipeline,
        lifecycle=lifecycle,
    )
    node = settings.cache_dir if settings.build_engine else None
    builder = EngineBuilder(node, settings.precision) if node else None
    versions = Versions(settings, repository, slot, chooser, builder)

    # Ports.
    limiter = ConnectionLimiter.of(settings, max(slot.load.threads, 2 * len(slot.load.gpus)))
    files = FileWatch()

    def keys_changed() -> None:
        grpc.keys_changed()

    async def renew() -> None:
        await http.renew()
        await grpc.renew()

    keys, tls = _keys(settings, files, keys_changed, ports), _tls(settings, files, renew, metrics)
    record_error, budget = Refusals(metrics, log_writer.limit).refused, BufferBudget.of(settings)
    jobs = BatchesApiService.open(settings)
    status = Status(repository, lifecycle, dispatcher, metrics, recent, slot, versions, jobs)
    v2_service = V2Service(pipeline, repository, lifecycle, settings, versions)
    tei_service = TeiService(pipeline, repository, settings)
    load_reports = LoadReports(lambda: load_report(dispatcher, recent), settings.load_reports)
    grpc = GrpcListener(
        *(ports.grpc, v2_service, tei_service, settings, record_error),
        keys=keys,
        tls=tls,
        limiter=limiter,
        observer=observer,
        budget=budget,
        load_reports=load_reports,
    )
    context = AppContext(
        pipeline=pipeline,
        repository=repository,
        lifecycle=lifecycle,
        settings=settings,
        v2=v2_service,
        tei=tei_service,
        status=status.report,
        render_metrics=metrics.render,
        metrics_type=CONTENT_TYPE,
        record_error=record_error,
        load_reports=load_reports,
        keys=keys,
        observer=observer,
        jobs=jobs,
        refuses_unknown=settings.unknown_fields == "refuse",
        read_ids=ids.texts if (ids := OpenAiIds.open(settings.accept_token_ids)) else None,
    )
    http = HttpListener(
        *(App(context), ports.http, settings),
        tls=tls,
        limiter=limiter,
        budget=budget,
        hosts=known_hosts(settings, ports.http, keys),
    )
    probes = ProbeListener(
        App(replace(context, load_reports=None, keys=None, observer=None), [operations.router], documented=False),
        grpc.health.methods(),
        ports.metrics,
        settings,
    )

    # Subscriptions and background tasks.
    announcement = Announcement(
        settings, repository, lifecycle, lambda: Addresses(http.address, grpc.address, probes.address), log_writer.say
    )
    slot.on_up += [_freeze_garbage, announcement.engine_up]
    slot.on_end.append(metrics.engine_died)
    lifecycle.subscribe(metrics.state)
    lifecycle.subscribe(lambda state: tell(log.info, "state: %s", state=state))

    background = [files.run, give_back_free_memory]
    if settings.watch_models_s:
        background.append(RepositoryWatch(settings.models, versions, settings.watch_models_s).run)
    if builder:
        background.append(Upgrade(chooser, builder, slot, loads).run)
    lines = {route.path: BatchLines(context, route) for route in _LINE_ROUTES}
    server = Server(
        settings=settings,
        lifecycle=lifecycle,
        repository=repository,
        dispatcher=dispatcher,
        slot=slot,
        versions=versions,
        builder=builder,
        http=http,
        grpc=grpc,
        probes=probes,
        agent=None if ports.agent is None else AgentPort(ports.agent, lifecycle, dispatcher),
        limiter=limiter,
        budget=budget,
        recent=recent,
        jobs=jobs,
        runner=BatchesApiRunner(jobs, lines, settings) if jobs else None,
        background=background,
        span_sender=span_sender,
    )
    _show(metrics, server, v2_service, spans, log_writer)
    return server


def _show(metrics: Metrics, server: Server, v2_service: V2Service, spans: SpanCounts, log_writer: LogWriter) -> None:
    slot, repository = server.slot, server.repository
    metrics.follow(server.dispatcher)
    metrics.read(catalogue.UTILIZATION, lambda: load_report(server.dispatcher, server.recent).application_utilization)
    metrics.follow_engine(lambda: slot.engine, repository)
    metrics.read(catalogue.SWAPS, lambda: server.versions.outcomes)
    metrics.follow_models(repository, lambda: v2_service.statistics(None).model_stats, server.dispatcher.waiting)
    metrics.read(catalogue.SPANS_EXPORTED, lambda: spans.exported)
    metrics.read(catalogue.SPANS_DROPPED, lambda: spans.dropped)
    metrics.read(catalogue.LOG_LOST, lambda: log_writer.lost)
    metrics.read(catalogue.LOG_HIDDEN, lambda: log_writer.limit.hidden)
    metrics.read(catalogue.BUILD, lambda: {SERVER_VERSION: 1.0})
    metrics.read(catalogue.CONNECTIONS, lambda: {"http": server.http.connections, "grpc": server.grpc.connections})
    metrics.read(catalogue.BUFFERS, lambda: server.budget.used)
    metrics.read(catalogue.BUFFER_REFUSALS, lambda: server.budget.refusals)
    jobs, runner = server.jobs, server.runner
    metrics.read(catalogue.JOBS, lambda: jobs.store.states if jobs else {str(state): 0.0 for state in JobState})
    metrics.read(catalogue.JOB_LINES, lambda: runner.lines if runner else {"completed": 0.0, "failed": 0.0})
    metrics.read(catalogue.JOB_FILES, lambda: jobs.store.files if jobs else 0)
    metrics.read(catalogue.JOB_BYTES, lambda: jobs.store.used_bytes if jobs else 0)
    limiters = {"clients": server.limiter, "probes": server.probes.limiter}
    metrics.read(catalogue.CONNECTIONS_LIMIT, lambda: {port: float(each.limit) for port, each in limiters.items()})
    metrics.read(
        catalogue.CONNECTIONS_REFUSED,
        lambda: {
            (port, reason): float(count) for port, each in limiters.items() for reason, count in each.refused.items()
        },
    )
    metrics.read(
        catalogue.CONNECTIONS_DISPLACED, lambda: {port: float(each.displaced) for port, each in limiters.items()}
    )


def _show_cache(metrics: Metrics, cache: AnswerCache | None) -> None:
    metrics.read(catalogue.CACHE_TEXTS, lambda: cache.texts if cache else dict.fromkeys(("hit", "shared", "miss"), 0))
    metrics.read(catalogue.CACHE_BYTES, lambda: cache.used_bytes if cache else 0)


def _policy(settings: Settings, repository: Repository) -> Policy:
    specs = [model.spec() for model in repository.models]
    return Policy(
        settings.max_batch_tokens,
        batch_invariant=[spec.batch_invariant for spec in specs],
        narrow=[spec.narrow for spec in specs],
        group_tokens=GROUP_TOKENS,
        prefetch_tokens=PREFETCH_TOKENS,
        min_batch_gain=settings.min_batch_gain,
        fairness=settings.fairness,
        max_queue_delay_s=settings.max_queue_delay_ms / 1e3,
        bulk_share=settings.bulk_share,
        bulk_slice_s=settings.bulk_slice_ms / 1e3,
    )


def _span_sender(settings: Settings, counts: SpanCounts) -> SpanSender | None:
    if not settings.otlp_endpoint:
        return None
    try:
        from serving.telemetry.tracing import SpanSender  # noqa: PLC0415  needs its libraries
    except ModuleNotFoundError:
        raise StartupError(f"--otlp-endpoint needs OpenTelemetry's SDK: {installing('tracing')}") from None
    return SpanSender(settings.otlp_endpoint, SERVER_VERSION, settings.trace_sample, counts)


def _keys(settings: Settings, files: FileWatch, changed: Callable[[], None], ports: Ports) -> ApiKeys | None:
    if settings.api_keys_file is None:
        if settings.tls_client_ca_file is None and not is_loopback(ports.http.getsockname()[0]):
            log.warning(
                "--host %s without --api-keys-file: anyone who can reach the HTTP or gRPC port can use the models",
                settings.host,
            )
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
    goodbye_s = max(MIN_GOODBYE_S, settings.body_timeout_s)
    tls = Tls(certificate, key, settings.tls_client_ca_file, settings.header_timeout_s, goodbye_s)
    expiry = tls.expires_at()

    async def reload() -> str:
        nonlocal expiry
        await renew()
        expiry = tls.expires_at()
        return f"valid until {datetime.fromtimestamp(expiry, UTC):%Y-%m-%d %H:%M} UTC"

    files.add("certificates", tls.paths, reload)
    return tls


def _freeze_garbage(_: EngineLife) -> None:
    """Freezes the objects of a warm server, so that the garbage collector scans only new ones."""
    gc.collect()
    gc.freeze()


async def serve(server: Server, signals: asyncio.Queue[signal.Signals]) -> int:
    """Opens the ports, starts the engine, waits for a signal or a failure, and shuts down; returns the exit code.

    Args:
        server: The server to run.
        signals: Queue of signals. It may already hold some, and gets further ones.

    Raises:
        StartupError: No engine is left.
    """
    lifecycle = server.lifecycle
    for number in _END_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
    failed = asyncio.Event()
    lifecycle.subscribe(lambda state: failed.set() if state is State.FAILED else None)

    await server.probes.start()
    await server.http.start()
    await server.grpc.start()
    if server.agent:
        await server.agent.start()
    server.recent.start()
    lifecycle.to(State.WARMING)
    server.slot.start()
    background = [start(kept(work)) for work in server.background]
    jobs = start(server.runner.run()) if server.runner else None

    signalled, failure = asyncio.create_task(signals.get()), asyncio.create_task(failed.wait())
    await asyncio.wait({signalled, failure}, return_when=asyncio.FIRST_COMPLETED)
    failure.cancel()
    if signalled.done():
        await _drain(server, signals, lame_duck=signalled.result() is signal.SIGTERM)
    else:
        signalled.cancel()
        await _end_requests(server, 0)

    if server.builder:
        await asyncio.to_thread(server.builder.close)
    for task in background:
        task.cancel()
    await asyncio.gather(server.versions.close(), server.slot.close(), *background, return_exceptions=True)
    if server.jobs and jobs:
        jobs.cancel()
        await asyncio.gather(jobs, return_exceptions=True)
        await asyncio.to_thread(server.jobs.close)
    if server.span_sender:
        await asyncio.to_thread(server.span_sender.close, TRACES_GRACE_S)
    server.probes.close()
    if server.agent:
        server.agent.close()
    server.recent.close()
    if lifecycle.state is State.FAILED:
        raise StartupError(lifecycle.failure)
    lifecycle.to(State.STOPPED)
    return 0


async def _drain(server: Server, signals: asyncio.Queue[signal.Signals], *, lame_duck: bool) -> None:
    """Drains: not ready at once, then the lame-duck time, then the drain. A second signal skips the lame-duck time."""
    was_ready = server.lifecycle.ready
    server.lifecycle.to(State.DRAINING)
    if server.builder:
        server.builder.stop()
    if server.runner:
        server.runner.stop()
    requests = server.dispatcher.requests
    log.info("draining: %d requests in flight", requests, extra=members(state=State.DRAINING, requests=requests))
    # A server that was not ready gets no traffic, so it needs no lame-duck time.
    if lame_duck and was_ready and server.settings.lame_duck_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.get(), server.settings.lame_duck_s)
    await _end_requests(server, server.settings.drain_s)


async def _end_requests(server: Server, limit_s: float) -> None:
    """Closes the ports, answers requests in flight or in transit, and rejects the rest after `limit_s`."""
    server.versions.stop()
    server.http.close()
    closed = asyncio.gather(server.http.emptied(), server.grpc.finish(limit_s, REPLY_GRACE_S))
    try:
        await asyncio.wait_for(asyncio.shield(closed), limit_s)
    except TimeoutError:
        server.lifecycle.accept_no_more()
        ending = NotReady("the server is shutting down", begun=True)
        server.dispatcher.fail_all(ending)
        server.http.refuse_uploads(ending)
        await asyncio.wait({closed}, timeout=REPLY_GRACE_S)
        closed.cancel()
        await asyncio.gather(closed, return_exceptions=True)
