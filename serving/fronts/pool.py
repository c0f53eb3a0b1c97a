"""The front processes of a server: their starts and ends, and what they are told and asked.

The core accepts connections and passes each one to the front with the fewest. It limits them, because it counts those
of all fronts. While no front is up, the core serves connections itself, as a server without fronts does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.engine.children import module_command
from bertserve.serving.fronts.core import FrontLink
from bertserve.serving.fronts.wire import (
    FrontCounts,
    Kind,
    MirroredModel,
    Models,
    Passed,
    Setup,
    StateNow,
)
from bertserve.serving.host import resident_bytes
from bertserve.serving.lifecycle import REPLY_GRACE_S, TRACES_GRACE_S
from bertserve.serving.logs import log_fields
from bertserve.serving.telemetry import catalogue
from bertserve.serving.unawaited import start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.fronts.core import Call
    from bertserve.serving.fronts.slots import SharedSlots
    from bertserve.serving.inference.answer_cache import AnswerCache
    from bertserve.serving.inference.dispatcher import Dispatcher
    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.lifecycle import Lifecycle
    from bertserve.serving.net.connection_limiter import ConnectionLimiter, PeerDebts
    from bertserve.serving.records import ModelIndex, TensorSpec
    from bertserve.serving.settings import Settings
    from bertserve.serving.telemetry.metrics import Metrics

log = logging.getLogger("bertserve.fronts")

_COUNT_S = 0.5
"""Seconds in which a front must answer a question; a scrape waits no longer for one that is busy."""

_FOLLOW_S = 10.0
"""Seconds for which a change of the models waits for fronts that open tokenizers."""

_WATCH_S = 0.25
_SILENT_S, _HANG_S = 2.0, 15.0
"""A front that has been silent for so long gets no connections if another can take them, or is killed."""

_UP_S = 60.0
"""Seconds after which a front that is not up is killed: while it hangs, no engine can be replaced."""

_START_S = 20.0
"""Seconds for which the ports wait for the fronts; then the core serves until they are up."""

_CRASHES, _CRASH_AGE_S = 3, 10.0
_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0
"""After more ends in succession, each of a front that was up for less, there is a pause, which doubles each time."""

_CLOSE_TO_LIMIT = 0.9
"""From this share of the connection limit on, fronts are asked for idle connections."""


class PassedConnection:
    """A connection that a front holds; see `Closable`.

    Attributes:
        idle: What `idle_since` returns.
        release: Releases its slot.
    """

    __slots__ = ("front", "idle", "number", "port", "release")

    descriptor = -1
    """The core holds none."""

    def __init__(self, front: FrontProcess, port: str, number: int, release: Callable[[], None]) -> None:
        self.front = front
        self.port = port
        self.number = number
        self.release = release
        self.idle: tuple[bool, float] | None = None

    def idle_since(self) -> tuple[bool, float] | None:
        """As the front reported it."""
        return self.idle

    def close_if_idle(self) -> None:
        self.front.link.tell(Kind.CLOSE_IDLE, (self.number, self.idle))
        self.idle = None


class FrontProcess:
    """One front process, as the core sees it.

    Attributes:
        up: Whether it takes connections.
        up_at: When it began to; infinity before.
        connections: Its open connections, by number.
        followed: The last revision of the models that it has switched to.
        left: The last revision before which no request of it uses a model.
        silent_s: Seconds since its start or its last report, which it sends every quarter of a second once it is up.
            Time in which this process stood still does not count: reports of it are not read yet.
    """

    def __init__(self, pool: FrontPool, slot: int) -> None:
        self._pool = pool
        self.slot = slot
        self.up, self.up_at = False, math.inf
        self.connections: dict[int, PassedConnection] = {}
        self.silent_s = 0.0
        self.counting: dict[int, asyncio.Future[None]] = {}
        self.ended = asyncio.Event()

    async def start(self, call: Call, debts: PeerDebts) -> None:
        """Starts the process; raises OSError if the machine is short of a resource. Arguments as of the pool's."""
        with contextlib.ExitStack() as ends, contextlib.ExitStack() as unused:
            ours, theirs = socket.socketpair()
            self._passing, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (theirs, passed):
                ends.enter_context(end)
            for end in (ours, self._passing):
                unused.enter_context(end)
                end.setblocking(False)
            descriptors = [theirs.fileno(), passed.fileno(), self._pool.slots.descriptor]
            self.process = subprocess.Popen(  # noqa: ASYNC220  fork and exec take a millisecond
                module_command("bertserve.serving.fronts.front", *map(str, descriptors)),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
            )
            unused.pop_all()
        on: dict[Kind, Callable[[bytes], None]] = {
            Kind.UP: self._is_up,
            Kind.COUNTS: self._counted,
            Kind.CLOSED: self._closed,
            Kind.IDLE: self._found_idle,
            Kind.FOLLOWED: self._followed,
            Kind.LEFT: self._left,
            Kind.DEBT: partial(self._pool.charge, debts, self),
        }
        _, self.link = await asyncio.get_running_loop().create_connection(
            lambda: FrontLink(self._pool, call, on, self.ended.set), sock=ours
        )

    def set_up(self, setup: Setup) -> None:
        """Tells the process what it begins with; all later changes are told, too."""
        self.followed = self.left = setup.models.revision
        self.link.tell(Kind.SETUP, setup)

    def _is_up(self, _: bytes) -> None:
        self.up, self.up_at, self.silent_s = True, time.monotonic(), 0.0
        self._pool.changed()

    def kill(self, why: str) -> None:
        log.error("killing the front process %d: it %s", self.process.pid, why)
        self.process.kill()

    def _counted(self, payload: bytes) -> None:
        self.silent_s = 0.0
        found = msgspec.json.decode(payload, type=FrontCounts)
        self._pool.count(found)
        if (asked := self.counting.get(found.number)) is not None and not asked.done():
            asked.set_result(None)

    def _closed(self, payload: bytes) -> None:
        self.connections.pop(msgspec.json.decode(payload, type=int)).release()

    def _found_idle(self, payload: bytes) -> None:
        idle = msgspec.json.decode(payload, type=dict[int, tuple[bool, float]])
        for number, connection in self.connections.items():
            connection.idle = idle.get(number)

    def _followed(self, payload: bytes) -> None:
        self.followed = msgspec.json.decode(payload, type=int)
        self._pool.changed()

    def _left(self, payload: bytes) -> None:
        self.left = msgspec.json.decode(payload, type=int)

    def take(self, passed: Passed, opened: socket.socket) -> bool:
        """Passes a connection; False if the front has ended, or takes none now."""
        try:
            socket.send_fds(self._passing, [msgspec.json.encode(passed)], [opened.fileno()])
        except OSError:
            return False
        return True

    async def close(self) -> None:
        """Waits for the end of the process, releases its connections and closes its sockets."""
        self.up = False
        for connection in self.connections.values():
            connection.release()
        self.connections.clear()
        self._passing.close()
        self.process.kill()
        await asyncio.to_thread(self.process.wait)


