"""The server's side of one engine process: its start, its sockets with batches and results, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from bertserve.serving.engine.base import Engine, EngineLoad, LaneKind, lanes_for
from bertserve.serving.engine.children import module_command
from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.engine.process.wire import (
    KINDS,
    FrameReader,
    Kind,
    Ready,
    Refused,
    pack,
    pack_run,
    unpack_result,
)
from bertserve.serving.errors import BertserveError, EngineFailed, EngineFault, EngineLost
from bertserve.serving.host import can_busy_wait, memory_limit, oom_kills
from bertserve.serving.scheduling.cost import CostTable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bertserve.serving.engine.base import Batch, BatchOutput, Done
    from bertserve.serving.scheduling.cost import CostPoint

log = logging.getLogger("bertserve.engine")

_WATCH_S = 0.25
"""Seconds between checks of the lanes; a lane that is overdue in two checks in a row hangs."""

_HANG_FACTOR = 10.0
_STARVED_FACTOR = 10.0
"""Maximum factor on the patience with a lane whose process lacks CPU time: the waiting thread may be unrelated."""

_KILL_S = 5.0
"""Seconds in which a killed process must end; one that is blocked in a driver or a file system may remain."""

_SPIN_AHEAD_S, _SPIN_S = 0.0003, 0.001
"""How long before the expected result of a single text the event loop stops sleeping, and for how long at most, in
seconds. To wake it, and the core that slept with it, takes 0.1 to 0.2 ms. See docs/benchmarks/decisions.md."""


class EngineLife(Engine, Protocol):
    """One life of an engine, from its first warm batch to its end.

    Attributes:
        apart: Whether narrow lanes may run alongside the wide one, as with several GPUs.
        on_end: Called once when the engine has ended.
        on_lost: Called whenever one of several devices is given up.
    """

    apart: bool
    on_end: Callable[[], None]
    on_lost: Callable[[], None]
    ready: Ready

    @property
    def lost(self) -> Sequence[str]:
        """Devices that were given up, each with its reason."""

    @property
    def devices(self) -> int:
        """Number of working devices."""

    @property
    def busy(self) -> bool:
        """Whether a batch is in flight."""

    @property
    def gone(self) -> bool:
        """Whether the engine has ended."""

    @property
    def pid(self) -> int:
        """Process id, or that of the first of several processes; 0 without one."""

    @property
    def costs(self) -> Sequence[Sequence[CostPoint]]:
        """Measured costs of each model's texts."""

    def kill(self, why: str) -> None:
        """Kills the engine at once."""

    async def wait(self) -> int:
        """Waits for the end and returns the exit status, negative for a signal; 1 for several processes."""

    async def close(self) -> None:
        """Ends the engine and reaps its process, without a call of `on_end`."""


