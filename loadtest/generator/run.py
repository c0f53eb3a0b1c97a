"""One open-loop run: starts generator processes and merges their records into one result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import select
import selectors
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.child import module_process
from bertserve.loadtest.generator.records import READY, ChunkReader
from bertserve.loadtest.generator.scenario import Phase
from bertserve.loadtest.report.result import Result

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    from bertserve.loadtest.generator.messages import Target
    from bertserve.loadtest.generator.scenario import Scenario
    from bertserve.loadtest.generator.texts import Text

_PER_PROCESS = 4000.0
"""Requests per second that one generator sends without falling behind."""

_READY_S = 60.0
_SOON_S = 0.1
"""Lead time between announcing the start to the generators and the start itself."""

_NULL_S = 1.0
_GRACE_S = 10.0
_SHOW_S = 0.5
_READ_BYTES = 1 << 20


@dataclass(slots=True, frozen=True)
class Kind:
    """Requests that differ only in their texts.

    Attributes:
        name: Label in figures.
        task: The task.
        weight: Relative frequency.
        texts: Sent in turn.
        lengths: Range of token counts in the texts, if the name does not state it.
    """

    name: str
    task: str
    weight: float
    texts: tuple[Text, ...]
    lengths: str = ""


@dataclass(slots=True, frozen=True)
class Load:
    """The load for all generators.

    Attributes:
        scenario: The load.
        rate: Requests per second where a phase's share is 1.
        kinds: The kinds of requests.
        seed: Seed of the schedule.
        patience_s: Timeout of a request, in seconds.
        judges: Whether to validate the content of replies.
    """

    scenario: Scenario
    rate: float
    kinds: tuple[Kind, ...]
    seed: int = 1
    patience_s: float = 10.0
    judges: bool = True

    @property
    def peak_per_s(self) -> float:
        """The highest rate of the schedule."""
        return self.rate * max(max(phase.begin, phase.end) for phase in self.scenario.phases)

    @property
    def processes(self) -> int:
        """Number of generator processes."""
        return max(1, math.ceil(self.peak_per_s / _PER_PROCESS))


def run(
    target: Target,
    load: Load,
    result: Result,
    show: Callable[[Result, float], None],
) -> Result:
    """Runs a load against a server and fills the result.

    Args:
        target: The server.
        load: The load.
        result: A new one.
        show: Called periodically with the result so far and the elapsed seconds of the schedule.

    Raises:
        BenchError: A generator failed.
    """
    count = load.processes
    readers = [ChunkReader([""]) for _ in range(count)]
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        processes = [
            stack.enter_context(module_process("bertserve.loadtest.generator.open_loop")) for _ in range(count)
        ]
        for index, (process, reader) in enumerate(zip(processes, readers, strict=True)):
            stack.callback(process.kill)
            _say(process, _job(target, load, index))
            selector.register(_pipe(process), selectors.EVENT_READ, (process, reader))
        start = _start(processes)
        names = [kind.name for kind in load.kinds]
        end = start + load.scenario.seconds + load.patience_s + _GRACE_S
        shown = start
        while selector.get_map():
            for key, _ in selector.select(_SHOW_S):
                process, reader = key.data
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                    _check_end(process)
                for records in reader.feed(data):
                    result.take(records, reader.faults, names)
            now = time.perf_counter()
            if now > end:
                raise BenchError("a load generator process did not exit in time")
            if now >= shown + _SHOW_S:
                shown = now
                show(result, min(now - start, load.scenario.seconds))
    result.generator.processes = count
    result.generator.cpu_us = sum(reader.cpu_s for reader in readers) / max(1, result.offered) * 1e6
    return result


def measure_generator(target: Target, load: Load, result: Result) -> None:
    """Runs the peak rate against a no-op server and stores the generator's own latency and lateness in `result`.

    Raises:
        BenchError: A generator failed.
    """
    peak = dataclasses.replace(load.scenario, phases=(Phase(_NULL_S, 1, 1),))
    with module_process("bertserve.loadtest.generator.null_server", text=True) as server:
        try:
            port = int(server.stdout.readline()) if server.stdout else 0
            empty = dataclasses.replace(target, host="127.0.0.1", port=port, tls=None)
            asked = dataclasses.replace(load, scenario=peak, rate=load.peak_per_s, judges=False)
            found = run(empty, asked, Result({}, _NULL_S), lambda *_: None)
        finally:
            server.kill()
    result.generator.null = found.latency
    result.generator.null_late = found.generator.late


def _job(target: Target, load: Load, index: int) -> dict[str, object]:
    return {
        "target": dataclasses.asdict(target),
        "scenario": dataclasses.asdict(load.scenario),
        "rate": load.rate,
        "seed": load.seed,
        "index": index,
        "of": load.processes,
        "patience_s": load.patience_s,
        "judges": load.judges,
        "kinds": [(kind.task, kind.weight, kind.texts) for kind in load.kinds],
    }


def _start(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Waits until all generators are ready, sends them the start time, and returns it.

    Raises:
        BenchError: A generator did not become ready.
    """
    for process in processes:
        pipe = _pipe(process)
        if not select.select([pipe], [], [], _READY_S)[0] or len(os.read(pipe.fileno(), len(READY))) < len(READY):
            raise BenchError("a load generator process did not become ready in time")
    start = time.perf_counter() + _SOON_S
    for process in processes:
        _say(process, start)
    return start


def _say(process: subprocess.Popen[bytes], what: object) -> None:
    if process.stdin is None:
        raise BenchError("a load generator process was started without pipes")
    try:
        process.stdin.write(json.dumps(what).encode() + b"\n")
        process.stdin.flush()
    except OSError as error:
        raise BenchError("a load generator process exited unexpectedly") from error


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise BenchError("a load generator process was started without pipes")
    return process.stdout


def _check_end(process: subprocess.Popen[bytes]) -> None:
    """Checks the exit code of a generator whose output has ended.

    Raises:
        BenchError: It failed.
    """
    if code := process.wait(_GRACE_S):
        raise BenchError(f"a load generator process exited with code {code}")
