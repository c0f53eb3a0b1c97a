"""Several GPUs behind one queue: one engine process per GPU, combined into one engine.

Lane 0 is the first GPU, which runs single texts; each other lane is one GPU. The lanes stay the same for the lifetime
of the fleet. While one GPU's engine starts, the others run its batches too, and the scheduler learns that everything
takes longer. A GPU is given up if its engine dies too often or does not start. When none is left the fleet has ended,
and its supervisor starts another.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.engine.base import LaneKind
from bertserve.serving.engine.process.remote_engine import EngineLife, RemoteEngine
from bertserve.serving.engine.process.supervisor import START_LIMIT_S, Supervisor
from bertserve.serving.errors import EngineFailed, EngineLost
from bertserve.serving.unawaited import start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bertserve.serving.engine.base import Batch, BatchOutput, Done, EngineLoad
    from bertserve.serving.engine.process.wire import Ready
    from bertserve.serving.errors import BertserveError
    from bertserve.serving.scheduling.cost import CostPoint

log = logging.getLogger("bertserve.engine")


async def start_engine(
    load: EngineLoad,
    hang_s: float = 2.0,
    *,
    started: Callable[[int], None] = lambda _: None,
    start_limit_s: float = START_LIMIT_S,
) -> EngineLife:
    """Starts one process, or one for each GPU of the load; arguments and errors as in `RemoteEngine.start`.

    For several GPUs `started` is not called. A GPU is given up if its engine dies three times within a minute, or is
    not ready in time.
    """
    if len(load.gpus) > 1:
        return await RemoteFleet.start(load, hang_s, start_limit_s=start_limit_s)
    return await RemoteEngine.start(load, hang_s, started=started)


class RemoteFleet:
    """The engines of several GPUs as one `EngineLife`, with a wide lane and one lane for each GPU."""

    apart = True
    ready: Ready

    def __init__(self, load: EngineLoad, hang_s: float, *, start_limit_s: float) -> None:
        self.lanes: Sequence[LaneKind] = [LaneKind.WIDE, *[LaneKind.NARROW] * len(load.gpus)]
        self.on_end: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self._first_reason = ""
        self._passing = True
        self._gone = asyncio.Event()
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._members = [_Member(self, gpu) for gpu in load.gpus]
        self._tasks = []
        for index, member in enumerate(self._members):
            supervisor = Supervisor(for_one_gpu(load, index), hang_s=hang_s, start_limit_s=start_limit_s)
            lost = partial(member.give_up, "starting its engine failed; see the log")
            self._tasks.append(start(member.keep(supervisor), lost))

    @classmethod
    async def start(
        cls,
        load: EngineLoad,
        hang_s: float = 2.0,
        *,
        start_limit_s: float = START_LIMIT_S,
    ) -> RemoteFleet:
        """Starts a process on each GPU and waits until the first of them is warm.

        Raises:
            EngineFailed: None of them loads; the message is the first one's.
        """
        fleet = cls(load, hang_s, start_limit_s=start_limit_s)
        try:
            await fleet._first
        except BaseException:
            await fleet.close()
            raise
        return fleet

    @property
    def lost(self) -> Sequence[str]:
        return [f"GPU {member.gpu}: {member.reason}" for member in self._members if member.reason]

    @property
    def devices(self) -> int:
        return len(self._working)

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self._working)

    @property
    def gone(self) -> bool:
        return self._gone.is_set()

    @property
    def pid(self) -> int:
        return next((engine.pid for engine in self._working), 0)

    @property
    def costs(self) -> Sequence[Sequence[CostPoint]]:
        return self.ready.costs

    @property
    def _working(self) -> list[EngineLife]:
        return [member.engine for member in self._members if member.engine is not None]

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        """Runs a batch on a lane's GPU, or on the least busy one if that GPU has no engine now."""
        member = self._members[max(0, lane - 1)]
        if member.engine is None:
            working = [member for member in self._members if member.engine is not None]
            member = min(working, key=lambda member: member.batches, default=member)
        if member.engine is None:
            done(EngineLost("the engine process has just exited; try again", retry_after_s=1, begun=False))
            return
        member.batches += 1

        def finished(outcome: BatchOutput | BertserveError) -> None:
            member.batches -= 1
            done(outcome)

        member.engine.submit(0, batch, finished)

    def kill(self, why: str) -> None:
        for engine in self._working:
            engine.kill(why)

    async def wait(self) -> int:
        """Waits until no GPU is left; returns 1, since the log has the exit status of each process."""
        await self._gone.wait()
        await self.close()
        return 1

    async def close(self) -> None:
        """Ends every process, without a call of `on_end`."""
        self.on_end = self.on_lost = lambda: None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def member_up(self, member: _Member, engine: EngineLife) -> None:
        log.info("GPU %d is up: %d of %d are up", member.gpu, self.devices, len(self._members))
        if not self._first.done():
            costs = [[*points, *map(_narrow, points)] for points in engine.ready.costs]
            self.ready = msgspec.structs.replace(engine.ready, lanes=list(self.lanes), costs=costs)
            self._first.set_result(None)

    def member_down(self, member: _Member) -> None:
        log.warning("GPU %d is down: %d of %d are up", member.gpu, self.devices, len(self._members))
        if not self.devices and not self._gone.is_set():
            self._gone.set()
            self.on_end()

    def member_failed(self, member: _Member, *, passing: bool) -> None:
        log.error("gave up on GPU %d: %s", member.gpu, member.reason)
        self._first_reason = self._first_reason or member.reason
        self._passing &= passing
        if all(member.reason for member in self._members) and not self._first.done():
            self._first.set_exception(EngineFailed(self._first_reason, passing=self._passing))
        self.on_lost()


@dataclass(slots=True, eq=False)
class _Member:
    """One GPU of a fleet, and the `EngineListener` of its engine.

    Attributes:
        engine: Its engine; None if there is none now.
        batches: Number of batches in flight on its engine.
        reason: Why the GPU was given up; empty if it was not.
    """

    fleet: RemoteFleet
    gpu: int
    engine: EngineLife | None = None
    batches: int = 0
    reason: str = ""

    async def keep(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.run(self)
        except EngineFailed as failed:
            self.give_up(str(failed), passing=failed.passing)
        except OSError as error:
            self.give_up(f"its engine process cannot be started: {error.strerror or error}", passing=True)

    def engine_up(self, engine: EngineLife) -> None:
        self.engine = engine
        self.fleet.member_up(self, engine)

    def engine_down(self) -> None:
        self.engine = None
        self.fleet.member_down(self)

    def engine_lost(self) -> None:
        """Does nothing: the metric counts ends of the whole fleet."""

    def device_lost(self) -> None:
        """Does nothing: an engine process has one GPU."""

    def give_up(self, reason: str, *, passing: bool = False) -> None:
        self.reason = reason
        self.fleet.member_failed(self, passing=passing)


def for_one_gpu(load: EngineLoad, index: int) -> EngineLoad:
    """Returns the load of one process; only the first writes its compiled kernels, which fit each GPU.

    A GPU has one lane. So a fleet's costs of narrow lanes are dropped, since they only repeat those of the wide lane.
    """
    costs = [[point for point in points if point.kind == "wide"] for points in load.costs]
    kernels = [msgspec.structs.replace(files, write=files.write if index == 0 else "") for files in load.kernels]
    return msgspec.structs.replace(load, gpus=[load.gpus[index]], kernels=kernels, costs=costs)


def _narrow(point: CostPoint) -> CostPoint:
    return msgspec.structs.replace(point, kind=LaneKind.NARROW.value)
