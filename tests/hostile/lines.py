"""An attacker's connection: it sends what it is told, valid or not, within its rate limit."""

from __future__ import annotations

import select
import socket
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Self

from bertserve.loadtest.generator import frames
from bertserve.loadtest.generator.frames import END_HEADERS, END_STREAM, HEADERS, LARGEST, WINDOW, frame
from bertserve.loadtest.generator.grpc_messages import METHOD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

HOST = "127.0.0.1"
Field = tuple[str, str]
_CHUNK_BYTES = 32_768
_READ_BYTES = 1 << 18
_CONNECT_S = 5.0
_PATIENCE_S = 0.05


class Over(Exception):
    """The time of the attack is over."""


@dataclass(slots=True)
class Pace:
    """Send budget shared by the consecutive connections of one slot.

    Attributes:
        bytes_per_s: Long-run rate; bursts of up to a tenth of a second's worth are allowed.
        until: End of the attack on the clock `time.monotonic`.
        sent: Bytes so far.
    """

    bytes_per_s: float
    until: float
    sent: int = 0
    _since: float = field(default_factory=time.monotonic)

    def allowed(self, size: int) -> int:
        """Number of these bytes that may be sent now, at least one; waits for them."""
        while True:
            now = time.monotonic()
            if now >= self.until:
                raise Over
            room = int((now - self._since + 0.1) * self.bytes_per_s) - self.sent
            if room >= min(size, _CHUNK_BYTES):
                return min(size, room)
            time.sleep(min(0.01, self.until - now))

    def rest(self, seconds: float) -> None:
        """Sends nothing for this long."""
        left = self.until - time.monotonic()
        time.sleep(max(0.0, min(seconds, left)))
        if left <= seconds:
            raise Over


class Line:
    """One connection, in a `with` block. All waits raise `Over`, and OSError if the server closed the connection.

    Attributes:
        pace: Rate limit of sending.
        reads: Whether it reads what the server sends.
    """

    def __init__(self, port: int, pace: Pace) -> None:
        self.pace = pace
        self.reads = True
        self._port = port
        self._others: list[socket.socket] = []
        self._socket = self._connected()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for opened in (self._socket, *self._others):
            opened.close()

    def open_others(self, count: int) -> Sequence[socket.socket]:
        """Opens more connections, closed with this one."""
        for _ in range(count):
            self.pace.allowed(1)
            self._others.append(self._connected())
        return self._others

    def send(self, data: bytes) -> None:
        """Sends all of it, and reads meanwhile."""
        left = memoryview(data)
        while left:
            size = self.pace.allowed(len(left))
            try:
                sent = self._socket.send(left[:size])
            except BlockingIOError:
                select.select([self._socket] if self.reads else [], [self._socket], [], _PATIENCE_S)
                sent = 0
            self.pace.sent += sent
            left = left[sent:]
            self.read()

    def wait(self, condition: Callable[[], object], limit_s: float = 1.0) -> None:
        """Reads until the condition is true, or for this long."""
        limit = time.monotonic() + limit_s
        while not condition() and time.monotonic() < limit:
            self.pace.allowed(1)
            select.select([self._socket], [], [], _PATIENCE_S)
            self.read()

    def hold(self) -> None:
        """Does nothing more until the end."""
        self.wait(lambda: False, float("inf"))

    def read(self) -> None:
        """Reads what is available."""
        while self.reads:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                raise ConnectionResetError
            self.received(data)

    def received(self, data: bytes) -> None:
        """Ignores what was read."""

    def _connected(self) -> socket.socket:
        made = socket.create_connection((HOST, self._port), _CONNECT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setblocking(False)
        return made


class H2Line(Line):
    """A connection to the gRPC port.

    Attributes:
        windows: Send windows of the streams, as granted by the server.
        replied: Streams on which a reply has begun, or that were reset.
        ended: Streams that the server has ended or reset.
        last: Number of the newest stream.
    """

    def __init__(self, port: int, pace: Pace) -> None:
        """Connects without sending anything."""
        super().__init__(port, pace)
        self.windows: dict[int, int] = defaultdict(lambda: WINDOW)
        self.replied: set[int] = set()
        self.ended = 0
        self.last = -1
        self._rest = b""

    def begin(self, *values: tuple[int, int], window: int = LARGEST - WINDOW) -> None:
        """Sends the preface, the settings, and the increment of the connection's window."""
        self.send(frames.PREFACE + frames.settings(*values) + (frames.window_update(0, window) if window else b""))

    def stream(self) -> int:
        """Number of the next stream."""
        self.last += 2
        return self.last

    def open(self, path: str = METHOD, *more: Field) -> int:
        """Begins a call on a new stream; returns its number."""
        self.send(frame(HEADERS, END_HEADERS, self.stream(), call_block(path, *more)))
        return self.last

    def message(self, stream: int, message: bytes, flags: int = END_STREAM) -> None:
        """Sends a message in frames as the stream's window allows; ends the connection if no grant comes."""
        at = 0
        while at < len(message):
            self.wait(lambda: self.windows[stream] > 0, 5.0)
            size = min(frames.FRAME_BYTES, len(message) - at, self.windows[stream])
            if size <= 0:
                raise ConnectionAbortedError
            self.windows[stream] -= size
            at += size
            self.send(frame(frames.DATA, flags if at == len(message) else 0, stream, message[at - size : at]))

    def wait_for_replies(self, count: int, limit_s: float) -> None:
        self.wait(lambda: len(self.replied) >= count, limit_s)

    def wait_for_ends(self, count: int) -> None:
        self.wait(lambda: self.ended >= count)

    def received(self, data: bytes) -> None:
        """Counts grants and ends; a GOAWAY with a reason ends the connection."""
        arrived, self._rest = frames.split(self._rest + data)
        for kind, flags, number, payload in arrived:
            if kind in {HEADERS, frames.RST_STREAM}:
                self.replied.add(number)
            if kind == frames.WINDOW_UPDATE:
                self.windows[number] += int.from_bytes(payload, "big")
            elif kind == frames.RST_STREAM or (kind <= HEADERS and flags & END_STREAM):
                self.ended += 1
                self.windows.pop(number, None)
            elif kind == frames.GOAWAY and any(payload[4:8]):
                raise ConnectionResetError


def call_fields(path: str = METHOD) -> list[Field]:
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", HOST)]
    return [*pseudo, ("te", "trailers"), ("content-type", "application/grpc")]


@cache
def call_block(path: str = METHOD, *more: Field) -> bytes:
    """The header block of a call, as literals without indexing."""
    return frames.header_block([*call_fields(path), *more])
