"""Keeps an engine alive: one that dies is started again at once.

An engine that died `crash_limit` times within `crash_window_s`, refuses to load, or is not warm in time, is given up.
What the machine lacks for a moment, such as descriptors, is waited for as long. The supervisor can be handed another
engine that somebody else has started.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

import msgspec

from serving.engine.process.remote_engine import EngineLife, RemoteEngine
from serving.errors import EngineFailed, EngineLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from serving.engine.base import EngineLoad

log = logging.getLogger("bertserve.engine")


START_LIMIT_S = 600.0
"""For the first engine, whatever has to be verified, compiled and measured."""

_RESTART_FACTOR, _MIN_RESTART_S = 10.0, 60.0
"""Another start takes about as long as the one before; so many times that counts as a hang, with this at least."""

_PAUSE_S = 1.0
"""Before another try where the machine lacks something."""

_LACKS = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS}


class EngineListener(Protocol):
    def engine_up(self, engine: EngineLife) -> None:
        """A warm engine takes batches now."""

    def engine_down(self) -> None:
        """The engine has gone and a new one is being started."""

    def engine_lost(self) -> None:
        """An engine process ended before it was ready; another one is started."""

    def device_lost(self) -> None:
        """One of several devices of the engine was given up."""

    def engine_failed(self, reason: str, *, crashed: bool = False, passing: bool = False) -> None:
        """The engine refused its load or `crashed` too often; it will not come back. `passing`: see `EngineFailed`."""


class Supervisor:
    """Keeps one engine process alive.

    Attributes:
        engine: None while there is none.
        restarts: How often a new process was started after the first.
        restart_s: How long the last start took where nothing had to be verified or measured; 0 before there was one.
    """

    def __init__(
        self,
        load: EngineLoad,
        listener: EngineListener,
        *,
        crash_limit: int = 3,
        crash_window_s: float = 60.0,
        hang_s: float = 2.0,
        start_limit_s: float = START_LIMIT_S,
        start: Callable[[EngineLoad, float], Awaitable[EngineLife]] = RemoteEngine.start,
    ) -> None:
        self.load = load
        self._hang_s = hang_s
        self._listener = listener
        self._start = start
        self._start_limit_s = start_limit_s
        self._lacks = ""
        self._changed = asyncio.Event()
        self._crash_limit = crash_limit
        self._crash_window_s = crash_window_s
        self._crashes: deque[float] = deque()
        self.engine: EngineLife | None = None
        self.restarts = 0
        self.restart_s = 0.0

    def set_load(self, load: EngineLoad) -> None:
        """Changes what is loaded from now on; earlier deaths are forgotten."""
        self.load = load
        self._crashes.clear()

    async def run(self) -> None:
        """Starts engines until cancelled or until they crash too often; reports to the listener."""
        loop, limit_s = asyncio.get_running_loop(), self._start_limit_s
        began = loop.time()
        while True:
            comparable = bool(self.load.costs) and not self.load.bundles
            try:
                engine = await self._start_within(began + limit_s)
            except EngineFailed as refused:
                self._listener.engine_failed(str(refused), passing=refused.passing)
                return
            except TimeoutError:
                why = f": {self._lacks}" if self._lacks else ""
                self._listener.engine_failed(f"the engine was not ready within {limit_s:g} s{why}", crashed=True)
                return
            except EngineLost as lost:
                log.warning("%s", lost.message)
                self._listener.engine_lost()
                self._read_no_kernels()
            else:
                took_s = loop.time() - began
                limit_s = min(self._start_limit_s, max(_MIN_RESTART_S, _RESTART_FACTOR * took_s))
                self.restart_s = took_s if comparable else 0.0
                self._follow(engine, self.load)
                await self._watch(engine)
                began = loop.time()
            if self._too_many_crashes():
                self._listener.engine_failed(
                    f"the engine process died {self._crash_limit} times in {self._crash_window_s:g} s", crashed=True
                )
                return
            self.restarts += 1

    async def _start_within(self, deadline: float) -> EngineLife:
        """Starts an engine, also if the machine lacks something for a while; raises TimeoutError at the deadline."""
        async with asyncio.timeout_at(deadline):
            while True:
                self._lacks = ""
                try:
                    return await self._start(self.load, self._hang_s)
                except OSError as error:
                    if error.errno not in _LACKS:
                        raise
                    self._lacks = f"its process cannot be started: {error.strerror}"
                    log.warning("%s; it is tried again", self._lacks)
                await asyncio.sleep(_PAUSE_S)

    def _read_no_kernels(self) -> None:
        """Lets the next engine compile anew: a library may have died of the kernels that this node has cached."""
        if any(files.read for files in self.load.kernels):
            log.warning("the next engine process compiles kernels anew instead of reading those of the cache")
            kernels = [msgspec.structs.replace(files, read="", sha256="") for files in self.load.kernels]
            self.load = msgspec.structs.replace(self.load, kernels=kernels)

    def adopt(self, engine: EngineLife, load: EngineLoad) -> None:
        """Keeps another, ready engine alive from now on; the one before belongs to the caller."""
        if self.engine is not None:
            self.engine.on_end = self.engine.on_lost = lambda: None
        self._follow(engine, load)
        self._changed.set()

    def _follow(self, engine: EngineLife, load: EngineLoad) -> None:
        self.engine = engine
        # The next engine is wanted soon: it uses these costs, and verifies nothing again. What this one compiled has
        # been written, and nobody would take what the next one writes.
        kernels = [msgspec.structs.replace(files, write="") for files in load.kernels]
        self.load = msgspec.structs.replace(load, costs=list(map(list, engine.costs)), bundles=[], kernels=kernels)
        engine.on_end, engine.on_lost = self._ended, self._listener.device_lost

    def _ended(self) -> None:
        self._listener.engine_down()
        self._changed.set()

    async def _watch(self, engine: EngineLife) -> None:
        """Waits until an engine has ended and no other has taken its place."""
        if not engine.gone:
            self._listener.engine_up(engine)
        try:
            while not engine.gone:
                self._changed.clear()
                await self._changed.wait()
                engine = self.engine or engine
            status = await engine.wait()
        except asyncio.CancelledError:
            await (self.engine or engine).close()
            raise
        finally:
            self.engine = None
        log.error("the engine process %d ended with status %d", engine.pid, status)

    def _too_many_crashes(self) -> bool:
        now = time.monotonic()
        self._crashes.append(now)
        while self._crashes[0] < now - self._crash_window_s:
            self._crashes.popleft()
        return len(self._crashes) >= self._crash_limit
