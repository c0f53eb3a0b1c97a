"""Keeps an engine alive: restarts it at once when it dies.

An engine is given up if it dies `crash_limit` times within `crash_window_s`, refuses to load, or is not warm in time.
If the machine is short of a resource, such as file descriptors, the start is retried until that time limit. The
supervisor can adopt another engine that was started elsewhere.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from bertserve.serving.engine.process.remote_engine import EngineLife, RemoteEngine
from bertserve.serving.errors import EngineFailed, EngineLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from bertserve.serving.engine.base import EngineLoad

log = logging.getLogger("bertserve.engine")


START_LIMIT_S = 600.0
"""Time limit for the first engine in seconds, including verification, compilation and measurement."""

_RESTART_FACTOR, _MIN_RESTART_S = 10.0, 60.0
"""A restart takes about as long as the start before it. One that takes `_RESTART_FACTOR` times as long, and at least
`_MIN_RESTART_S` seconds, counts as a hang."""

_PAUSE_S = 1.0
"""Seconds before a retry if the machine is short of a resource."""

_LACKS = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS}


class EngineListener(Protocol):
    def engine_up(self, engine: EngineLife) -> None:
        """A warm engine accepts batches now."""

    def engine_down(self) -> None:
        """The engine has ended and a new one is being started."""

    def engine_lost(self) -> None:
        """An engine process ended before it was ready; another one is being started."""

    def device_lost(self) -> None:
        """One of several devices of the engine was given up."""


class Supervisor:
    """Keeps one engine process alive.

    Attributes:
        engine: The running engine; None if there is none.
        restarts: Number of processes started after the first one.
        restart_s: Duration of the last start in seconds if nothing had to be verified or measured, else 0.
    """

    def __init__(
        self,
        load: EngineLoad,
        *,
        crash_limit: int = 3,
        crash_window_s: float = 60.0,
        hang_s: float = 2.0,
        start_limit_s: float = START_LIMIT_S,
        start: Callable[[EngineLoad, float], Awaitable[EngineLife]] = RemoteEngine.start,
    ) -> None:
        self.load = load
        self._hang_s = hang_s
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
        """Sets the load for later starts, and forgets earlier crashes."""
        self.load = load
        self._crashes.clear()

    async def run(self, listener: EngineListener) -> None:
        """Starts engines until canceled; reports to the listener.

        Raises:
            EngineFailed: The engine refused its load or crashed too often, and will not restart.
        """
        loop, limit_s = asyncio.get_running_loop(), self._start_limit_s
        began = loop.time()
        while True:
            comparable = bool(self.load.costs) and not self.load.bundles
            try:
                engine = await self._start_within(began + limit_s)
            except TimeoutError:
                why = f": {self._lacks}" if self._lacks else ""
                raise EngineFailed(f"the engine was not ready within {limit_s:g} s{why}", crashed=True) from None
            except EngineLost as lost:
                log.warning("%s", lost.message)
                listener.engine_lost()
                self._read_no_kernels()
            else:
                took_s = loop.time() - began
                limit_s = min(self._start_limit_s, max(_MIN_RESTART_S, _RESTART_FACTOR * took_s))
                self.restart_s = took_s if comparable else 0.0
                engine.on_end, engine.on_lost = partial(self._ended, listener), listener.device_lost
                self._keep(engine, self.load)
                if not engine.gone:
                    listener.engine_up(engine)
                await self._watch(engine)
                began = loop.time()
            if self._too_many_crashes():
                reason = f"the engine process died {self._crash_limit} times in {self._crash_window_s:g} s"
                raise EngineFailed(reason, crashed=True)
            self.restarts += 1

    async def _start_within(self, deadline: float) -> EngineLife:
        """Starts an engine; retries while the machine is short of a resource. Raises TimeoutError at the deadline."""
        async with asyncio.timeout_at(deadline):
            while True:
                self._lacks = ""
                try:
                    return await self._start(self.load, self._hang_s)
                except OSError as error:
                    if error.errno not in _LACKS:
                        raise
                    self._lacks = f"its process cannot be started: {error.strerror}"
                    log.warning("%s; retrying", self._lacks)
                await asyncio.sleep(_PAUSE_S)

    def _read_no_kernels(self) -> None:
        """Makes the next engine compile anew, since cached kernels of this node may have crashed the library."""
        if any(files.read for files in self.load.kernels):
            log.warning("the next engine process recompiles kernels instead of reading the cache")
            kernels = [msgspec.structs.replace(files, read="", sha256="") for files in self.load.kernels]
            self.load = msgspec.structs.replace(self.load, kernels=kernels)

    def adopt(self, engine: EngineLife, load: EngineLoad) -> None:
        """Keeps another, ready engine alive from now on; the previous one belongs to the caller."""
        if (before := self.engine) is not None:
            engine.on_end, engine.on_lost = before.on_end, before.on_lost
            before.on_end = before.on_lost = lambda: None
        self._keep(engine, load)
        self._changed.set()

    def _keep(self, engine: EngineLife, load: EngineLoad) -> None:
        self.engine = engine
        # The next engine is needed soon: it reuses these costs, and verifies nothing again. This engine's kernels have
        # been written, and nobody would collect those of the next one.
        kernels = [msgspec.structs.replace(files, write="") for files in load.kernels]
        self.load = msgspec.structs.replace(load, costs=list(map(list, engine.costs)), bundles=[], kernels=kernels)

    def _ended(self, listener: EngineListener) -> None:
        listener.engine_down()
        self._changed.set()

    async def _watch(self, engine: EngineLife) -> None:
        """Waits until an engine has ended and no other has replaced it."""
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
        log.error("the engine process %d exited with status %d", engine.pid, status)

    def _too_many_crashes(self) -> bool:
        now = time.monotonic()
        self._crashes.append(now)
        while self._crashes[0] < now - self._crash_window_s:
            self._crashes.popleft()
        return len(self._crashes) >= self._crash_limit
