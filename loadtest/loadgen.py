"""MLPerf's own load generator against the server, as a second opinion on ours.

    python -m loadtest.loadgen --target http://127.0.0.1:8000 --scenario server --rate 100 --p99-ms 2

Its package is `mlcommons-loadgen`. SingleStream sends a text when the last one is answered; Server sends on a Poisson
schedule of its own and measures from the scheduled time. Beside each stands ours with the same texts: the closed loop,
and the open loop of `bertserve load`. Exit code 0 once it is measured, 1 where it cannot be or a reply is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import re
import selectors
import sys
import tempfile
import threading
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from loadtest.errors import BenchError
from loadtest.generator.closed_loop import Lane, connect, measure
from loadtest.generator.http1 import HttpWire, post_bytes
from loadtest.generator.messages import Target
from loadtest.generator.run import Kind, Load
from loadtest.generator.run import run as drive
from loadtest.generator.scenario import Phase, Scenario
from loadtest.generator.workload import spoken_text
from loadtest.report.result import Result

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from loadtest.generator.wire import Reply

SCENARIOS = ("single-stream", "server")
_TEXTS = 200
_LANES = 64
_NS_PER_MS = 1e6
_POLL_S = 0.1
_LINE = re.compile(r"^(?P<name>[^:]+?)\s*: (?P<value>.+)$", re.MULTILINE)


@dataclass(slots=True, frozen=True)
class Settings:
    """What a run is told.

    Attributes:
        target: The server, over HTTP.
        scenario: One of `SCENARIOS`.
        rate: Queries a second of the scenario server.
        seconds: How long it lasts at least.
        p99_ms: What the scenario server holds the 99th percentile to.
        tokens: Length of the texts, about.
        out: Where LoadGen's logs and the figures go, if anywhere.
    """

    target: Target
    scenario: str
    rate: float
    seconds: float
    p99_ms: float
    tokens: int
    out: Path | None


@dataclass(slots=True, frozen=True)
class Figures:
    """What one generator says.

    Attributes:
        generator: `MLPerf LoadGen` or `ours`.
        scenario: One of `SCENARIOS`.
        p50_ms: Median latency.
        p99_ms: 99th percentile.
        per_s: Answers a second.
        valid: LoadGen's own verdict, in its word: it asks for more queries than a short run has; empty for ours.
    """

    generator: str
    scenario: str
    p50_ms: float
    p99_ms: float
    per_s: float
    valid: str = ""


class OneByOne:
    """The server as LoadGen's system under test: a query is answered where it is asked.

    Attributes:
        failure: Why the run says nothing, if it does not: LoadGen has no word for a failed query.
    """

    def __init__(self, address: tuple[str, int], requests: Sequence[bytes]) -> None:
        """Connects.

        Args:
            address: Of the server.
            requests: One for each sample of the library.
        """
        self.failure: BenchError | None = None
        self._requests = requests
        self._connection = connect(*address)
        self._lane = Lane(self._connection, HttpWire(), _check)

    def issue(self, samples: Sequence[Any]) -> None:
        """Answers queries, one after the other."""
        for sample in samples:
            if self.failure is None:
                try:
                    self._lane.exchange(self._requests[sample.index])
                except BenchError as error:
                    self.failure = error
            _complete(sample.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self._connection.close()


class SideBySide:
    """The same for queries that do not wait for one another: a thread of its own reads the answers.

    Attributes:
        failure: As `OneByOne` has it.
    """

    def __init__(self, address: tuple[str, int], requests: Sequence[bytes]) -> None:
        """Connects.

        Args:
            address: Of the server.
            requests: One for each sample of the library.
        """
        self.failure: BenchError | None = None
        self._requests = requests
        self._queries: dict[Lane, int] = {}
        self._selector = selectors.DefaultSelector()
        self._stack = contextlib.ExitStack()
        self._over = False
        self._free: deque[Lane] = deque()
        self._freed = threading.Semaphore(_LANES)
        for _ in range(_LANES):
            lane = Lane(self._stack.enter_context(connect(*address)), HttpWire(), _check)
            self._selector.register(lane.connection, selectors.EVENT_READ, lane)
            self._free.append(lane)
        self._reader = threading.Thread(target=self._read)

    def issue(self, samples: Sequence[Any]) -> None:
        """Sends queries on connections that are free."""
        for sample in samples:
            self._freed.acquire()
            lane = self._free.popleft()
            self._queries[lane] = sample.id
            try:
                lane.send((self._requests[sample.index],))
            except OSError as error:
                self._end(lane, BenchError(f"cannot send: {error}"))

    def __enter__(self) -> Self:
        """Starts reading."""
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops reading and closes."""
        self._over = True
        self._reader.join()
        self._selector.close()
        self._stack.close()

    def _read(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(_POLL_S):
                lane = key.data
                try:
                    if lane.receive():
                        self._end(lane, None)
                except BenchError as error:
                    self._selector.unregister(key.fileobj)
                    self._end(lane, error)

    def _end(self, lane: Lane, failure: BenchError | None) -> None:
        self.failure = self.failure or failure
        if (query := self._queries.pop(lane, None)) is not None:
            _complete(query)
            self._free.append(lane)
            self._freed.release()


def _complete(query: int) -> None:
    import mlperf_loadgen  # noqa: PLC0415  an extra's package

    mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(query, 0, 0)])


