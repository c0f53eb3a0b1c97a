"""The server process: everything wired together, and the way it starts, fails and ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from serving.engine.process.fleet import start_engine
from serving.engine.process.supervisor import EngineFailed, Supervisor
from serving.engine.process.wire import Load
from serving.errors import EngineLost, NotReady, StartupError
from serving.grpc.server import GrpcListener
from serving.host import available_cpus
from serving.http.apis import (
    cohere,
    console,
    huggingface,
    oip,
    oip_models,
    openai,
    operations,
    tei,
    tei_text,
    tei_tokens,
)
from serving.http.cors import Cors, CorsRoutes
from serving.http.documentation import docs_operations, document
from serving.http.listener import HttpListener
from serving.http.routing import Routes
from serving.inference.dispatcher import Dispatcher
from serving.inference.pipeline import Pipeline
from serving.lifecycle import REPLY_GRACE_S, TRACES_GRACE_S, Lifecycle, State
from serving.logs import fields
from serving.models.cost_cache import CostCache
from serving.models.forms import choose
from serving.models.kernel_cache import KernelCache
from serving.net.observer import RequestObserver
from serving.oip.service import SERVER_VERSION, V2Service
from serving.operations.probe_port import ProbeListener
from serving.operations.status import Status
from serving.rollout.activation import place
from serving.rollout.engine_build import EngineBuilder
from serving.rollout.engine_choice import BUILT, too_full
from serving.rollout.engine_swap import Exchange
from serving.rollout.repository_watch import RepositoryWatch
from serving.rollout.retries import Retries
from serving.rollout.upgrade import Upgrade
from serving.rollout.versions import Versions
from serving.scheduling.batcher import GROUP_TOKENS, PREFETCH_TOKENS, Policy
from serving.scheduling.fifo import FifoScheduler
from serving.scheduling.scheduler import Scheduler
from serving.security.keys import ApiKeys
from serving.security.tls import LEAST_GOODBYE_S, Tls
from serving.security.watch import FileWatch
from serving.telemetry import catalogue
from serving.telemetry.gpus import GpuWatch
from serving.telemetry.metrics import CONTENT_TYPE, Metrics
from serving.telemetry.recent import Recent
from serving.telemetry.requests import Refusals, write_access_line
from serving.telemetry.tracing import Sampler, SpanCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from serving.engine.process.supervisor import EngineLife
    from serving.logs import LogWriter
    from serving.models.bundle import Bundle
    from serving.models.manifest import Artifact, Task
    from serving.net.ports import Ports
    from serving.records import UsedCard
    from serving.rollout.engine_choice import Choice, Chooser
    from serving.settings import Settings
    from serving.telemetry.otlp import Exporter

log = logging.getLogger("bertserve")

_GC_ALLOCATIONS = 20_000

_EXAMPLES: Mapping[Task, tuple[str, str]] = {
    "embed": ("/embed", '{"inputs": "What is a T4?"}'),
    "embed_tokens": ("/embed_all", '{"inputs": "What is a T4?"}'),
    "classify": ("/predict", '{"inputs": "What a card!"}'),
    "rerank": ("/rerank", '{"query": "What is a T4?", "texts": ["A graphics card.", "A teapot."]}'),
    "answer": ("/answer", '{"inputs": {"question": "What is a T4?", "context": "A T4 is a graphics card."}}'),
    "tag": ("/tag", '{"inputs": "The T4 was made in Santa Clara."}'),
    "fill_mask": ("/fill-mask", '{"inputs": "A T4 is a graphics [MASK]."}'),
}
"""A request for each task that an operator can try at once."""


def run(settings: Settings, choice: Choice, chooser: Chooser, ports: Ports, log_writer: LogWriter) -> int:
    """Serves until a signal or a failure ends it; returns the exit code."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_main(settings, choice, chooser, ports, log_writer))


async def _main(settings: Settings, choice: Choice, chooser: Chooser, ports: Ports, log_writer: LogWriter) -> int:
    asyncio.get_running_loop().set_exception_handler(_on_loop_error)
    return await Server(settings, choice, chooser, ports, log_writer).serve()


def _on_loop_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs what nobody caught. The loop's own words repeat arguments, and so perhaps what a client sent."""
    log.error("an exception that nobody caught", exc_info=context.get("exception"))


