"""Several GPUs behind one queue: an engine process for each, and together one engine like any other.

Lane 0 is the first card, as a lone text has it; each of the others is one card. They are the same for as long as the
fleet lives: while one card's engine is being started the others run its batches too, and the scheduler learns that
everything takes longer. A card whose engine dies too often, or does not start, is given up. When no card is left the
fleet has ended, and whoever looks after it starts another.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from serving.engine.base import LaneKind
from serving.engine.process.supervisor import EngineFailed, EngineLife, RemoteEngine, Supervisor
from serving.errors import EngineLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from serving.engine.base import Done
    from serving.engine.process.wire import Load, Ready
    from serving.errors import BertserveError
    from serving.records import Batch, BatchOutput
    from serving.scheduling.cost import CostPoint

log = logging.getLogger("bertserve.engine")


async def start_engine(
    load: Load,
    hang_s: float = 2.0,
    *,
    started: Callable[[int], None] = lambda _: None,
    verified: Callable[[], Awaitable[None]] | None = None,
    crash_limit: int = 3,
    crash_window_s: float = 60.0,
) -> EngineLife:
    """Starts what a load asks for: one process, or one for each of several cards.

    Args:
        load: What to load, and on which cards.
        hang_s: As `RemoteEngine.start`, like the next two.
        started: Not told of the processes of several cards: pausing one would keep none of the others from its card.
        verified: Of several cards awaited before any process is started.
        crash_limit: So many deaths of one of several cards' engines within the window give that card up.
        crash_window_s: See `crash_limit`.

    Raises:
        EngineFailed: It refused to load; the message is for the operator.
        EngineLost: It died before it was ready.
    """
    if len(load.cards) > 1:
        if verified is not None:
            await verified()
        return await RemoteFleet.start(load, hang_s, crash_limit=crash_limit, crash_window_s=crash_window_s)
    return await RemoteEngine.start(load, hang_s, started=started, verified=verified)


class RemoteFleet:
    """The engines of several cards as one.

    Attributes:
        lanes: The wide one, and one for each card.
        apart: Whether lanes other than the wide one may work beside it, as cards do.
        on_end: Told once when no card is left.
        on_lost: Told whenever a card is given up.
        ready: What the first of them said of itself, with these lanes.
    """

    apart = True

    def __init__(self, load: Load, hang_s: float, *, crash_limit: int = 3, crash_window_s: float = 60.0) -> None:
        cards = load.cards
        self.lanes: Sequence[LaneKind] = [LaneKind.WIDE, *[LaneKind.NARROW] * len(cards)]
        self.on_end: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self.ready: Ready | None = None
        self._cards = cards
        self._engines: list[EngineLife | None] = [None] * len(cards)
        self._batches = [0] * len(cards)
        self._reasons: dict[int, str] = {}
        self._passing = True
        self._gone = asyncio.Event()
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._supervisors = [
            Supervisor(
                on_card(load, place),
                _Member(self, place),
                crash_limit=crash_limit,
                crash_window_s=crash_window_s,
                hang_s=hang_s,
            )
            for place in range(len(cards))
        ]
        self._tasks = [asyncio.create_task(self._keep(place)) for place in range(len(cards))]

    @classmethod
    async def start(
        cls, load: Load, hang_s: float = 2.0, *, crash_limit: int = 3, crash_window_s: float = 60.0
    ) -> RemoteFleet:
        """Starts a process on each card and waits until the first of them is warm.

        Raises:
            EngineFailed: None of them loads; the message is the first one's.
        """
        fleet = cls(load, hang_s, crash_limit=crash_limit, crash_window_s=crash_window_s)
        try:
            await fleet._first
        except BaseException:
            await fleet.close()
            raise
        return fleet

    @property
    def lost(self) -> Sequence[str]:
        """The cards that were given up, each with its reason."""
        return [f"GPU {self._cards[place]}: {reason}" for place, reason in sorted(self._reasons.items())]

    @property
    def devices(self) -> int:
        """Cards that work."""
        return sum(engine is not None for engine in self._engines)

    @property
    def busy(self) -> bool:
        """Whether a batch has been given to one of them that it has not answered."""
        return any(engine.busy for engine in self._engines if engine is not None)

    @property
    def gone(self) -> bool:
        """Whether no card is left."""
        return self._gone.is_set()

    @property
    def pid(self) -> int:
        """The process id of the first card that works; 0 without one."""
        return next((engine.pid for engine in self._engines if engine is not None), 0)

    @property
    def costs(self) -> Sequence[Sequence[CostPoint]]:
        """What each model's texts cost on a card, whichever lane it is called by."""
        return self.ready.costs if self.ready else ()

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        """Runs a batch on a lane's card, or on the one with least to do where that has no engine now."""
        card = max(0, lane - 1)
        if self._engines[card] is None:
            living = [place for place, engine in enumerate(self._engines) if engine is not None]
            card = min(living, key=self._batches.__getitem__, default=card)
        engine = self._engines[card]
        if engine is None:
            done(EngineLost("the engine has just ended; try again", retry_after_s=1))
            return
        self._batches[card] += 1

        def finished(outcome: BatchOutput | BertserveError) -> None:
            self._batches[card] -= 1
            done(outcome)

        engine.submit(0, batch, finished)

    def kill(self, why: str) -> None:
        """Ends all processes at once."""
        for engine in self._engines:
            if engine is not None:
                engine.kill(why)

    async def wait(self) -> int:
        """Waits until no card is left; returns 1, since each of them has told its own status in the log."""
        await self._gone.wait()
        await self.close()
        return 1

    async def close(self) -> None:
        """Ends every process and reaps it; an end that is wanted is not reported."""
        self.on_end = self.on_lost = lambda: None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, place: int) -> None:
        """Keeps a card's engine alive; a card whose process cannot be started at all is given up too."""
        try:
            await self._supervisors[place].run()
        except OSError as error:
            reason = f"its engine process cannot be started: {error.strerror or error}"
            self.member_failed(place, reason, passing=True)

    def member_up(self, place: int, engine: EngineLife) -> None:
        """A card's engine is warm."""
        self._engines[place] = engine
        log.info("GPU %d works, %d of %d do", self._cards[place], self.devices, len(self._cards))
        if not self._first.done() and engine.ready is not None:
            costs = [[*points, *map(_narrow, points)] for points in engine.ready.costs]
            self.ready = msgspec.structs.replace(engine.ready, lanes=list(self.lanes), costs=costs)
            self._first.set_result(None)

    def member_down(self, place: int) -> None:
        """A card's engine has gone; its batches fail."""
        self._engines[place] = None
        log.warning("GPU %d has no engine, %d of %d work", self._cards[place], self.devices, len(self._cards))
        if not self.devices and not self._gone.is_set():
            self._gone.set()
            self.on_end()

    def member_failed(self, place: int, reason: str, *, passing: bool = False) -> None:
        """A card is given up; `passing` as `EngineFailed` has it."""
        log.error("GPU %d is given up: %s", self._cards[place], reason)
        self._reasons[place] = reason
        self._passing &= passing
        if len(self._reasons) == len(self._cards) and not self._first.done():
            self._first.set_exception(EngineFailed(next(iter(self._reasons.values())), passing=self._passing))
        self.on_lost()


class _Member:
    """A card's `Slot` in its fleet."""

    def __init__(self, fleet: RemoteFleet, place: int) -> None:
        self._fleet = fleet
        self._place = place

    def engine_up(self, engine: EngineLife) -> None:
        self._fleet.member_up(self._place, engine)

    def engine_down(self) -> None:
        self._fleet.member_down(self._place)

    def device_lost(self) -> None:
        """It has but one."""

    def engine_failed(self, reason: str, *, crashed: bool = False, passing: bool = False) -> None:
        self._fleet.member_failed(self._place, reason, passing=crashed or passing)


def on_card(load: Load, place: int) -> Load:
    """What one of the processes loads; the first alone writes what it compiled, which is the same on each card.

    A card has one lane: of costs that a fleet was known to have, those of its narrow lanes are the fleet's own words.
    """
    costs = [[point for point in points if point.kind == "wide"] for points in load.costs]
    kernels = [msgspec.structs.replace(files, write=files.write if place == 0 else "") for files in load.kernels]
    return msgspec.structs.replace(load, cards=[load.cards[place]], kernels=kernels, costs=costs)


def _narrow(point: CostPoint) -> CostPoint:
    return msgspec.structs.replace(point, kind=LaneKind.NARROW.value)