def _check(reply: Reply) -> None:
    if reply.fault or not reply.body.startswith(b"[["):
        raise BenchError(f"a wrong reply: {reply.fault or reply.body[:100]!r}")


def run(settings: Settings) -> list[Figures]:
    """Measures with LoadGen and with ours.

    Raises:
        BenchError: LoadGen is not installed, the server does not answer, or a reply is wrong.
    """
    dice = random.Random(1)
    texts = [spoken_text(settings.tokens, dice) for _ in range(_TEXTS)]
    requests = [post_bytes(settings.target.authority, "/embed", {"inputs": text}) for text in texts]
    theirs = _loadgen(settings, requests)
    ours = _closed_loop(settings, requests) if settings.scenario == "single-stream" else _open_loop(settings, texts)
    return [theirs, ours]


def _loadgen(settings: Settings, requests: Sequence[bytes]) -> Figures:
    try:
        import mlperf_loadgen as loadgen  # noqa: PLC0415  an extra's package
    except ImportError:
        raise BenchError("MLPerf LoadGen is not installed: pip install mlcommons-loadgen") from None
    single = settings.scenario == "single-stream"
    asked = loadgen.TestSettings()
    asked.mode = loadgen.TestMode.PerformanceOnly
    asked.scenario = loadgen.TestScenario.SingleStream if single else loadgen.TestScenario.Server
    asked.min_duration_ms = round(1e3 * settings.seconds)
    asked.min_query_count = 1
    asked.server_target_qps = settings.rate
    asked.server_target_latency_ns = round(_NS_PER_MS * settings.p99_ms)
    asked.server_target_latency_percentile = asked.single_stream_target_latency_percentile = 0.99
    with contextlib.ExitStack() as stack:
        folder = settings.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        logs = loadgen.LogSettings()
        logs.log_output.outdir = str(folder)
        logs.enable_trace = False
        address = settings.target.address()
        target: OneByOne | SideBySide = OneByOne(address, requests) if single else SideBySide(address, requests)
        stack.enter_context(target)
        system = loadgen.ConstructSUT(target.issue, lambda: None)
        library = loadgen.ConstructQSL(len(requests), len(requests), lambda _: None, lambda _: None)
        loadgen.StartTestWithLogSettings(system, library, asked, logs)
        loadgen.DestroyQSL(library)
        loadgen.DestroySUT(system)
        if target.failure is not None:
            raise target.failure
        return summary(settings.scenario, (folder / "mlperf_log_summary.txt").read_text(encoding="utf-8"))


