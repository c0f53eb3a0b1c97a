"""The polite client: good requests over both wires at a steady rate, and the outcome of each."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.closed_loop import Lane, connect
from bertserve.loadtest.generator.messages import Target, messages
from tests.hostile.lines import HOST

if TYPE_CHECKING:
    from types import TracebackType

    from bertserve.loadtest.generator.wire import Reply
    from tests.hostile.victim import Victim

WIRES = ("http", "grpc")


@dataclass(slots=True, frozen=True)
class Request:
    """One request.

    Attributes:
        intended: Scheduled send time on the clock `time.monotonic`; latency counts from it.
        done: Time of the answer.
        work_s: CPU time of the server between sending and answer: work done for others first, independent of how busy
            the machine is.
        fault: Reason of a failure; empty if the request was answered.
    """

    intended: float
    done: float
    work_s: float
    fault: str


class Polite:
    """A client with one connection over each wire; use it in a `with` block.

    A request that is due while the one before is under way is not sent. It gets the completion time and outcome of that
    one, as one of many clients would (HdrHistogram's correction of coordinated omission).
    """

    def __init__(self, victim: Victim, model: str, per_s: float) -> None:
        self.requests: dict[str, list[Request]] = {wire: [] for wire in WIRES}
        self._victim = victim
        self._targets = [Target(wire, HOST, victim.ports[wire], model) for wire in WIRES]
        self._every_s = 1 / per_s
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(target,)) for target in self._targets]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def between(self, begin: float, end: float) -> dict[str, list[Request]]:
        """Requests scheduled in a stretch, by wire; waits until all are answered."""
        while any(not made or made[-1].intended < end for made in self.requests.values()):
            if not all(thread.is_alive() for thread in self._threads):
                raise BenchError("the polite client has ended")
            time.sleep(self._every_s)
        return {
            wire: [request for request in made if begin <= request.intended < end]
            for wire, made in self.requests.items()
        }

    def faults(self, begin: float = 0.0, end: float = 0.0) -> list[str]:
        """Failures in a stretch, or so far."""
        made = self.between(begin, end or time.monotonic())
        return [f"{wire}: {request.fault}" for wire in WIRES for request in made[wire] if request.fault]

    def most_work_ms(self, begin: float, end: float) -> float:
        """The most CPU time that the server took for others while a request of this stretch waited."""
        return max(1e3 * request.work_s for made in self.between(begin, end).values() for request in made)

    def _run(self, target: Target) -> None:
        [message] = messages(target, "embed", ["a polite request"])
        made = self.requests[target.protocol]
        intended = time.monotonic()
        with contextlib.ExitStack() as opened:
            lane: Lane | None = None
            wire = target.wire()
            while not self._end.wait(max(0.0, intended - time.monotonic())):
                fault = ""
                work_s = self._victim.cpu_s()
                try:
                    if lane is None:
                        wire = target.wire()
                        lane = Lane(opened.enter_context(connect(HOST, target.port)), wire, _check)
                    lane.exchange(message)
                except (BenchError, OSError) as error:
                    fault = str(error) or type(error).__name__
                work_s, done = self._victim.cpu_s() - work_s, time.monotonic()
                whole_s = done - intended
                while intended < done:
                    made.append(Request(intended, done, work_s * (done - intended) / whole_s, fault))
                    intended += self._every_s
                if fault or not wire.room():
                    opened.close()
                    lane = None


def _check(reply: Reply) -> None:
    if reply.fault or not reply.body:
        raise BenchError(f"{reply.fault or 'an empty answer'}: {reply.body[:200]!r}")