class RemoteEngine:
    """One engine process: an `EngineLife` over its sockets."""

    apart = False
    devices = 1
    lost: Sequence[str] = ()
    ready: Ready

    def __init__(self, process: subprocess.Popen[bytes], hang_s: float, needed_mib: int = 0) -> None:
        self._process = process
        self._needed_mib = needed_mib
        self._oom_kills = oom_kills()
        self._hang_s = hang_s
        self._gone = asyncio.Event()
        self.on_end: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._watch: asyncio.TimerHandle | None = None
        self._lanes: list[_Lane] = []
        self._transports: list[asyncio.BaseTransport] = []
        self.lanes: Sequence[LaneKind] = ()
        self._tables: list[CostTable] = []
        self._names: Sequence[str] = ()

    @classmethod
    async def start(
        cls,
        load: EngineLoad,
        hang_s: float = 2.0,
        *,
        started: Callable[[int], None] = lambda _: None,
    ) -> RemoteEngine:
        """Starts a process and waits until its models are warm.

        Args:
            load: The load command.
            hang_s: Seconds without a result after which a batch that was predicted to be short counts as hanging.
            started: Called with the process id once the process can be paused; it has done nothing yet.

        Raises:
            EngineFailed: The process refused to load; the message is for the operator.
            EngineLost: The process died before it was ready.
        """
        with contextlib.ExitStack() as unused, contextlib.ExitStack() as used:
            ends, theirs = [], []
            lanes = lanes_for(load.models, load.threads)
            for _ in range(1 + len(lanes)):
                ours, other = socket.socketpair()
                used.callback(ours.close)
                unused.callback(other.close)
                ends.append(ours)
                theirs.append(other.fileno())
            # That module knows bundles, which this package must not import.
            command = module_command("bertserve.serving.rollout.engine_process", *map(str, theirs))
            process = subprocess.Popen(  # noqa: ASYNC220  fork and exec take a millisecond, before any request
                command, pass_fds=theirs, stdin=subprocess.DEVNULL
            )
            if LaneKind.NARROW not in lanes:  # otherwise the worker sets it on those alone
                # While the process has one thread, whose nice value all later threads inherit.
                os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + load.nice)
            used.pop_all()
        engine = cls(process, hang_s, load.needed_mib)
        engine._names = [model.name for model in load.models]
        try:
            await engine._connect(ends, load, started)
        except BaseException as error:
            if not isinstance(error, EngineFailed):
                process.kill()  # a paused process would not notice that its sockets close
            await engine.close()
            for end in ends[len(engine._transports) :]:
                end.close()
            if isinstance(error, EngineLost) and (cause := engine._cause()):
                raise EngineLost(f"{error.message}: {cause}") from error
            raise
        return engine

    async def _connect(self, ends: list[socket.socket], load: EngineLoad, started: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        for end in ends:
            end.setblocking(False)
        self._control, control = await loop.create_connection(_Control, sock=ends[0])
        self._transports.append(self._control)
        for end in ends[1:]:
            transport, lane = await loop.create_connection(
                lambda: _Lane(self.patience_s, self._ended, self._starved_s), sock=end
            )
            self._transports.append(transport)
            self._lanes.append(lane)
        if not self._control.is_closing():  # uvloop fails to write then, and `answer` tells of the end
            self._control.write(pack(Kind.LOAD, msgspec.json.encode(load)))
        await control.answer()  # STARTED
        started(self.pid)
        kind, payload = await control.answer()
        if kind is Kind.REFUSED:
            refused = msgspec.json.decode(payload, type=Refused)
            raise EngineFailed(refused.message, passing=refused.passing)
        self.ready = msgspec.json.decode(payload, type=Ready)
        self.lanes = self.ready.lanes
        self._watch_lanes()
        self._tables = [CostTable.of(points) for points in self.costs]
        if ENGINES[self.ready.engine].spares_cpu and can_busy_wait():  # otherwise spinning would take others' CPUs
            for lane in self._lanes:
                lane.expected_s = self._expected_s

    @property
    def costs(self) -> Sequence[Sequence[CostPoint]]:
        return self.ready.costs

    @property
    def busy(self) -> bool:
        return any(lane.busy for lane in self._lanes)

    @property
    def gone(self) -> bool:
        return self._gone.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        """Sends a batch to a lane; `done` is called from the event loop, also if the engine dies."""
        if self._gone.is_set():
            done(EngineLost("the engine process has just exited; try again", retry_after_s=1, begun=False))
        else:
            self._lanes[lane].submit(batch, done)

    def patience_s(self, batch: Batch) -> float:
        """Returns how long a lane may work on a batch before it is suspected to hang, in seconds."""
        predicted_s = self._tables[batch.model].batch_us(batch.padded_length, 1) * len(batch.texts) / 1e6
        return max(self._hang_s - 2 * _WATCH_S, _HANG_FACTOR * predicted_s)

    def _expected_s(self, batch: Batch) -> float:
        return self._tables[batch.model].batch_us(len(batch.texts[0].ids), 1) / 1e6

    def _starved_s(self) -> Mapping[str, float]:
        return starved_s(self.pid)

    def kill(self, why: str) -> None:
        if self._process.poll() is None:
            log.error("killing the engine process %d: it %s", self.pid, why)
            self._process.kill()

    def _watch_lanes(self) -> None:
        # Re-arm the timer first: an exception below must not stop the watch.
        self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._watch_lanes)
        if hanging := [lane for lane in self._lanes if lane.hangs()]:
            self._watch.cancel()
            self.kill(f"hangs: {hanging[0].unanswered(self._names)}")

    def _ended(self) -> None:
        """Called by each lane whose socket closes; the listener is notified before any request fails."""
        if not self._gone.is_set():
            self._gone.set()
            self.on_end()

    async def wait(self) -> int:
        await self._gone.wait()
        await self.close()
        if cause := self._cause():
            log.error("the engine process %d: %s", self.pid, cause)
        return self._process.poll() or 0

    def _cause(self) -> str:
        """Describes why the process ended if its memory limit was the cause, else an empty string."""
        limit = memory_limit()
        if limit is None or self._process.poll() != -signal.SIGKILL or oom_kills() <= self._oom_kills:
            return ""
        need = f"; these models need about {self._needed_mib:,} MiB" if self._needed_mib else ""
        return f"the kernel killed it because the container reached its memory limit of {limit >> 20:,} MiB{need}"

    async def close(self) -> None:
        """Closes the sockets, which ends the process, without a call of `on_end`."""
        self.on_end = self.on_lost = lambda: None
        if self._watch is not None:
            self._watch.cancel()
        for transport in self._transports:
            transport.close()
        try:
            await asyncio.to_thread(self._process.wait, 1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                await asyncio.to_thread(self._process.wait, _KILL_S)
            except subprocess.TimeoutExpired:
                log.error("cannot kill the engine process %d: it is blocked in the kernel", self.pid)  # noqa: TRY400


class _Control(asyncio.Protocol):
    """The control socket: replies to LOAD, then silence until the end."""

    def __init__(self) -> None:
        self._answers: asyncio.Queue[tuple[Kind, bytes] | None] = asyncio.Queue()
        self._frames = FrameReader(KINDS)

    async def answer(self) -> tuple[Kind, bytes]:
        """Returns the next frame; raises EngineLost if the process ends first."""
        answer = await self._answers.get()
        if answer is None:
            raise EngineLost("the engine process exited while loading")
        return answer

    def data_received(self, data: bytes) -> None:
        for kind, _, _, payload in self._frames.feed(data):
            self._answers.put_nowait((kind, payload))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._answers.put_nowait(None)


class _Lane(asyncio.Protocol):
    """One lane's socket: batches go out one after another, and results return in that order.

    `patience_s` returns how long the lane may work on a batch before it is suspected to hang, in seconds. `ended` is
    called when the socket has closed, before the lane's requests fail. `starved_s` returns the CPU waits of the
    process's threads.

    Attributes:
        expected_s: Returns the seconds that an idle lane takes for a batch of one text; None to await results asleep.
    """

    expected_s: Callable[[Batch], float] | None = None

    def __init__(
        self,
        patience_s: Callable[[Batch], float],
        ended: Callable[[], None],
        starved_s: Callable[[], Mapping[str, float]],
    ) -> None:
        self._patience_s = patience_s
        self._ended = ended
        self._starved_s = starved_s
        self._frames = FrameReader(KINDS)
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._pending: deque[tuple[int, Batch, Done]] = deque()
        self._since = 0.0
        self._suspect = self._seen = 0
        self._before: Mapping[str, float] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def submit(self, batch: Batch, done: Done) -> None:
        self._number += 1
        if not self._pending:
            self._since = self._loop.time()
        self._pending.append((self._number, batch, done))
        self.transport.write(pack_run(self._number, batch))
        if batch.alone and self.expected_s is not None and len(self._pending) == len(batch.texts) == 1:
            ahead_s = max(0.0, self.expected_s(batch) - _SPIN_AHEAD_S)
            self._loop.call_later(ahead_s, self._spin, self._number, self._since + ahead_s + _SPIN_S)

    def _spin(self, number: int, until: float) -> None:
        """Keeps the event loop awake: it polls its sockets without sleeping while a callback is scheduled."""
        if self._pending and self._pending[0][0] == number and self._loop.time() < until:
            self._loop.call_soon(self._spin, number, until)

    def hangs(self) -> bool:
        """Whether the lane's current batch was overdue at the last check and still is.

        One check is not enough: this event loop may have stalled, and the result may be in the socket already.
        """
        overdue = 0
        if self._pending:
            number, batch, _ = self._pending[0]
            if number != self._seen:
                self._seen, self._before = number, None
            elif self._before is None:  # at the second check, since most batches are done by then
                self._before = self._starved_s()
            age_s, patience_s = self._loop.time() - self._since, self._patience_s(batch)
            if age_s >= patience_s and age_s >= min(patience_s + self._starved(), _STARVED_FACTOR * patience_s):
                overdue = number
        suspect, self._suspect = self._suspect, overdue
        return overdue > 0 and overdue == suspect

    def _starved(self) -> float:
        """Returns the longest CPU wait of a thread of the process since the second check of the batch, in seconds."""
        if not self._before:
            return 0.0
        now = self._starved_s()
        return max((now[thread] - was for thread, was in self._before.items() if thread in now), default=0.0)

    def unanswered(self, names: Sequence[str]) -> str:
        """Describes the lane's current batch and how long it has been running, for the log."""
        _, batch, _ = self._pending[0]
        size = f"{len(batch.texts)} x {batch.padded_length} tokens of the model {names[batch.model]}"
        waited_s = self._loop.time() - self._since
        return f"no answer for {waited_s:.1f} s to a batch of {size}; it waited {self._starved():.1f} s for a CPU"

    def data_received(self, data: bytes) -> None:
        for kind, _, number, payload in self._frames.feed(data):
            if self._pending and number == self._pending[0][0]:
                self._finish(_result(kind, payload))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._ended()
        begun = True  # only for the first: the lane runs one batch at a time
        while self._pending:
            lost = "the engine process exited while processing this request; try again"
            self._finish(EngineLost(lost, retry_after_s=1, begun=begun))
            begun = False

    def _finish(self, outcome: BatchOutput | BertserveError) -> None:
        _, _, done = self._pending.popleft()
        if self._pending:
            self._since = self._loop.time()
        done(outcome)


def _result(kind: Kind, payload: bytes) -> BatchOutput | BertserveError:
    if kind is Kind.RESULT:
        return unpack_result(payload)
    log.error("engine fault: %s", payload.decode("utf-8", "replace"))
    return EngineFault("the engine failed on this input")


def starved_s(pid: int) -> dict[str, float]:
    """Returns how long each thread of a process was ready to run but had no CPU, in seconds, by thread id.

    Empty if the kernel does not count it (`CONFIG_SCHED_INFO`; proc_pid_schedstat, the second number).
    """
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found[task.name] = int((task / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return found
