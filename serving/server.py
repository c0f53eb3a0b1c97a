"""The server process: assembly (`build`), and its life from start to shutdown (`serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import uvloop

from bertserve.serving.errors import StartupError
from bertserve.serving.fronts.calls import Calls
from bertserve.serving.fronts.pool import FrontPool
from bertserve.serving.fronts.slots import SharedSlots, automatic
from bertserve.serving.host import available_cpus
from bertserve.serving.http.apis import operations
from bertserve.serving.http.app import App
from bertserve.serving.http.hosts import is_loopback
from bertserve.serving.inference.answer_cache import AnswerCache
from bertserve.serving.inference.dispatcher import Dispatcher
from bertserve.serving.inference.pipeline import Pipeline
from bertserve.serving.lifecycle import TRACES_GRACE_S, Lifecycle, State, freeze
from bertserve.serving.listeners import Api, Backend, Listeners, Transport
from bertserve.serving.logs import log_fields, members
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
from bertserve.serving.unawaited import keep_running, log_loop_error, start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.logs import LogWriter
    from bertserve.serving.net.ports import Ports
    from bertserve.serving.rollout.engine_choice import Choice, Chooser
    from bertserve.serving.settings import Settings

log = logging.getLogger("bertserve")

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class Core:
    """The models and what runs them, behind all ports and fronts."""

    backend: Backend
    dispatcher: Dispatcher
    slot: EngineSlot
    versions: Versions
    fronts: FrontPool
    limiter: ConnectionLimiter
    budget: BufferBudget
    recent: Recent

    @classmethod
    def of(cls, settings: Settings, choice: Choice, chooser: Chooser, host: str, log_writer: LogWriter) -> Core:
        """`host` is the address of the HTTP port."""
        repository, lifecycle, metrics = choice.repository, Lifecycle(), Metrics()
        lifecycle.subscribe(metrics.state)
        lifecycle.subscribe(lambda state: log_fields(log.info, "state: %s", state=state))
        metrics.read(catalogue.BUILD, lambda: {SERVER_VERSION: 1.0})
        metrics.follow_models(repository)

        loads = LoadBuilder(settings, chooser)
        prepared = loads.prepare(choice)
        load = prepared.load
        limiter = ConnectionLimiter.of(settings, max(load.threads, 2 * len(load.gpus)))
        dispatcher, cache = _dispatcher(settings, repository, metrics), _cache(settings, repository, metrics)
        pipeline = Pipeline(
            settings=settings, repository=repository, lifecycle=lifecycle, dispatcher=dispatcher, cache=cache
        )

        processes = settings.front_processes or automatic(load, available_cpus())
        slots = SharedSlots.create(1 + processes if processes > 1 else 1)
        budget = BufferBudget.of(settings, slots.values if processes > 1 else None)
        metrics.read(catalogue.BUFFERS, lambda: budget.used)
        fronts = FrontPool(
            *(settings, slots),
            repository=repository,
            lifecycle=lifecycle,
            dispatcher=dispatcher,
            cache=cache,
            metrics=metrics,
            limiter=limiter,
            host=host,
        )

        slot = EngineSlot(
            *(prepared, loads, settings),
            dispatcher=dispatcher,
            lifecycle=lifecycle,
            users=lambda model: pipeline.users(model) + fronts.uses(model),
            died=metrics.engine_died,
        )
        metrics.follow_engine(lambda: slot.engine, repository)
        slot.subscribe(lambda _: freeze())
        versions = Versions(settings, repository, slot, chooser)
        metrics.read(catalogue.SWAPS, lambda: versions.outcomes)
        backend = Backend(settings, repository, lifecycle, pipeline, versions, metrics, log_writer)
        return cls(backend, dispatcher, slot, versions, fronts, limiter, budget, Recent(metrics))

    def status(self) -> Status:
        backend = self.backend
        parts = (self.dispatcher, backend.metrics, self.recent, self.slot, self.versions, self.fronts.report)
        return Status(backend.repository, backend.lifecycle, *parts)


@dataclass(frozen=True, slots=True)
class Server:
    core: Core
    listeners: Listeners
    probes: ProbeListener

    @classmethod
    def of(cls, core: Core, api: Api, ports: Ports, host: str) -> Server:
        settings, metrics, fronts = core.backend.settings, core.backend.metrics, core.fronts
        transport = Transport(ports.http, ports.grpc, host, core.limiter, core.budget, fronts.place)
        listeners = Listeners.of(api, transport)
        http, grpc = listeners.http, listeners.grpc
        app = App(replace(api.context, keys=None, observer=None), [operations.router], documented=False)
        probes = ProbeListener(app, grpc.health.methods(), ports.metrics, settings)
        metrics.read(
            catalogue.CONNECTIONS,
            lambda: {
                "http": http.connections + fronts.connections("http"),
                "grpc": grpc.connections + fronts.connections("grpc"),
            },
        )
        limiters = {"clients": core.limiter, "probes": probes.limiter}
        metrics.read(catalogue.CONNECTIONS_LIMIT, lambda: {port: each.limit for port, each in limiters.items()})
        metrics.read(
            catalogue.CONNECTIONS_REFUSED, lambda: {(port, "full"): each.refused for port, each in limiters.items()}
        )
        metrics.read(catalogue.CONNECTIONS_DISPLACED, lambda: {port: each.displaced for port, each in limiters.items()})
        return cls(core, listeners, probes)

    @property
    def lifecycle(self) -> Lifecycle:
        return self.core.backend.lifecycle


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
    host = ports.http.getsockname()[0]
    core = Core.of(settings, choice, chooser, host, log_writer)
    if not (settings.api_keys_file or settings.tls_client_ca_file or is_loopback(host)):
        log.warning(
            "--host %s without --api-keys-file: anyone who can reach the HTTP or gRPC port can use the models",
            settings.host,
        )
    api = Api.of(core.backend, core.status().report, core.fronts.gather)
    server = Server.of(core, api, ports, host)
    http, grpc, probes = server.listeners.http, server.listeners.grpc, server.probes
    announcement = Announcement(
        *(settings, core.backend.repository, core.backend.lifecycle),
        lambda: Addresses(http.address, grpc.address, probes.address),
        log_writer.say,
    )
    core.slot.subscribe(announcement.engine_up)
    return server


def _dispatcher(settings: Settings, repository: Repository, metrics: Metrics) -> Dispatcher:
    specs = [model.spec() for model in repository.models]
    policy = Policy(
        settings.max_batch_tokens,
        batch_invariant=[spec.batch_invariant for spec in specs],
        narrow=[spec.narrow for spec in specs],
        group_tokens=GROUP_TOKENS,
        prefetch_tokens=PREFETCH_TOKENS,
    )
    limits = AdmissionLimits(settings.max_queue_tokens, settings.default_timeout_ms, settings.max_timeout_ms)
    dispatcher = Dispatcher(policy, limits, metrics)
    metrics.follow(dispatcher)
    return dispatcher


def _cache(settings: Settings, repository: Repository, metrics: Metrics) -> AnswerCache | None:
    cache = AnswerCache(settings.response_cache_mb << 20) if settings.response_cache_mb else None
    if cache is not None:
        repository.subscribe(cache.clear)
    metrics.read(catalogue.CACHE_TEXTS, lambda: cache.texts if cache else dict.fromkeys(("hit", "shared", "miss"), 0))
    return cache


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
    server.core.recent.start()
    lifecycle.to(State.WARMING)
    server.core.slot.start()
    background = [start(keep_running(work)) for work in (server.listeners.api.files.run, give_back_free_memory)]

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
    fronts, api, grpc = server.core.fronts, server.listeners.api, server.listeners.grpc
    fronts.start(Calls(api.app, grpc.methods, fronts).answer, grpc.debts)
    await fronts.come_up()
    await server.listeners.start()


async def _close(server: Server, background: Sequence[asyncio.Task[None]]) -> None:
    """Ends everything that runs, after the last request."""
    for task in background:
        task.cancel()
    core = server.core
    await asyncio.gather(core.versions.close(), core.slot.close(), *background, return_exceptions=True)
    await core.fronts.close()
    if span_sender := server.listeners.api.span_sender:
        await asyncio.to_thread(span_sender.close, TRACES_GRACE_S)
    server.probes.close()
    core.recent.close()


async def _drain(
    server: Server, signals: asyncio.Queue[signal.Signals], opening: asyncio.Task[None], *, lame_duck: bool
) -> None:
    """Drains: not ready at once, then the lame-duck time, then the drain. A second signal skips the lame-duck time."""
    was_ready = server.lifecycle.ready
    server.lifecycle.to(State.DRAINING)
    requests, settings = server.core.dispatcher.requests, server.core.backend.settings
    log.info("draining: %d requests in flight", requests, extra=members(state=State.DRAINING, requests=requests))
    # A server that was not ready gets no traffic, so it needs no lame-duck time.
    if lame_duck and was_ready and settings.lame_duck_s:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.get(), settings.lame_duck_s)
    await _end_requests(server, opening, settings.drain_s)


async def _end_requests(server: Server, opening: asyncio.Task[None], limit_s: float) -> None:
    """Closes the ports, answers requests in flight or in transit, and rejects the rest after `limit_s`."""
    core = server.core
    core.versions.stop()
    if not opening.done():  # the fronts are not up: this process answers those that wait in the backlog
        opening.cancel()
        await server.listeners.start()
    ends = [server.listeners.end(limit_s, core.dispatcher.fail_all)]
    if core.fronts.processes:
        server.listeners.close()  # now, so that the fronts have all connections before they end
        ends.append(core.fronts.end(limit_s))
    await asyncio.gather(*ends)
