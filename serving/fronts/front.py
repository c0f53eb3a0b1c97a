"""The front process: its assembly and its life; see `serving.fronts`.

It is a server without an engine: the pipeline runs its texts in the core process. It ends with the core.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import uvloop

from bertserve.serving import logs
from bertserve.serving.engine.children import end_with_parent
from bertserve.serving.errors import BundleError, CredentialsError, StartupError
from bertserve.serving.fronts.remote import CoreLink, ModelMoved
from bertserve.serving.fronts.slots import SharedSlots
from bertserve.serving.fronts.wire import FrontCounts, Kind, Models, Passed, Setup, StateNow
from bertserve.serving.inference.pipeline import Pipeline
from bertserve.serving.inference.served_models import Repository, ServedModel
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.lifecycle import TRACES_GRACE_S, Lifecycle, collect_rarely, freeze
from bertserve.serving.listeners import Api, Backend, Listeners, Transport
from bertserve.serving.models.artifact_selection import ServableArtifact
from bertserve.serving.models.bundle import Bundle
from bertserve.serving.models.manifest import TOKENIZER
from bertserve.serving.net.buffers import BufferBudget, give_back_free_memory
from bertserve.serving.net.connection_limiter import ConnectionLimiter
from bertserve.serving.records import ModelIndex
from bertserve.serving.settings import Settings
from bertserve.serving.telemetry import catalogue
from bertserve.serving.telemetry.metrics import Metrics
from bertserve.serving.unawaited import keep_running, log_loop_error, start

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from bertserve.serving.fronts.wire import MirroredModel
    from bertserve.serving.inference.requests import InferRequest, Outcome
    from bertserve.serving.logs import LogWriter
    from bertserve.serving.models.statistics import VersionState
    from bertserve.serving.net.connection_limiter import Closable
    from bertserve.serving.tasks.base import A

log = logging.getLogger("bertserve.fronts")

_COUNT_S = 0.25
"""Seconds between reports of counts. A front that is killed loses those since the last one."""

_POLL_S = 0.02
_MAX_IDLE = 64
"""Idle connections that a front reports, the longest idle first."""

_PASSED_BYTES = 256


class _Elsewhere:
    """The versions of the models, which only the core process controls."""

    async def load(self, name: str, version: int | None = None) -> None:
        raise NotImplementedError

    def unload(self, name: str) -> None:
        raise NotImplementedError

    def others(self) -> Sequence[VersionState]:
        raise NotImplementedError


class FrontPipeline(Pipeline):
    """Begins a request again if another version of its model has begun to serve.

    Attributes:
        followed: Set while the front serves what the core has told last.
    """

    def __init__(self, **parts: Any) -> None:  # noqa: ANN401  those of `Pipeline`
        super().__init__(**parts)
        self.followed = asyncio.Event()
        self.followed.set()

    async def infer(self, request: InferRequest[A]) -> Outcome[A]:
        while True:
            try:
                return await super().infer(request)
            except ModelMoved:
                await self.followed.wait()


class Front:
    """Everything of a front that lives as long as it does."""

    def __init__(
        self,
        link: CoreLink,
        passing: socket.socket,
        slots: SharedSlots,
        setup: Setup,
        settings: Settings,
        log_writer: LogWriter,
    ) -> None:
        self._link = link
        self._passing = passing
        self._log = log_writer
        self._metrics = Metrics()
        self._lifecycle = Lifecycle()
        self._tokenizers: dict[tuple[Hashable, ...], TextTokenizer] = {}
        self._repository = Repository(self._opened(setup.models), settings.defaults())
        self._serve(setup.models, self._repository.models)
        self._used = set(self._tokenizers)
        self._limiter = ConnectionLimiter(sys.maxsize)
        self._numbers: dict[int, int] = {}
        self._told_idle: dict[int, Closable] = {}
        self._metrics.total(catalogue.FRONT_CPU, _cpu_s)
        self._pipeline = FrontPipeline(
            settings=settings,
            repository=self._repository,
            lifecycle=self._lifecycle,
            dispatcher=link,
        )
        backend = Backend(
            *(settings, self._repository, self._lifecycle, self._pipeline, _Elsewhere(), self._metrics, log_writer)
        )
        budget = BufferBudget.of(settings, slots.values, setup.slot)
        self._listeners = Listeners.of(
            Api.of(backend, dict, core=link), Transport(None, None, setup.host, self._limiter, budget)
        )
        self._lifecycle.mirror(setup.state.state, accepting=setup.state.accepting)
        debts = self._listeners.grpc.debts
        debts.subscribe(lambda peer, spent: link.tell(Kind.DEBT, (peer, spent)))
        self._ending: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._switching = asyncio.Lock()
        self._told = setup.models.revision
        handlers = {
            Kind.STATE: self._state_changed,
            Kind.MODELS: self._models_changed,
            Kind.COUNT: lambda payload: self._tell_counts(msgspec.json.decode(payload, type=int)),
            Kind.FIND_IDLE: lambda _: self._tell_idle(),
            Kind.CLOSE_IDLE: self._close_idle,
            Kind.DEBT: lambda payload: debts.add(*msgspec.json.decode(payload, type=tuple[str, float])),
            Kind.END: lambda payload: self._ending.set_result(msgspec.json.decode(payload, type=float)),
        }
        link.listen(handlers)

    async def run(self) -> None:
        await self._listeners.start()
        api = self._listeners.api
        background = [start(keep_running(work)) for work in (api.files.run, give_back_free_memory, self._report)]
        freeze()
        self._passing.setblocking(False)
        asyncio.get_running_loop().add_reader(self._passing, self._take)
        self._link.tell(Kind.UP)
        limit_s = await self._ending
        self._take()
        await self._listeners.end(limit_s, self._link.fail_all)
        for task in background:
            task.cancel()
        if api.span_sender:
            await asyncio.to_thread(api.span_sender.close, TRACES_GRACE_S)
        self._tell_counts()
        self._log.flush()

    # Connections.

    def _take(self) -> None:
        """Adopts the connections that the core has passed."""
        while True:
            try:
                message, descriptors, *_ = socket.recv_fds(self._passing, _PASSED_BYTES, 1)
            except BlockingIOError:
                return
            if not message:  # the core has ended
                return
            passed = msgspec.json.decode(message, type=Passed)
            if not descriptors:  # the kernel has closed the connection: this process may open no more files
                log.error("cannot take a connection: %s", os.strerror(errno.EMFILE))
                self._link.tell(Kind.CLOSED, passed.number)
                continue
            (descriptor,) = descriptors
            self._numbers[descriptor] = passed.number
            listener = self._listeners.http if passed.port == "http" else self._listeners.grpc
            listener.adopt(socket.socket(fileno=descriptor), partial(self._closed, descriptor))

    def _closed(self, descriptor: int) -> None:
        self._link.tell(Kind.CLOSED, self._numbers.pop(descriptor))

    def _tell_idle(self) -> None:
        found = self._limiter.idle()[:_MAX_IDLE]
        self._told_idle = {self._numbers[one.descriptor]: one for _, one in found}
        self._link.tell(Kind.IDLE, {self._numbers[one.descriptor]: since for since, one in found})

    def _close_idle(self, payload: bytes) -> None:
        number, since = msgspec.json.decode(payload, type=tuple[int, tuple[bool, float]])
        connection = self._told_idle.pop(number, None)
        if connection is not None and connection.idle_since() == since:
            connection.close_if_idle()

    # What the core tells.

    def _state_changed(self, payload: bytes) -> None:
        now = msgspec.json.decode(payload, type=StateNow)
        self._lifecycle.mirror(now.state, accepting=now.accepting)

    def _models_changed(self, payload: bytes) -> None:
        self._pipeline.followed.clear()
        models = msgspec.json.decode(payload, type=Models)
        self._told = models.revision
        start(self._switch(models), partial(_end, [self._log], 1))  # the core starts another process

    async def _switch(self, models: Models) -> None:
        """Serves other models, and waits until no request uses the old ones."""
        async with self._switching:
            opened = await asyncio.to_thread(self._opened, models)
            old = {model.index for model in self._repository.models} - {model.index for model in opened}
            self._serve(models, opened)
            if models.revision == self._told:
                self._pipeline.followed.set()
            self._link.tell(Kind.FOLLOWED, models.revision)
            while any(map(self._pipeline.users, old)):  # noqa: ASYNC110  an event would cost every request
                await asyncio.sleep(_POLL_S)
            self._link.tell(Kind.LEFT, models.revision)
            used = {model.manifest.reading for model in models.models}
            if used != self._used:  # those before stay: the core may go back to them
                self._tokenizers = {key: self._tokenizers[key] for key in used | self._used}
                self._used = used

    def _serve(self, models: Models, opened: list[ServedModel]) -> None:
        served = [model.manifest.model for model in models.models if model.served]
        self._repository.mirror(opened, served, models.engine)

    def _opened(self, models: Models) -> list[ServedModel]:
        return [self._open(model) for model in models.models]

    def _open(self, model: MirroredModel) -> ServedModel:
        """A model with its tokenizer, which models that read texts alike share."""
        bundle = Bundle(Path(model.path), model.manifest, model.sha256)
        key = model.manifest.reading
        if key not in self._tokenizers:
            bundle.verify(TOKENIZER)
            self._tokenizers[key] = TextTokenizer.open(bundle.path, model.manifest)
        servable = ServableArtifact(bundle=bundle, artifact=model.artifact, second=model.second)
        return ServedModel.of(servable, ModelIndex(model.index), self._tokenizers[key])

    # Counts.

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_COUNT_S)
            self._tell_counts()

    def _tell_counts(self, number: int = 0) -> None:
        self._link.tell(Kind.COUNTS, FrontCounts(number, self._metrics.take()))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _end(started: Sequence[LogWriter], status: int) -> NoReturn:
    for log_writer in started:
        log_writer.flush()
    os._exit(status)


async def _main(core: socket.socket, passing: socket.socket, slots: SharedSlots) -> None:
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    started: list[LogWriter] = []
    link = CoreLink(lambda: _end(started, 0))
    core.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=core)
    setup = msgspec.json.decode(await link.setup, type=Setup)
    log_writer = logs.start(setup.log_format, setup.log_level)
    started.append(log_writer)
    try:
        settings = Settings.restored(setup.settings)
        front = Front(link, passing, slots, setup, settings, log_writer)
    except (StartupError, CredentialsError, BundleError, OSError) as error:
        log.error("a front process cannot start: %s", error)  # noqa: TRY400  our sentence says it all
        _end(started, 1)
    await front.run()


def main(core: int, passing: int, slots: int) -> None:
    """Serves until the core ends it. The arguments are descriptors, the last one of `SharedSlots`."""
    end_with_parent()
    collect_rarely()
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the core decides when a front ends
        signal.signal(ignored, signal.SIG_IGN)
    sockets = socket.socket(fileno=core), socket.socket(fileno=passing)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(*sockets, SharedSlots(slots)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