class FrontPool:
    """The fronts of a server, if it has any; the `Core` of their links.

    Attributes:
        processes: Number of fronts; 0 if the core serves all connections itself.
        restarts: Fronts that were started again.
        revision: Number of changes of the models.
    """

    def __init__(
        self,
        settings: Settings,
        slots: SharedSlots,
        *,
        repository: Repository,
        lifecycle: Lifecycle,
        dispatcher: Dispatcher,
        cache: AnswerCache | None,
        metrics: Metrics,
        limiter: ConnectionLimiter,
        host: str,
    ) -> None:
        self._settings = settings
        self.processes = len(slots.values) - 1
        self._repository = repository
        self._lifecycle = lifecycle
        self.dispatcher = dispatcher
        self.cache = cache
        self._metrics = metrics
        self._limiter = limiter
        self.slots = slots
        self._host = host
        self._fronts: list[FrontProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = 0
        self._ending = False
        self._has_changed = asyncio.Event()
        self.revision = 0
        self._left_at: dict[ModelIndex, int] = {}
        self.outputs: dict[ModelIndex, Sequence[TensorSpec]] = {}
        self.padded: set[ModelIndex] = set()
        self.restarts = self._gathered = 0
        metrics.read(catalogue.FRONTS, lambda: len(self.up))
        metrics.read(catalogue.FRONT_RESTARTS, lambda: self.restarts)
        metrics.read(catalogue.FRONT_MEMORY, self._resident_bytes)
        metrics.total(catalogue.FRONT_CPU, lambda: 0.0)  # the fronts count
        limiter.follow(lambda: (one for front in self._fronts for one in front.connections.values()))
        repository.watch(self._models_changed)
        lifecycle.subscribe(lambda _: self._tell_all(Kind.STATE, self._state()))
        self._models_changed()

    def start(self, call: Call, debts: PeerDebts) -> None:
        """Starts the fronts: `call` answers their calls, and they share `debts` with this process's gRPC port."""
        debts.subscribe(lambda peer, spent: self._tell_all(Kind.DEBT, (peer, spent)))
        self._tasks = [start(self._keep(slot, call, debts)) for slot in range(1, self.processes + 1)]
        if self._tasks:
            self._tasks.append(start(self._watch()))

    async def come_up(self) -> None:
        """Waits until all fronts take connections, or one has failed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                while len(self.up) < self.processes and not self.restarts:
                    self._has_changed.clear()
                    await self._has_changed.wait()

    @property
    def up(self) -> list[FrontProcess]:
        return [front for front in self._fronts if front.up]

    def _resident_bytes(self) -> int:
        return sum(resident_bytes(front.process.pid) for front in self._fronts)

    def report(self) -> list[dict[str, int]] | None:
        """The fronts that are up; None for a server without fronts."""
        if not self.processes:
            return None
        return [{"pid": front.process.pid, "connections": len(front.connections)} for front in self.up]

    def connections(self, protocol: str) -> int:
        return sum(one.port == protocol for front in self._fronts for one in front.connections.values())

    async def _keep(self, slot: int, call: Call, debts: PeerDebts) -> None:
        """Runs the front of a slot, and starts it again when it ends."""
        crashes, pause_s = 0, _PAUSE_S
        while not self._ending:
            front = FrontProcess(self, slot)
            try:
                await front.start(call, debts)
            except OSError as error:
                log_fields(log.error, "cannot start a front process: %s", reason=error.strerror)
                await asyncio.sleep(_PAUSE_S)
                continue
            front.set_up(self._setup(slot))
            for debt in debts.present():
                front.link.tell(Kind.DEBT, debt)
            self._fronts.append(front)
            try:
                await front.ended.wait()
            finally:
                self._fronts.remove(front)
                await asyncio.shield(front.close())
                self.slots.values[slot] = 0
                self.changed()
            if self._ending:
                return
            self.restarts += 1
            message = "front process %d has ended with the status %d; starting another"
            log_fields(log.error, message, pid=front.process.pid, status=front.process.returncode)
            if time.monotonic() - front.up_at >= _CRASH_AGE_S:
                crashes, pause_s = 0, _PAUSE_S
            crashes += 1
            if crashes > _CRASHES:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _setup(self, slot: int) -> Setup:
        settings = self._settings.model_dump_json(exclude_none=True)
        form, level = self._settings.log_format, self._settings.log_level
        return Setup(settings, form, level, self._host, slot, self._models(), self._state())

    # Connections.

    def place(self, port: str, opened: socket.socket, release: Callable[[], None]) -> bool:
        """Passes an accepted connection to the front with the fewest; False if there is no front."""
        for front in sorted(self.up, key=lambda front: (front.silent_s > _SILENT_S, len(front.connections))):
            self._numbers += 1
            if front.take(Passed(port, self._numbers), opened):
                front.connections[self._numbers] = PassedConnection(front, port, self._numbers, release)
                opened.close()
                return True
        return False

    async def _watch(self) -> None:
        """Kills fronts that hang, and asks for idle connections near the limit, so that the limiter can close some."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for front in self._fronts:
                front.silent_s += _WATCH_S
                limit_s = _HANG_S if front.up else _UP_S
                if front.silent_s > limit_s:
                    front.kill(f"has been silent for {limit_s:g} s")
            if self._limiter.taken >= _CLOSE_TO_LIMIT * self._limiter.limit:
                self._tell_all(Kind.FIND_IDLE)

    def charge(self, debts: PeerDebts, source: FrontProcess, payload: bytes) -> None:
        """Adds a peer's debt here and to all other fronts."""
        debts.add(*msgspec.json.decode(payload, type=tuple[str, float]))
        for front in self._fronts:
            if front is not source:
                front.link.tell(Kind.DEBT, msgspec.Raw(payload))

    # Models and state.

    def _models_changed(self) -> None:
        self.revision += 1
        present = {model.index: model for model in self._repository.models}
        for index in self.outputs.keys() - present.keys():
            self._left_at.setdefault(index, self.revision)
        for index, model in present.items():
            self._left_at.pop(index, None)
            self.outputs[index] = model.manifest.outputs
            self.padded.discard(index)
            if any(spec.shape[1] < 0 for spec in model.manifest.outputs):
                self.padded.add(index)
        self._tell_all(Kind.MODELS, self._models())

    def _models(self) -> Models:
        models = [
            MirroredModel(
                model.index,
                str(model.bundle.path),
                model.bundle.sha256,
                model.manifest,
                model.artifact,
                model.second,
                self._repository.serves(model.name),
            )
            for model in self._repository.models
        ]
        return Models(self.revision, models, self._repository.engine)

    def _state(self) -> StateNow:
        return StateNow(self._lifecycle.state, self._lifecycle.accepting)

    def uses(self, model: ModelIndex) -> int:
        """Number of fronts that may have requests of a model that is not served any more."""
        left_at = self._left_at.get(model, 0)
        return sum(front.left < left_at for front in self._fronts)

    def is_present(self, model: ModelIndex) -> bool:
        return model in self.outputs and model not in self._left_at

    def changed(self) -> None:
        self._has_changed.set()

    async def follow(self) -> None:
        """Waits until all fronts serve the present models."""
        revision = self.revision
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FOLLOW_S):
                while any(front.followed < revision for front in self._fronts):
                    self._has_changed.clear()
                    await self._has_changed.wait()

    def _tell_all(self, kind: Kind, value: Any = None) -> None:  # noqa: ANN401  what msgspec writes
        for front in self._fronts:
            front.link.tell(kind, value)

    # Counts.

    def count(self, found: FrontCounts) -> None:
        self._metrics.add(found.counts)

    async def gather(self) -> None:
        """Adds what fronts have counted; a front that does not answer in time is left out."""
        self._gathered += 1
        number, fronts = self._gathered, self.up
        for front in fronts:
            front.counting[number] = asyncio.get_running_loop().create_future()
            front.link.tell(Kind.COUNT, number)
        if fronts:
            await asyncio.wait([front.counting[number] for front in fronts], timeout=_COUNT_S)
        for front in fronts:
            front.counting.pop(number).cancel()

    # The end.

    async def end(self, limit_s: float) -> None:
        """Lets all fronts answer what they have begun, for `limit_s`, and end; `close` kills one that hangs."""
        self._ending = True
        for front in self._fronts:
            if not front.up:  # it has nothing to answer, and nobody watches it
                front.process.kill()
        self._tell_all(Kind.END, limit_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s + REPLY_GRACE_S + TRACES_GRACE_S):
                await asyncio.gather(*[front.ended.wait() for front in self._fronts])

    async def close(self) -> None:
        self._ending = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