def summary(scenario: str, text: str) -> Figures:
    """What LoadGen's summary says.

    Args:
        scenario: One of `SCENARIOS`.
        text: Of its `mlperf_log_summary.txt`.

    Raises:
        BenchError: It lacks a figure.
    """
    lines = {found["name"].strip(): found["value"].strip() for found in _LINE.finditer(text)}
    rate = "QPS w/o loadgen overhead" if scenario == "single-stream" else "Completed samples per second"
    try:
        return Figures(
            "MLPerf LoadGen",
            scenario,
            int(lines["50.00 percentile latency (ns)"]) / _NS_PER_MS,
            int(lines["99.00 percentile latency (ns)"]) / _NS_PER_MS,
            float(lines[rate]),
            lines["Result is"],
        )
    except KeyError as error:
        raise BenchError(f"LoadGen's summary has no line {error}:\n{text}") from error


def _closed_loop(settings: Settings, requests: Sequence[bytes]) -> Figures:
    with connect(*settings.target.address()) as connection:
        sample = measure([Lane(connection, HttpWire(), _check)], itertools.cycle(requests), 1, 0.0, settings.seconds)
    return Figures("ours", settings.scenario, sample.p50_ms, sample.p99_ms, sample.per_s)


def _open_loop(settings: Settings, texts: Sequence[str]) -> Figures:
    scenario = Scenario("server", "", (Phase(settings.seconds, 1, 1),), {settings.tokens: 1.0})
    load = Load(scenario, settings.rate, (Kind("texts", "embed", 1.0, tuple(texts)),))
    found = drive(settings.target, load, Result({}, settings.seconds), lambda *_: None)
    if found.failed:
        raise BenchError(f"{found.failed} of {found.offered} requests failed: {', '.join(found.faults)}")
    latency = found.latency
    return Figures(
        "ours", settings.scenario, latency.percentile_ms(50), latency.percentile_ms(99), found.answered_per_s
    )


def parse(argv: Sequence[str] | None) -> Settings:
    """The settings that a command line names."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.loadgen", description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--scenario", choices=SCENARIOS, default="single-stream")
    parser.add_argument("--rate", type=float, default=100.0, help="queries a second of `server` (default: 100)")
    parser.add_argument("--seconds", type=float, default=10.0, help="least duration (default: 10)")
    parser.add_argument("--p99-ms", type=float, default=10.0, help="what `server` holds p99 to (default: 10)")
    parser.add_argument("--tokens", type=int, default=8, help="length of the texts, about (default: 8)")
    parser.add_argument("--out", type=Path, help="directory for LoadGen's logs and figures.json")
    arguments = parser.parse_args(argv)
    if min(arguments.rate, arguments.seconds, arguments.p99_ms, arguments.tokens) <= 0:
        parser.error("--rate, --seconds, --p99-ms and --tokens must be positive")
    words = vars(arguments)
    try:
        target = Target.of(words.pop("target"), "http", "")
    except BenchError as error:
        parser.error(str(error))
    if target.tls is not None:
        parser.error(f"--target {target.url}: LoadGen asks without TLS; name it as http://host:port")
    return Settings(target=target, **words)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; returns 1 where it cannot."""
    settings = parse(argv)
    try:
        results = run(settings)
    except BenchError as error:
        print(f"loadgen: {error}", file=sys.stderr)
        return 1
    for result in results:
        valid = f", {result.valid}" if result.valid else ""
        print(
            f"{result.scenario}, {result.generator}: p50 {result.p50_ms:.2f} ms, p99 {result.p99_ms:.2f} ms,"
            f" {result.per_s:.0f}/s{valid}"
        )
    if settings.out is not None:
        figures = json.dumps([asdict(result) for result in results], indent=1)
        (settings.out / "figures.json").write_text(figures + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
