"""Closed loop: a fixed number of requests in flight, where each reply starts the next request.

It measures the latency of an idle server and the throughput of a busy one. Its latencies omit everything that happens
while it waits, so tail latency needs an open loop (see arrivals.py).
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.report.sample import Window, sample_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bertserve.loadtest.generator.wire import Reply, Wire
    from bertserve.loadtest.report.sample import Exchange, Sample

_READ_BYTES = 1 << 16
SILENCE_S = 10.0
"""After this many seconds without a reply, the server counts as hung."""

_SILENCE_TIMEVAL = struct.pack("ll", int(SILENCE_S), 0)


def connect(host: str, port: int) -> socket.socket:
    """A TCP connection without Nagle's delay.

    Raises:
        BenchError: The server refuses the connection.
    """
    try:
        made = socket.create_connection((host, port), SILENCE_S)
    except OSError as error:
        raise BenchError(f"cannot connect to {host}:{port}: {error}") from error
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The socket blocks with the system's timeout: Python's own timeout adds a `poll` call to each exchange.
    made.settimeout(None)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SILENCE_TIMEVAL)
    return made


class Lane:
    """A connection and its requests in flight."""

    def __init__(self, connection: socket.socket, wire: Wire, check: Callable[[Reply], None]) -> None:
        """Sends the opening bytes of the wire.

        Args:
            connection: From `connect`.
            wire: A new one.
            check: Raises BenchError for an unexpected reply.
        """
        self.connection = connection
        self._wire = wire
        self._check = check
        if opening := wire.opening():
            connection.sendall(opening)

    def send(self, messages: Sequence[bytes]) -> None:
        """Sends requests, each tagged with the current time."""
        wire, sent = self._wire, time.perf_counter()
        self.connection.sendall(b"".join([wire.request(message, sent) for message in messages]))

    def receive(self) -> Sequence[Reply]:
        """Receives data and returns the complete replies, checked.

        Raises:
            BenchError: The server was silent for too long, the connection broke, or a reply is wrong.
        """
        try:
            replies = self._wire.feed(self.connection.recv(_READ_BYTES))
            if owed := self._wire.owed():
                self.connection.sendall(owed)
        except BlockingIOError:
            raise BenchError(f"no reply within {SILENCE_S:g} s") from None
        except OSError as error:
            raise BenchError(f"the connection failed: {error}") from error
        for reply in replies:
            self._check(reply)
        return replies

    def exchange(self, message: bytes) -> Reply:
        """Sends one request and waits for its reply.

        Raises:
            BenchError: The server accepts no further request on this connection, or `receive` fails.
        """
        if not self._wire.room():
            raise BenchError(
                "the server closes the connection, so it is stopping or restarting; retry when its /readyz returns 200"
            )
        self.send((message,))
        while not (replies := self.receive()):
            pass
        return replies[0]


def measure(lanes: Sequence[Lane], supply: Iterator[bytes], count: int, warm_up_s: float, seconds: float) -> Sample:
    """Keeps `count` requests in flight over all lanes, and times those whose replies arrive after the warm-up.

    `supply` is an endless iterator of requests.

    Raises:
        BenchError: A reply is wrong or late.
    """
    cpu = time.process_time()
    window = Window.after(time.perf_counter(), warm_up_s, seconds)
    exchanges = (
        one_by_one(lanes[0], supply, window.end) if count == 1 else side_by_side(lanes, supply, count, window.end)
    )
    return sample_of(exchanges, window, time.process_time() - cpu)


def one_by_one(lane: Lane, supply: Iterator[bytes], end: float) -> list[Exchange]:
    """Sends each request when the previous reply is complete, until `end` (seconds, `time.perf_counter`)."""
    clock = time.perf_counter
    exchanges: list[Exchange] = []
    for request in supply:
        reply = lane.exchange(request)
        done = clock()
        exchanges.append((reply.tag, done))
        if done >= end:
            break
    return exchanges


def side_by_side(lanes: Sequence[Lane], supply: Iterator[bytes], count: int, end: float) -> list[Exchange]:
    """Keeps `count` requests in flight over all lanes until `end`, then waits for the rest."""
    clock = time.perf_counter
    exchanges: list[Exchange] = []
    with selectors.DefaultSelector() as selector:
        for index, lane in enumerate(lanes):
            selector.register(lane.connection, selectors.EVENT_READ, lane)
            lane.send([next(supply) for _ in range(index, count, len(lanes))])
        busy = count
        while busy:
            ready = selector.select(SILENCE_S)
            if not ready:
                raise BenchError(f"no reply within {SILENCE_S:g} s")
            for key, _ in ready:
                replies = key.data.receive()
                if not replies:
                    continue
                done = clock()
                exchanges += [(reply.tag, done) for reply in replies]
                if done < end:
                    key.data.send([next(supply) for _ in replies])
                else:
                    busy -= len(replies)
    return exchanges
