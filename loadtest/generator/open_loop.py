"""An open-loop generator process: sends requests on schedule and records the results.

`python -m bertserve.loadtest.generator.open_loop` reads a line of JSON, a `Job`, and reports with an empty chunk (see
records.py) that it is ready. It then reads a second line, the start time, and from then on writes chunks of records.
One thread waits for the next send time or a reply, whichever comes first, and does nothing else meanwhile: it often
shares its cores with the server.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import resource
import select
import socket
import sys
import time
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.errors import NEVER_SENT, BenchError
from bertserve.loadtest.generator.answers import Answers
from bertserve.loadtest.generator.arrivals import choices, schedule
from bertserve.loadtest.generator.messages import Target, messages
from bertserve.loadtest.generator.records import PACK, READY, chunk
from bertserve.loadtest.generator.scenario import Phase, Scenario
from bertserve.loadtest.generator.texts import Text, inputs_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.loadtest.generator.wire import Reply, Wire

_READ_BYTES = 1 << 18
_TELL_S = 0.2
_HANDSHAKES_S = 10.0
_LANES = {"http": 32, "grpc": 4}
"""Connections opened before the start."""

_MAX_LANES = {"http": 900, "grpc": 16}
"""Maximum connections of a generator. Further requests wait for a free one, which counts toward their latency."""

_CONNECTING = {0, errno.EINPROGRESS, errno.EAGAIN}


@dataclass(slots=True, frozen=True)
class Job:
    """The work of one generator.

    Attributes:
        target: The server, as plain values.
        scenario: The load, as plain values.
        rate: Requests per second of all generators together, where a phase's share is 1.
        seed: Seed of the schedule.
        index: Number of this generator; it sends every `of`-th request.
        of: Number of generators.
        patience_s: Timeout of a request, in seconds.
        kinds: Task, weight and texts of each kind of request.
        judges: Whether to validate the content of replies.
    """

    target: dict[str, Any]
    scenario: dict[str, Any]
    rate: float
    seed: int
    index: int
    of: int
    patience_s: float
    kinds: list[tuple[str, float, list[Text]]]
    judges: bool = True

    def load(self) -> Scenario:
        phases = tuple(Phase(**phase) for phase in self.scenario["phases"])
        return Scenario(**{**self.scenario, "phases": phases})


class Request:
    """A request in progress."""

    __slots__ = ("due", "inputs", "intended", "kind", "sent")

    def __init__(self, intended: float, due: float, kind: int) -> None:
        self.intended = intended
        self.due = due  # when the generator got to it
        self.kind = kind
        self.inputs = 1
        self.sent = 0.0


class _Lane:
    """A connection and its requests in flight."""

    __slots__ = ("connection", "is_free", "out", "under_way", "wire")

    def __init__(self, address: tuple[str, int], wire: Wire) -> None:
        self.connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.setblocking(False)
        failure = self.connection.connect_ex(address)
        if failure not in _CONNECTING:
            self.connection.close()
            raise OSError(failure, os.strerror(failure))
        self.wire = wire
        self.out = wire.opening()
        self.under_way: dict[Request, None] = {}
        self.is_free = False

    def send(self, data: bytes) -> bool:
        """Sends data and keeps what the socket does not accept; True once everything is sent.

        Raises:
            OSError: The connection broke.
        """
        if self.out:
            data, self.out = self.out + data, b""
        try:
            sent = self.connection.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            if error.errno not in {errno.ENOTCONN, errno.EINPROGRESS}:
                raise
            sent = 0
        self.out = data[sent:]
        return not self.out


class Generator:
    """The send and receive loop."""

    def __init__(self, job: Job, tell: Callable[[bytes], None]) -> None:
        """Builds the schedule and the requests in advance.

        Args:
            job: The work.
            tell: Called with each chunk.
        """
        scenario = job.load()
        target = Target.read(job.target)
        times = schedule(scenario, job.rate, job.seed)
        kinds = choices([weight for _, weight, _ in job.kinds], len(times), job.seed)
        self._times = times[job.index :: job.of]
        self._kinds = array("q", kinds[job.index :: job.of].tobytes())
        self._supplies = [
            itertools.cycle(zip(messages(target, task, texts), [inputs_in(task, text) for text in texts], strict=True))
            for task, _, texts in job.kinds
        ]
        self._answers = [Answers(target.protocol, task) for task, _, _ in job.kinds] if job.judges else None
        self._target = target
        self._address = target.address()
        self._start = 0.0
        self._patience_s = job.patience_s
        self._tell = tell
        self._lanes: dict[int, _Lane] = {}
        self._free: deque[_Lane] = deque()
        self._waiting: deque[Request] = deque()
        self._poll = select.epoll()
        self._records: list[bytes] = []
        self._faults = {"": 0}
        self._new_faults: list[str] = []

    def connect(self) -> None:
        """Opens the first connections; a failure surfaces with the first request."""
        with contextlib.suppress(OSError):
            for _ in range(_LANES[self._target.transport]):
                self._offer(self._open())
        # TLS handshakes finish before the schedule starts.
        until = time.perf_counter() + _HANDSHAKES_S
        while any(not lane.wire.is_open for lane in self._lanes.values()):
            for ready, events in self._poll.poll(max(0.0, until - time.perf_counter())):
                self._attend(self._lanes[ready], events)
            if time.perf_counter() > until:
                break

    def run(self, start: float) -> None:
        """Sends everything and waits for the last replies.

        Args:
            start: When the schedule begins, on the clock `time.perf_counter`, which all processes share.
        """
        cpu_s = time.process_time()
        self._start = start
        times = array("d", (start + self._times).tobytes())
        clock, index, count = time.perf_counter, 0, len(times)
        next_told = self._start
        while index < count or self._waiting or any(lane.under_way for lane in self._lanes.values()):
            now = clock()
            while index < count and times[index] <= now:
                self._waiting.append(Request(times[index], now, self._kinds[index]))
                index += 1
            while self._waiting and self._send_first():
                pass
            if now >= next_told:
                self._give_up(now)
                self._flush()
                next_told = now + _TELL_S
            until = min(next_told, times[index]) if index < count else next_told
            # `epoll_wait` has a resolution of milliseconds; `select` waits for the same events with microseconds.
            if select.select([self._poll], [], [], max(0.0, until - clock()))[0]:
                for ready, events in self._poll.poll(0):
                    if ready in self._lanes:
                        self._attend(self._lanes[ready], events)
        self._tell(chunk(self._new_faults, self._records, time.process_time() - cpu_s))

    def _send_first(self) -> bool:
        """Sends the oldest waiting request; False if no connection has room for it."""
        request = self._waiting[0]
        try:
            if self._free:
                lane = self._free.popleft()
                lane.is_free = False
                if not lane.wire.room():  # its room has shrunk since
                    return True
            elif len(self._lanes) < _MAX_LANES[self._target.transport]:
                lane = self._open()
            else:
                return False
        except OSError as error:
            self._waiting.popleft()
            self._record(request, f"cannot connect: {error.strerror}")
            return True
        self._waiting.popleft()
        request.sent = time.perf_counter()
        lane.under_way[request] = None
        try:
            message, request.inputs = next(self._supplies[request.kind])
            self._send(lane, lane.wire.request(message, request))
        except OSError as error:
            self._lose(lane, f"connection broken: {error.strerror}")
        else:
            self._offer(lane)
        return True

    def _send(self, lane: _Lane, data: bytes) -> None:
        if not lane.send(data):
            self._poll.modify(lane.connection, select.EPOLLIN | select.EPOLLOUT)

    def _open(self) -> _Lane:
        lane = _Lane(self._address, self._target.wire())
        self._lanes[lane.connection.fileno()] = lane
        self._poll.register(lane.connection, select.EPOLLIN | (select.EPOLLOUT if lane.out else 0))
        return lane

    def _offer(self, lane: _Lane) -> None:
        """Marks a connection as free if it has room."""
        if not lane.is_free and lane.wire.room():
            lane.is_free = True
            self._free.append(lane)

    def _attend(self, lane: _Lane, events: int) -> None:
        """Receives data, and sends data that the socket did not accept before."""
        try:
            if events & select.EPOLLOUT and lane.send(b""):
                self._poll.modify(lane.connection, select.EPOLLIN)
            if events & ~select.EPOLLOUT:
                self._read(lane)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(lane, f"connection broken: {error.strerror}")
        except BenchError as error:
            self._lose(lane, str(error).partition("\n")[0].rstrip(":"))

    def _read(self, lane: _Lane) -> None:
        data = lane.connection.recv(_READ_BYTES)
        if not data and not lane.under_way:  # the server closed an idle connection
            self._lose(lane, "")
            return
        for reply in lane.wire.feed(data):
            self._finish(lane, reply)
        if owed := lane.wire.owed():
            self._send(lane, owed)
        if lane.wire.room():
            self._offer(lane)
        elif not lane.under_way and not lane.out:  # no room, and no reply to wait for
            self._lose(lane, "")

    def _finish(self, lane: _Lane, reply: Reply) -> None:
        done = time.perf_counter()
        request: Request = reply.tag
        if request not in lane.under_way:  # timed out earlier
            return
        del lane.under_way[request]
        fault = self._answers[request.kind].fault(reply, request.inputs) if self._answers else reply.fault
        if fault:
            self._record(request, fault, done)
            return
        served = lane.wire.served(reply.head)
        start = self._start
        self._records.append(
            PACK(
                request.intended - start,
                request.due - start,
                request.sent - start,
                done - start,
                served.tokenize_us,
                served.queue_us,
                served.compute_us,
                served.total_us,
                request.kind,
                0,
            )
        )

    def _lose(self, lane: _Lane, fault: str) -> None:
        """Closes a connection and fails its requests in flight."""
        del self._lanes[lane.connection.fileno()]
        self._poll.unregister(lane.connection)
        lane.connection.close()
        if lane.is_free:
            self._free.remove(lane)
        for request in lane.under_way:
            self._record(request, fault)
        lane.under_way.clear()

    def _give_up(self, now: float) -> None:
        """Fails requests that time out, and closes connections that carry one request at a time with them."""
        since = now - self._patience_s
        fault = f"no answer within {self._patience_s:g} s"
        while self._waiting and self._waiting[0].intended < since:
            most = _MAX_LANES[self._target.transport]
            self._record(self._waiting.popleft(), f"{NEVER_SENT}: {most} connections busy for {self._patience_s:g} s")
        for lane in list(self._lanes.values()):
            late = [request for request in lane.under_way if request.intended < since]
            if late and not lane.wire.room():
                self._lose(lane, fault)
                continue
            for request in late:
                del lane.under_way[request]
                self._record(request, fault)

    def _record(self, request: Request, fault: str, done: float | None = None) -> None:
        """Records a failed request."""
        index = self._faults.get(fault)
        if index is None:
            index = self._faults[fault] = len(self._faults)
            self._new_faults.append(fault)
        done = time.perf_counter() if done is None else done
        times = (time - self._start for time in (request.intended, request.due, request.sent or done, done))
        self._records.append(PACK(*times, -1.0, -1.0, -1.0, -1.0, request.kind, index))

    def _flush(self) -> None:
        if self._records:
            self._tell(chunk(self._new_faults, self._records))
            self._records, self._new_faults = [], []


def main() -> None:
    """Runs the job from standard input."""
    values = json.loads(sys.stdin.readline())
    values["kinds"] = [(task, weight, texts) for task, weight, texts in values["kinds"]]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Makes sleeps precise: the system's default timer slack adds up to 50 us.
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1000", encoding="ascii")
    # The loop creates no reference cycles, so garbage collection would only add pauses to the figures.
    gc.disable()
    output = sys.stdout.buffer

    def tell(data: bytes) -> None:
        output.write(data)
        output.flush()

    generator = Generator(Job(**values), tell)
    generator.connect()
    tell(READY)
    generator.run(float(sys.stdin.readline()))


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(1)  # the parent process reports to the user