class Server:
    """The object graph of the server process; also the `Slot` that hears of its engine."""

    _gpus: GpuWatch | None = None

    def __init__(
        self, settings: Settings, choice: Choice, chooser: Chooser, ports: Ports, log_writer: LogWriter
    ) -> None:
        self._settings = settings
        self._log_writer = log_writer
        self._chooser = chooser
        self._repository = repository = choice.repository
        self._lifecycle = lifecycle = Lifecycle()
        self._metrics = metrics = Metrics()
        specs = [model.spec() for model in repository.models]
        policy = Policy(
            settings.max_batch_tokens,
            batch_invariant=[spec.batch_invariant for spec in specs],
            narrow=[spec.narrow for spec in specs],
            group_tokens=GROUP_TOKENS,
            prefetch_tokens=PREFETCH_TOKENS,
            min_batch_gain=settings.min_batch_gain,
            fairness=settings.fairness,
            max_queue_delay_s=settings.max_queue_delay_ms / 1e3,
        )
        scheduler = FifoScheduler if settings.scheduling == "fifo" else Scheduler
        spans = SpanCounts()
        self._exporter = exporter = _exporter(settings, spans)
        sinks = [write_access_line] if settings.access_log else []
        if exporter:
            sinks.append(Sampler(settings.trace_sample, exporter.keep).record)
        observer = RequestObserver(sinks) if sinks else None
        self._dispatcher = dispatcher = Dispatcher(policy, settings.max_queue_tokens, metrics, scheduler=scheduler)
        self._pipeline = pipeline = Pipeline(
            settings=settings,
            repository=repository,
            lifecycle=lifecycle,
            dispatcher=dispatcher,
            metrics=metrics,
        )
        self._costs, self._kernels = self._cost_cache(), KernelCache(settings.cache_dir)
        start = partial(
            start_engine, crash_limit=settings.engine_crash_limit, crash_window_s=settings.engine_crash_window_s
        )
        self._supervisor = Supervisor(
            self._load(choice, self._costs, self._kernels),
            self,
            crash_limit=settings.engine_crash_limit,
            crash_window_s=settings.engine_crash_window_s,
            hang_s=settings.engine_hang_s,
            start=start,
        )
        engines = Exchange(
            supervisor=self._supervisor,
            dispatcher=dispatcher,
            pipeline=pipeline,
            repository=repository,
            lifecycle=lifecycle,
            hang_s=settings.engine_hang_s,
            keep_s=settings.keep_version_s,
            start=start,
            check_room=self._check_room,
        )
        self._versions = Versions(
            settings.models,
            repository,
            engines,
            self._form_of,
            Retries(settings.watch_models_s) if settings.watch_models_s else None,
            settings.cache_dir,
        )
        self._upgrade = self._upgrading(engines)
        record_error = Refusals(metrics, log_writer.limit).refused
        self._recent = Recent(metrics)
        probes = operations.probes(lifecycle, metrics.render, CONTENT_TYPE, self._status().report)
        v2_service = V2Service(pipeline, repository, lifecycle, settings, self._versions)
        api = [
            *tei.operations(pipeline, repository, settings),
            *tei_tokens.operations(pipeline, repository, settings),
            *tei_text.operations(pipeline, repository, lifecycle, settings),
            *huggingface.operations(pipeline, repository, settings),
            *openai.operations(pipeline, repository, settings),
            *cohere.operations(pipeline, repository, settings),
            *oip.operations(v2_service, pipeline),
            *oip_models.operations(v2_service),
            *probes,
            *console.operations(),
        ]
        self._files = FileWatch()
        keys, tls = self._api_keys(settings), self._tls(settings)
        self._grpc = GrpcListener(
            ports.grpc,
            v2_service,
            pipeline,
            settings,
            record_error,
            keys=keys,
            tls=tls,
            observer=observer,
        )
        openapi, cors = document(api, SERVER_VERSION, keyed=keys is not None), Cors.of(settings)
        self._http = HttpListener(
            (CorsRoutes if cors else Routes)([*api, *docs_operations(openapi)]),
            ports.http,
            settings,
            closing=self._closing,
            record_error=record_error,
            keys=keys,
            tls=tls,
            cors=cors,
            observer=observer,
        )
        self._probes = ProbeListener(
            Routes([replace(op, open=op.open or op.path == "/metrics") for op in probes]),
            self._grpc.health.methods(),
            ports.metrics,
            settings,
            closing=self._closing,
            record_error=record_error,
            keys=keys,
        )
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._failed = asyncio.Event()
        lifecycle.subscribe(metrics.state)
        lifecycle.subscribe(self._on_state)
        metrics.follow(dispatcher)
        metrics.follow_engine(self._supervisor, repository)
        metrics.follow_swaps(self._versions.outcomes)
        metrics.follow_models(repository, lambda: v2_service.statistics(None).model_stats, dispatcher.waiting)
        metrics.read(catalogue.SPANS_EXPORTED, lambda: spans.exported)
        metrics.read(catalogue.SPANS_DROPPED, lambda: {(reason,): count for reason, count in spans.dropped.items()})
        metrics.read(catalogue.LOG_LOST, lambda: log_writer.lost)
        metrics.read(catalogue.LOG_HIDDEN, lambda: log_writer.limit.hidden)
        metrics.read(catalogue.BUILD, lambda: {(SERVER_VERSION,): 1.0})
        metrics.read(
            catalogue.CONNECTIONS, lambda: {("http",): self._http.connections, ("grpc",): self._grpc.connections}
        )

    def _status(self) -> Status:
        return Status(
            self._repository,
            self._lifecycle,
            self._dispatcher,
            self._metrics,
            self._recent,
            lambda: self._supervisor.ready,
            self._versions,
        )

    def _upgrading(self, engines: Exchange) -> Upgrade | None:
        """What changes over to an engine that is built meanwhile, where that is wanted."""
        settings = self._settings
        self._builder = EngineBuilder(settings.cache_dir) if settings.build_engine and settings.cache_dir else None
        if self._builder is None:
            return None
        return Upgrade(self._chooser, self._builder, engines, self._repository, self._beside)

    def _api_keys(self, settings: Settings) -> ApiKeys | None:
        if settings.api_keys_file is None:
            return None
        keys = ApiKeys(settings.api_keys_file)

        async def reload() -> None:
            keys.reload()
            self._grpc.keys_changed()

        self._files.add("API keys", [settings.api_keys_file], reload)
        return keys

    def _tls(self, settings: Settings) -> Tls | None:
        certificate, key = settings.tls_cert_file, settings.tls_key_file
        if certificate is None or key is None:
            return None
        goodbye_s = max(LEAST_GOODBYE_S, settings.body_timeout_s)
        tls = Tls(certificate, key, settings.tls_client_ca_file, settings.header_timeout_s, goodbye_s)
        self._files.add("certificates", tls.paths, self._renew)
        return tls

    async def _renew(self) -> None:
        await self._http.renew()
        await self._grpc.renew()

    async def serve(self) -> int:
        """Opens the ports, starts the engine, waits for the end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        await self._probes.start()
        await self._http.start()
        await self._grpc.start()
        self._recent.start()
        self._watch_cards(self._repository.engine.cards)
        self._lifecycle.to(State.WARMING)
        self._run_engine()
        watching = [asyncio.create_task(self._files.run())]
        if every_s := self._settings.watch_models_s:
            watching.append(asyncio.create_task(RepositoryWatch(self._settings.models, self._versions, every_s).run()))
        if self._upgrade:
            watching.append(asyncio.create_task(self._upgrade.run()))
        signalled = asyncio.create_task(self._signals.get())
        failed = asyncio.create_task(self._failed.wait())
        await asyncio.wait({signalled, failed}, return_when=asyncio.FIRST_COMPLETED)
        failed.cancel()
        if signalled.done():
            await self._drain(lame_duck=signalled.result() is signal.SIGTERM)
        else:
            signalled.cancel()
            await self._end(0)
        if self._builder:
            await asyncio.to_thread(self._builder.close)
        for task in (self._engine_task, *watching):
            task.cancel()
        await asyncio.gather(self._versions.close(), self._engine_task, *watching, return_exceptions=True)
        if self._exporter:
            await asyncio.to_thread(self._exporter.close, TRACES_GRACE_S)
        self._probes.close()
        self._recent.close()
        if self._lifecycle.state is State.FAILED:
            raise StartupError(self._lifecycle.failure)
        self._lifecycle.to(State.STOPPED)
        return 0

    def engine_up(self, engine: EngineLife) -> None:
        """A warm engine is there: take requests."""
        place(self._dispatcher, engine, self._repository.models)
        self._costs.write(self._repository.engine, self._repository.models, engine.costs)
        self._kernels.keep()
        # What lives now lives for ever, and requests leave no cycles behind: look seldom, and not at the old.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_ALLOCATIONS, 50, 100)
        self._repository.note_lost(engine.lost)
        if self._lifecycle.to(State.READY if self._repository.whole else State.DEGRADED):
            self._announce(engine)

    def device_lost(self) -> None:
        """One of several cards was given up: the others go on, and the state says it."""
        engine = self._supervisor.engine
        self._repository.note_lost(engine.lost if engine else ())
        if self._lifecycle.state is State.READY:
            self._lifecycle.to(State.DEGRADED)

    def _check_room(self, load: Load) -> None:
        """Looks before an engine comes up beside another: without memory it would take that one with it.

        Raises:
            EngineFailed: A card has too little.
        """
        if self._gpus is None:
            return
        size = sum(Path(model.path).stat().st_size for model in load.models)
        for card in self._chooser.cards:
            free = self._gpus.free_bytes(card.uuid)
            if card.ordinal in load.cards and free is not None and (problem := too_full(card, free, size)):
                raise EngineFailed(f"{problem} beside the engine that serves", passing=True)

    def _form_of(self, path: Path) -> tuple[Bundle, Artifact]:
        """A version that shall take the place of another, and the form of it for the engine that serves now."""
        settings, choice = self._settings, self._repository.engine
        if self._builder and choice.engine == BUILT and self._chooser.must_build(path):
            self._builder.build(path)
        return choose(
            path,
            settings.precision,
            engine=choice.engine,
            card=choice.cards[0].target if choice.cards else "",
            allow_unproven=settings.allow_unproven,
            cache=settings.cache_dir,
        )

    def _beside(self, choice: Choice) -> tuple[Load, Callable[[], None]]:
        """What the engine process of a choice is told that comes up beside another, and what is to do when it serves.

        What it costs is measured while it is paused now and then, and so not kept.
        """
        kernels = KernelCache(self._settings.cache_dir)
        self._watch_cards(choice.told().cards)

        def serves() -> None:
            choice.tell()
            kernels.keep()

        return self._load(choice, self._cost_cache(), kernels), serves

    def _cost_cache(self) -> CostCache:
        settings = self._settings
        threads = settings.threads or available_cpus()
        return CostCache(settings.cache_dir, threads=threads, max_batch_tokens=settings.max_batch_tokens)

    def _watch_cards(self, cards: Sequence[UsedCard]) -> None:
        """Shows what the cards in use tell, from the first time that there are any."""
        if self._gpus is None:
            self._gpus = GpuWatch.follow([card.uuid for card in cards], self._metrics.registry)

    def _load(self, choice: Choice, cost_cache: CostCache, kernels: KernelCache) -> Load:
        """What the engine process of a choice is told."""
        settings, models = self._settings, choice.repository.models
        return Load(
            engine=choice.engine,
            models=[model.spec() for model in models],
            threads=settings.threads or available_cpus(),
            nice=0 if choice.cards else settings.engine_nice,
            costs=cost_cache.read(choice.told(), models),
            fake_ms=settings.fake_ms,
            fake_faults=settings.faults(),
            max_batch_tokens=settings.max_batch_tokens,
            log_format=settings.log_format,
            cards=[card.ordinal for card in choice.cards],
            kernels=kernels.files(choice.engine, models),
        )

    def _run_engine(self) -> None:
        self._engine_task = asyncio.create_task(self._supervisor.run())
        self._engine_task.add_done_callback(self._supervisor_ended)

    def engine_down(self) -> None:
        """The engine died: whatever waits for it fails at once, and new requests are refused meanwhile.

        Where the version before is still there, that serves instead, and nothing new is refused.
        """
        self._metrics.engine_died()
        engine = self._repository.engine.engine
        if self._versions.fall_back():
            if engine != self._repository.engine.engine and self._upgrade:
                self._upgrade.note(engine, "its process ended soon after it had taken over")
            return
        self._lifecycle.to(State.WARMING)
        self._dispatcher.engine_down(EngineLost("the engine ended; try again", retry_after_s=1))

    def engine_failed(self, reason: str, *, crashed: bool = False, passing: bool = False) -> None:  # noqa: ARG002
        """No engine of this kind will come any more: another one takes its place, or this is the end."""
        served = self._repository.models
        choice = self._chooser.instead(self._repository.engine.engine, reason, served, crashed=crashed)
        if choice is not None:
            asyncio.get_running_loop().call_soon(self._fall_back, choice)
            return
        self._lifecycle.fail(reason)
        self._dispatcher.engine_down(EngineLost("the engine ended and does not start again"))
        self._failed.set()

    def _fall_back(self, choice: Choice) -> None:
        """Loads another engine in the place of one that is not there any more."""
        # A request that is being read knows its model by its index.
        places = {model.name: model.index for model in self._repository.models}
        self._repository.replace([replace(model, index=places[model.name]) for model in choice.repository.models])
        self._repository.engine = choice.repository.engine
        self._supervisor.load_instead(self._load(choice, self._costs, self._kernels))
        self._run_engine()

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        """Nobody looks after the engine any more; without this the server would wait for it for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the engine cannot be started", exc_info=error)
            self.engine_failed("the engine process cannot be started; the log has the details")

    def _announce(self, engine: EngineLife) -> None:
        secured = "s" if self._settings.tls_cert_file else ""
        http = f"http{secured}://{self._http.address[0]}:{self._http.address[1]}"
        names = ", ".join(
            f"{model.name} version {model.version} ({_form(model.artifact)})" for model in self._repository.models
        )
        path, body = _EXAMPLES[self._repository.models[0].manifest.task]
        key = "-H 'Authorization: Bearer KEY' " if self._settings.api_keys_file else ""
        threads = engine.ready.threads if engine.ready else 0
        grpc = "{}:{}{}".format(*self._grpc.address, "  (TLS)" if secured else "")
        metrics = "http://{}:{}/metrics".format(*self._probes.address)
        log.info(
            "%s: %s on %s",
            self._lifecycle.state,
            names,
            self._repository.engine.where(threads),
            extra=fields(http=http, grpc=grpc, metrics=metrics),
        )
        if self._settings.log_format == "text":
            self._log_writer.say(
                f"bertserve is ready: {names}\n"
                f"  HTTP     {http}  (docs at {http}/docs)\n"
                f"  gRPC     {grpc}\n"
                f"  metrics  {metrics}\n"
                f"Try:\n"
                f"  curl {http}{path} {key}-H 'Content-Type: application/json' -d '{body}'\n"
            )

    async def _drain(self, *, lame_duck: bool) -> None:
        """Not ready at once; then the lame duck, then the drain; a second signal skips the lame duck."""
        was_ready = self._lifecycle.ready
        self._lifecycle.to(State.DRAINING)
        if self._builder:
            self._builder.stop()
        log.info("draining: %d requests under way", self._dispatcher.requests)
        # Nobody sends traffic to a server that was not ready: there is nothing to wait for.
        if lame_duck and was_ready and self._settings.lame_duck_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signals.get(), self._settings.lame_duck_s)
        await self._end(self._settings.drain_s)

    async def _end(self, limit_s: float) -> None:
        """Takes nothing new, lets what is under way finish within the limit, refuses the rest."""
        self._lifecycle.end_lame_duck()
        self._http.close()
        closed = asyncio.gather(self._http.drained(), self._grpc.close(limit_s + REPLY_GRACE_S))
        try:
            await asyncio.wait_for(asyncio.shield(closed), limit_s)
        except TimeoutError:
            self._dispatcher.fail_all(NotReady("the server ends before this request could be answered"))
            await asyncio.wait({closed}, timeout=REPLY_GRACE_S)
            closed.cancel()
            await asyncio.gather(closed, return_exceptions=True)

    def _closing(self) -> bool:
        return not self._lifecycle.live or self._lifecycle.state is State.DRAINING

    def _on_state(self, state: State) -> None:
        log.info("state: %s", state)


def _exporter(settings: Settings, counts: SpanCounts) -> Exporter | None:
    """What sends traces; its library is there only where it is wanted."""
    if not settings.otlp_endpoint:
        return None
    try:
        from serving.telemetry.otlp import Exporter  # noqa: PLC0415  needs its library
    except ModuleNotFoundError:
        raise StartupError("--otlp-endpoint needs OpenTelemetry's messages: pip install bertserve[tracing]") from None
    return Exporter(settings.otlp_endpoint, SERVER_VERSION, counts)


def _form(artifact: Artifact) -> str:
    return artifact.precision if artifact.proven else f"{artifact.precision}, unproven"
