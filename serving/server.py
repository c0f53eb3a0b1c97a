"""The server process: assembly (`build`), and its life from start to shutdown (`serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from bertserve.serving.errors import StartupError
from bertserve.serving.fronts.calls import Calls
from bertserve.serving.fronts.pool import FrontPool
from bertserve.serving.fronts.slots import SharedSlots, automatic
from bertserve.serving.garbage import freeze
from bertserve.serving.host import available_cpus
from bertserve.serving.http.apis import operations
from bertserve.serving.http.app import App
from bertserve.serving.http.middleware import is_loopback
from bertserve.serving.inference.answer_cache import AnswerCache
from bertserve.serving.inference.dispatcher import Dispatcher
from bertserve.serving.inference.pipeline import Pipeline
from bertserve.serving.lifecycle import TRACES_GRACE_S, Lifecycle, State
from bertserve.serving.listeners import Listeners
from bertserve.serving.logs import members, tell
from bertserve.serving.net.buffers import BufferBudget, give_back_free_memory
from bertserve.serving.net.connection_limiter import ConnectionLimiter
from bertserve.serving.oip.service import SERVER_VERSION
from bertserve.serving.operations.announcement import Addresses, Announcement
from bertserve.serving.operations.ports import ProbeListener
from bertserve.serving.operations.status import Status
from bertserve.serving.rollout.engine_load import LoadBuilder
from bertserve.serving.rollout.engine_slot import EngineSlot
from bertserve.serving.rollout.versions import Versions
from bertserve.serving.scheduling.admission import AdmissionLimits
from bertserve.serving.scheduling.batcher import GROUP_TOKENS, PREFETCH_TOKENS, Policy
from bertserve.serving.telemetry import catalogue
from bertserve.serving.telemetry.metrics import Metrics
from bertserve.serving.telemetry.recent import Recent
from bertserve.serving.unawaited import kept, log_loop_error, start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.logs import LogWriter
    from bertserve.serving.net.ports import Ports
    from bertserve.serving.rollout.engine_choice import Choice, Chooser
    from bertserve.serving.settings import Settings
    from bertserve.serving.telemetry.catalogue import Metric

log = logging.getLogger("bertserve")

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Server:
    settings: Settings
    lifecycle: Lifecycle
    repository: Repository
    dispatcher: Dispatcher
    slot: EngineSlot
    versions: Versions
    listeners: Listeners
    fronts: FrontPool | None
    probes: ProbeListener
    limiter: ConnectionLimiter
    budget: BufferBudget
    recent: Recent


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
        asyncio.get_running_loop().set_exception_handler(log_loop_error)
        return await serve(build(settings, choice, chooser, ports, log_writer), signals)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def build(settings: Settings, choice: Choice, chooser: Chooser, ports: Ports, log_writer: LogWriter) -> Server:
    repository, lifecycle, metrics = choice.repository, Lifecycle(), Metrics()
    recent = Recent(metrics)

    # The path of a request: scheduling, inference.
    dispatcher = Dispatcher(
        _policy(settings, repository),
        AdmissionLimits(settings.max_queue_tokens, settings.default_timeout_ms, settings.max_timeout_ms),
        metrics,
    )
    cache = AnswerCache(settings.response_cache_mb << 20) if settings.response_cache_mb else None
    pipeline = Pipeline(
        settings=settings,
        repository=repository,
        lifecycle=lifecycle,
        dispatcher=dispatcher,
        cache=cache,
    )
    if cache is not None:
        repository.subscribe(cache.clear)
    metrics.read(catalogue.CACHE_TEXTS, lambda: cache.texts if cache else dict.fromkeys(("hit", "shared", "miss"), 0))

    # The engine and its replacements.
    loads = LoadBuilder(settings, chooser)
    slot = EngineSlot(
        loads.prepare(choice),
        loads,
        settings,
        dispatcher=dispatcher,
        lifecycle=lifecycle,
        users=pipeline.users,
        died=metrics.engine_died,
    )
    versions = Versions(settings, repository, slot, chooser)

    # Ports.
    limiter = ConnectionLimiter.of(settings, max(slot.load.threads, 2 * len(slot.load.gpus)))
    address = ports.http.getsockname()[0]
    if not (settings.api_keys_file or settings.tls_client_ca_file or is_loopback(address)):
        log.warning(
            "--host %s without --api-keys-file: anyone who can reach the HTTP or gRPC port can use the models",
            settings.host,
        )
    processes = settings.front_processes or automatic(slot.load, available_cpus())
    slots = SharedSlots.create(1 + processes) if processes > 1 else None
    budget = BufferBudget.of(settings, None if slots is None else slots.values)
    fronts = None
    if slots is not None:
        fronts = FrontPool(
            settings,
            processes,
            repository=repository,
            lifecycle=lifecycle,
            dispatcher=dispatcher,
            cache=cache,
            metrics=metrics,
            limiter=limiter,
            slots=slots,
            host=address,
        )
        pipeline.elsewhere = fronts.uses
    reported = fronts.report if fronts else None
    status = Status(repository, lifecycle, dispatcher, metrics, recent, slot, versions, reported)
    listeners = Listeners.open(
        settings,
        http=ports.http,
        grpc=ports.grpc,
        host=address,
        pipeline=pipeline,
        repository=repository,
        lifecycle=lifecycle,
        versions=versions,
        metrics=metrics,
        log_writer=log_writer,
        limiter=limiter,
        budget=budget,
        status=status.report,
        gather=fronts.gather if fronts else None,
    )
    http, grpc, context = listeners.http, listeners.grpc, listeners.context
    if fronts is not None:
        http.place, grpc.place = partial(fronts.place, "http"), partial(fronts.place, "grpc")
        fronts.share_debts(grpc.debts)
        fronts.call = Calls(listeners.app, grpc.methods, fronts).answer
    probes = ProbeListener(
        App(replace(context, keys=None, observer=None), [operations.router], documented=False),
        grpc.health.methods(),
        ports.metrics,
        settings,
    )

    # Subscriptions.
    announcement = Announcement(
        settings, repository, lifecycle, lambda: Addresses(http.address, grpc.address, probes.address), log_writer.say
    )
    slot.subscribe(lambda _: freeze())
    slot.subscribe(announcement.engine_up)
    lifecycle.subscribe(metrics.state)
    lifecycle.subscribe(lambda state: tell(log.info, "state: %s", state=state))

    server = Server(
        settings=settings,
        lifecycle=lifecycle,
        repository=repository,
        dispatcher=dispatcher,
        slot=slot,
        versions=versions,
        listeners=listeners,
        fronts=fronts,
        probes=probes,
        limiter=limiter,
        budget=budget,
        recent=recent,
    )
    _show(metrics, server, log_writer)
    return server


def _show(metrics: Metrics, server: Server, log_writer: LogWriter) -> None:
    slot, repository, listeners, fronts = server.slot, server.repository, server.listeners, server.fronts
    spans = listeners.spans

    def of_fronts(metric: Metric, label: str = "") -> float:
        """The part of a counter that fronts have counted."""
        return fronts.totals[metric.name + label] if fronts else 0.0

    def connections(protocol: str) -> float:
        return fronts.connections(protocol) if fronts else 0.0

    def total(metric: Metric, own: Callable[[], float]) -> None:
        metrics.read(metric, lambda: own() + of_fronts(metric))

    metrics.follow(server.dispatcher)
    metrics.follow_engine(lambda: slot.engine, repository)
    metrics.read(catalogue.SWAPS, lambda: server.versions.outcomes)
    metrics.follow_models(repository)
    metrics.read(
        catalogue.SPANS_DROPPED,
        lambda: {why: count + of_fronts(catalogue.SPANS_DROPPED, why) for why, count in spans.dropped.items()},
    )
    total(catalogue.LOG_LOST, lambda: log_writer.lost)
    total(catalogue.BUFFER_REFUSALS, lambda: server.budget.refusals)
    metrics.read(catalogue.BUILD, lambda: {SERVER_VERSION: 1.0})
    metrics.read(
        catalogue.CONNECTIONS,
        lambda: {
            "http": listeners.http.connections + connections("http"),
            "grpc": listeners.grpc.connections + connections("grpc"),
        },
    )
    metrics.read(catalogue.FRONTS, lambda: len(fronts.up) if fronts else 0)
    metrics.read(catalogue.FRONT_RESTARTS, lambda: fronts.restarts if fronts else 0)
    metrics.read(catalogue.FRONT_CPU, lambda: of_fronts(catalogue.FRONT_CPU))
    metrics.read(catalogue.FRONT_MEMORY, lambda: fronts.resident_bytes if fronts else 0)
    metrics.read(catalogue.BUFFERS, lambda: server.budget.used)
    limiters = {"clients": server.limiter, "probes": server.probes.limiter}
    metrics.read(catalogue.CONNECTIONS_LIMIT, lambda: {port: float(each.limit) for port, each in limiters.items()})
    metrics.read(
        catalogue.CONNECTIONS_REFUSED,
        lambda: {(port, "full"): float(each.refused) for port, each in limiters.items()},
    )
    metrics.read(
        catalogue.CONNECTIONS_DISPLACED, lambda: {port: float(each.displaced) for port, each in limiters.items()}
    )


def _policy(settings: Settings, repository: Repository) -> Policy:
    specs = [model.spec() for model in repository.models]
    return Policy(
        settings.max_batch_tokens,
        batch_invariant=[spec.batch_invariant for spec in specs],
        narrow=[spec.narrow for spec in specs],
        group_tokens=GROUP_TOKENS,
        prefetch_tokens=PREFETCH_TOKENS,
    )


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
    opening = start(_open(server))
    server.recent.start()
    lifecycle.to(State.WARMING)
    server.slot.start()
    background = [start(kept(work)) for work in (server.listeners.files.run, give_back_free_memory)]

    signalled, failure = asyncio.create_task(signals.get()), asyncio.create_task(failed.wait())
    await asyncio.wait({signalled, failure}, return_when=asyncio.FIRST_COMPLETED)
    failure.cancel()
    if signalled.done():
        await _drain(server, signals, opening, lame_duck=signalled.result() is signal.SIGTERM)
    else:
        signalled.cancel()
        await _end_requests(server, opening, 0)

    await _close(server, background)
    if lifecycle.state is State.FAILED:
        raise StartupError(lifecycle.failure)
    lifecycle.to(State.STOPPED)
    return 0


async def _open(server: Server) -> None:
    """Accepts connections, which wait in the backlog until the fronts can take them."""
    if server.fronts:
        await server.fronts.start()
        await server.fronts.come_up()
    await server.listeners.start()


async def _close(server: Server, background: Sequence[asyncio.Task[None]]) -> None:
    """Ends everything that runs, after the last request."""
    for task in background:
        task.cancel()
    await asyncio.gather(server.versions.close(), server.slot.close(), *background, return_exceptions=True)
    if server.fronts:
        await server.fronts.close()
    if server.listeners.span_sender:
        await asyncio.to_thread(server.listeners.span_sender.close, TRACES_GRACE_S)
    server.probes.close()
    server.recent.close()


async def _drain(
    server: Server, signals: asyncio.Queue[signal.Signals], opening: asyncio.Task[None], *, lame_duck: bool
) -> None:
    """Drains: not ready at once, then the lame-duck time, then the drain. A second signal skips the lame-duck time."""
    was_ready = server.lifecycle.ready
    server.lifecycle.to(State.DRAINING)
    requests = server.dispatcher.requests
    log.info("draining: %d requests in flight", requests, extra=members(state=State.DRAINING, requests=requests))
    # A server that was not ready gets no traffic, so it needs no lame-duck time.
    if lame_duck and was_ready and server.settings.lame_duck_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.get(), server.settings.lame_duck_s)
    await _end_requests(server, opening, server.settings.drain_s)


async def _end_requests(server: Server, opening: asyncio.Task[None], limit_s: float) -> None:
    """Closes the ports, answers requests in flight or in transit, and rejects the rest after `limit_s`."""
    server.versions.stop()
    if not opening.done():  # the fronts are not up: this process answers those that wait in the backlog
        opening.cancel()
        await server.listeners.start()
    ends = [server.listeners.end(limit_s, server.dispatcher.fail_all)]
    if server.fronts:
        server.listeners.close()  # now, so that the fronts have all connections before they end
        ends.append(server.fronts.end(limit_s))
    await asyncio.gather(*ends)
