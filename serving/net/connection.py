"""One connection, whatever is spoken on it: when it reads on, how long it may take and last, and how it ends.

HTTP/1.1 and HTTP/2 are codecs on it: what `receive` gets goes into the codec, and what comes of that is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from serving.net.lingering_close import TAKEN_BYTES, LingeringClose, SendProgress, unsent_bytes
from serving.net.ports import lifetime_s
from serving.unawaited import guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.net.buffers import BufferBudget
    from serving.settings import Settings

_TURN_S = 0.0003
"""What all connections of a port may do of such work in one turn of the loop. A request passes five turns or so."""


class FairQueue:
    """The work of one port that waits for the next turn of the loop, first come, first served.

    Each turn does as much of it as takes 0.3 ms, and at least one piece, so that other work of the loop is
    held up by no more than that, however many connections send more than they should.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], float]] = deque()
        self._is_due = False

    def add(self, work: Callable[[], float]) -> None:
        """Does a piece of work in its turn; it returns how many seconds of work it has begun for later turns."""
        self._waiting.append(work)
        self._wake()

    async def wait(self, more_s: float) -> None:
        """Waits for a turn, in which the caller does work of so many seconds."""
        turn = asyncio.Event()

        def begin() -> float:
            turn.set()
            return more_s

        self.add(begin)
        await turn.wait()

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        waiting, clock = self._waiting, self._clock
        self._is_due = False
        end = clock() + _TURN_S
        # What is added meanwhile is for the next turn.
        for _ in range(len(waiting)):
            work = waiting.popleft()
            try:
                end -= work()
            finally:
                if waiting:
                    self._wake()
            if clock() >= end:
                return


C = TypeVar("C", bound="Connection[Any]")
P = TypeVar("P", bound="Port[Any]")


class Port(Generic[C]):
    """What the connections of one port share.

    Attributes:
        budget: What they may hold, together with those of other ports.
        turns: For what they have sent beyond one turn's work.
        connections: All that are open.
    """

    def __init__(self, settings: Settings, budget: BufferBudget) -> None:
        self.settings = settings
        self.budget = budget
        self.turns = FairQueue()
        self.connections: set[C] = set()
        self.ending = False

    def tick(self, seconds: float) -> None:
        for connection in list(self.connections):
            guarded(connection.abort, connection.tick, seconds)

    def drain(self) -> None:
        """The server ends: each connection ends once nothing is under way on it. To be called again and again."""
        for connection in list(self.connections):
            guarded(connection.abort, connection.drain)


class Connection(asyncio.Protocol, Generic[P]):
    """One connection.

    Attributes:
        share: What it holds of the port's budget.
    """

    # Attributes without slots would each be looked up in a dictionary (3 us a request of HTTP).
    __slots__ = (
        *("_ending", "_idle_since", "_lifetime_s", "_lingering", "_paused", "_rest", "_sending"),
        *("_transport", "_turn_is_due", "_used", "loop", "port", "share"),
    )

    _PIECE_BYTES: ClassVar[float] = float("inf")
    """What is received at once and is longer goes through `read_on`."""

    _TAKEN_BYTES: ClassVar[int] = TAKEN_BYTES
    """A client must take so much of what it is sent in the time for a body."""

    def __init__(self, port: P, free_bytes: int = 0) -> None:
        """Waits for its transport; its first `free_bytes` need no room in the budget."""
        self.port = port
        self.loop = asyncio.get_running_loop()
        self.share = port.budget.share(free_bytes)
        self._rest: bytes | memoryview = b""  # received, and yet to be read
        self._paused = self._turn_is_due = False
        self._ending = False  # what comes now is thrown away
        self._lingering: LingeringClose | None = None
        self._sending: SendProgress | None = None  # while the client takes less than it is sent
        self._lifetime_s = lifetime_s(port.settings)
        self._idle_since: float | None = self.loop.time()
        self._used = False

    # What a codec's connection adds.

    def receive(self, data: bytes) -> None:
        raise NotImplementedError

    def read_on(self) -> None:
        """Reads as much of `_rest` as a turn may; then pauses for the next one, or resumes."""
        raise NotImplementedError

    def drain(self) -> None:
        """Ends the connection once nothing is under way; called again and again."""
        raise NotImplementedError

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.port.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self.port.connections.discard(self)
        self._ending = True
        if self._lingering is not None:
            self._lingering.cancel()
        self._rest = b""
        self.share.close()

    def data_received(self, data: bytes) -> None:
        """Hands on what is short; the rest of it in turns, and behind what came before."""
        if self._ending:
            if self._lingering is not None:
                self._lingering.received(len(data))
        elif self._paused:
            self._rest = bytes(self._rest) + data
            self._transport.pause_reading()  # over TLS it goes on for a while
        elif len(data) > self._PIECE_BYTES:
            self._rest = data
            self.read_on()
        else:
            self.receive(data)

    def pause_writing(self) -> None:
        """The client does not take what it is sent: it must take some of it within the time for a body."""
        self._sending = SendProgress(self._transport.get_write_buffer_size(), self._TAKEN_BYTES)

    def resume_writing(self) -> None:
        self._sending = None

    # Reading in turns.

    @property
    def unread(self) -> int:
        return len(self._rest)

    def _pause(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def _resume(self) -> None:
        self._paused = False
        self._transport.resume_reading()

    def _read_on_next_turn(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self.port.turns.add(self._take_turn)

    def _take_turn(self) -> float:
        """Reads on; returns about how many seconds of work it has begun for later turns."""
        self._turn_is_due = False
        if not (self._ending or self._transport.is_closing()):
            guarded(self.abort, self.read_on)
        return 0.0

    # What the port calls.

    def tick(self, seconds: float) -> None:
        self._lifetime_s -= seconds
        sending = self._sending
        if sending is not None:
            waited_s = sending.wait(self._transport.get_write_buffer_size(), seconds)
            # The first of these ticks comes at some moment within its time.
            if waited_s - seconds >= self.port.settings.body_timeout_s:
                self.abort()

    def abort(self) -> None:
        """Ends the connection at once: nobody can say anything on it any more."""
        self._transport.abort()

    def idle_since(self) -> tuple[bool, float] | None:
        """As `Closable` has it; one that lingers is idle once its client has received everything."""
        if self._idle_since is None or self._transport.is_closing():
            return None
        if self._lingering is not None and unsent_bytes(self._transport):
            return None
        return self._used, self._idle_since

    def linger(self, quiet_s: float, *, heard_all: bool = False) -> None:
        """Ends the connection behind what was written, so that the client can read it whatever it still sends.

        Args:
            quiet_s: How long what still comes is read and thrown away.
            heard_all: Whether the client has ended its half.
        """
        self._ending = True
        self._idle_since = self.loop.time()
        self._rest = b""
        if self._lingering is None:
            pace_s = self.port.settings.body_timeout_s
            self._lingering = LingeringClose(self._transport, quiet_s=quiet_s, pace_s=pace_s, heard_all=heard_all)
