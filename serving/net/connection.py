"""A connection, independent of its protocol: reading in turns, timeouts, maximum age and closing.

HTTP/1.1 and HTTP/2 are codecs on top. `receive` passes data to the codec, and the requests in it are answered.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from bertserve.serving.net.lingering_close import TAKEN_BYTES, LingeringClose, SendProgress, unsent_bytes
from bertserve.serving.net.ports import lifetime_s
from bertserve.serving.unawaited import run_guarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.net.buffers import BufferBudget
    from bertserve.serving.settings import Settings

_TURN_S = 0.0003
"""Time for queued work of all connections of a port per turn of the loop. A request takes about five turns."""


class FairQueue:
    """A FIFO queue of a port's work for later turns of the event loop.

    Each turn does at most 0.3 ms of work, and at least one piece. Other work of the loop waits no longer than that,
    however many connections send too much.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], float]] = deque()
        self._is_due = False

    def add(self, work: Callable[[], float]) -> None:
        """Queues a piece of work. It returns the seconds of work that it starts for later turns."""
        self._waiting.append(work)
        self._wake()

    async def wait(self, more_s: float) -> None:
        """Waits for a turn in which the caller does `more_s` seconds of work."""
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
        # Work added meanwhile is for the next turn.
        for _ in range(len(waiting)):
            work = waiting.popleft()
            try:
                end -= work()
            finally:
                if waiting:
                    self._wake()
            if clock() >= end:
                return


class Phase(IntEnum):
    """What a connection does. It never goes back to an earlier phase, except from `BUSY` to `IDLE`."""

    NEW = auto()
    """No request has begun."""
    IDLE = auto()
    """All requests are answered."""
    BUSY = auto()
    """A request is received or answered."""
    LAST = auto()
    """Further input is discarded. Requests that were received are answered."""
    HALF_CLOSED = auto()
    """The client has closed its half. Requests that were received are answered."""
    LINGERING = auto()
    """Everything is written. Further input is discarded until the client closes."""
    LOST = auto()


C = TypeVar("C", bound="Connection[Any]")
P = TypeVar("P", bound="Port[Any]")


class Port(Generic[C]):
    """The shared state of a port's connections.

    Attributes:
        budget: The buffer budget, shared with other ports.
        turns: Queue for data beyond the limit of one turn.
        connections: All open connections.
        header_timeout_s: Maximum time to receive a request's headers, a TLS handshake, or HTTP/2's first frames.
        body_timeout_s: Maximum time to receive a request's body, or without progress of a reply.
    """

    header_timeout_s = 5.0
    body_timeout_s = 10.0

    def __init__(self, settings: Settings, budget: BufferBudget) -> None:
        self.settings = settings
        self.budget = budget
        self.turns = FairQueue()
        self.connections: set[C] = set()
        self.ending = False

    def tick(self, seconds: float) -> None:
        for connection in list(self.connections):
            run_guarded(connection.abort, connection.tick, seconds)

    def drain(self) -> None:
        """Ends each connection that has no request in flight. Called repeatedly during shutdown."""
        for connection in list(self.connections):
            run_guarded(connection.abort, connection.drain)


class Connection(asyncio.Protocol, Generic[P]):
    """One connection.

    Attributes:
        share: Its share of the port's buffer budget.
    """

    # Attributes without slots would be looked up in a dictionary (3 us per HTTP request).
    __slots__ = (
        *("_lifetime_s", "_lingering", "_paused", "_phase", "_rest", "_sending", "_since"),
        *("_transport", "_turn_is_due", "loop", "port", "share"),
    )

    _PIECE_BYTES: ClassVar[float] = float("inf")
    """Larger reads go through `read_on`."""

    _TAKEN_BYTES: ClassVar[int] = TAKEN_BYTES
    """Bytes that a client must take from the send buffer within the body timeout."""

    def __init__(self, port: P, free_bytes: int = 0) -> None:
        """Waits for its transport. Its first `free_bytes` do not count in the budget."""
        self.port = port
        self.loop = asyncio.get_running_loop()
        self.share = port.budget.share(free_bytes)
        self._rest: bytes | memoryview = b""  # received but not parsed
        self._paused = self._turn_is_due = False
        self._lingering: LingeringClose | None = None
        self._sending: SendProgress | None = None  # while the send buffer is full
        self._lifetime_s = lifetime_s(port.settings)
        self._phase = Phase.NEW
        self._since = self.loop.time()  # the begin of what is timed: idleness, or the current part of a request

    # Interface of the codecs' connections.

    def receive(self, data: bytes) -> None:
        raise NotImplementedError

    def read_on(self) -> None:
        """Reads up to the limit of a turn from `_rest`; then pauses until the next turn, or resumes."""
        raise NotImplementedError

    def drain(self) -> None:
        """Ends the connection once nothing is in flight; called repeatedly."""
        raise NotImplementedError

    # Callbacks of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.port.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self.port.connections.discard(self)
        self._phase = Phase.LOST
        if self._lingering is not None:
            self._lingering.cancel()
        self._rest = b""
        self.share.close()

    def data_received(self, data: bytes) -> None:
        """Passes on short reads. Longer ones are read in turns, after earlier data."""
        if self._phase >= Phase.LAST:
            if self._lingering is not None:
                self._lingering.received(len(data))
        elif self._paused:
            self._rest = bytes(self._rest) + data
            self._transport.pause_reading()  # over TLS, reading continues for a while
        elif len(data) > self._PIECE_BYTES:
            self._rest = data
            self.read_on()
        else:
            self.receive(data)

    def pause_writing(self) -> None:
        """Starts the time limit for a client that does not take its replies."""
        self._sending = SendProgress(self._transport.get_write_buffer_size(), self._TAKEN_BYTES)

    def resume_writing(self) -> None:
        self._sending = None

    # Reading in turns.

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
        """Reads on; returns the approximate seconds of work that it starts for later turns."""
        self._turn_is_due = False
        if self._phase < Phase.LINGERING and not self._transport.is_closing():
            run_guarded(self.abort, self.read_on)
        return 0.0

    # Calls from the port.

    def tick(self, seconds: float) -> None:
        self._lifetime_s -= seconds
        sending = self._sending
        if sending is not None:
            waited_s = sending.wait(self._transport.get_write_buffer_size(), seconds)
            # The first tick comes before its interval is over.
            if waited_s - seconds >= self.port.body_timeout_s:
                self.abort()

    def abort(self) -> None:
        """Ends the connection at once, without another message."""
        self._transport.abort()

    @property
    def descriptor(self) -> int:
        return int(self._transport.get_extra_info("socket").fileno())

    def idle_since(self) -> tuple[bool, float] | None:
        """See `Closable`. A lingering connection is idle once its client has received everything."""
        lingers = self._phase is Phase.LINGERING and not unsent_bytes(self._transport)
        if self._transport.is_closing() or not (self._phase <= Phase.IDLE or lingers):
            return None
        return self._phase is Phase.IDLE, self._since

    def linger(self, quiet_s: float, *, heard_all: bool = False) -> None:
        """Ends the connection after the written data, which the client can read even if it still sends.

        Args:
            quiet_s: Seconds for which further input is discarded.
            heard_all: Whether the client has closed its half.
        """
        self._phase = Phase.LINGERING
        self._since = self.loop.time()
        self._rest = b""
        if self._lingering is None:
            pace_s = self.port.body_timeout_s
            self._lingering = LingeringClose(self._transport, quiet_s=quiet_s, pace_s=pace_s, heard_all=heard_all)
