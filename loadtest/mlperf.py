"""MLPerf's LoadGen against a running server, over the Open Inference Protocol.

`python -m bertserve.loadtest.mlperf --scenario NAME` runs one scenario, because LoadGen takes one configuration per
process. Exit codes: 0 LoadGen says VALID, 1 it does not, 2 nothing could be measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.errors import BenchError, check_above_zero
from bertserve.loadtest.generator.answers import Answers
from bertserve.loadtest.generator.closed_loop import Lane, connect, measure
from bertserve.loadtest.generator.discovery import cached_of, models_of
from bertserve.loadtest.generator.messages import KEY_VARIABLE, Target, api_key, batch_message
from bertserve.loadtest.generator.texts import read_texts, texts_for
from bertserve.loadtest.generator.workload import different_texts
from bertserve.serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from bertserve.loadtest.generator.texts import Text
    from bertserve.loadtest.generator.wire import Reply

VALID, INVALID, IMPOSSIBLE = 0, 1, 2
BENCHMARK = "bert"
"""The benchmark whose settings LoadGen uses, such as 130 ms for Server's 99th percentile."""

FULL_S = 600.0
"""Minimum duration of a scenario: https://github.com/mlcommons/inference_policies, inference_rules.adoc."""

_OFFLINE_SAMPLES = 24_576
"""Minimum samples of Offline in the rules, if the data set has as many."""

_TIMEOUT_MS = 30_000
"""The deadline of every request. LoadGen has no rejected requests, so lateness must show as latency."""

_PROBE_S, _PROBE_MESSAGES, _MARGIN = 2.0, 64, 1.25


@dataclass(frozen=True)
class Scenario:
    """A scenario by its name in LoadGen, with the samples of a request and the requests in flight."""

    name: str
    batch: int
    connections: int


SCENARIOS = {
    "single-stream": Scenario("SingleStream", 1, 1),
    "server": Scenario("Server", 1, 256),
    "offline": Scenario("Offline", 32, 4),
}


class Client:
    """Requests about the samples, on a connection of each thread."""

    def __init__(self, target: Target, task: str, samples: Sequence[Text]) -> None:
        """Builds the requests of one sample in advance."""
        self.target, self.task, self.samples = target, task, samples
        self._answers = Answers(target.protocol, task)
        self._alone = [batch_message(target, task, [sample]) for sample in samples]
        self._local = threading.local()
        self._opened = ExitStack()
        self._lock = threading.Lock()

    def message(self, indices: Sequence[int]) -> bytes:
        if len(indices) == 1:
            return self._alone[indices[0]]
        return batch_message(self.target, self.task, [self.samples[index] for index in indices])

    def check(self, reply: Reply, count: int) -> None:
        """Raises BenchError if a reply does not hold that many answers."""
        if fault := self._answers.fault(reply, count):
            raise BenchError(fault)

    def ask(self, indices: Sequence[int]) -> None:
        """Sends a request and checks its reply.

        The server may close an idle connection while a request is on its way: a connection that has answered before is
        replaced once (RFC 9112, section 9.3.1). The time until then counts as latency.

        Raises:
            BenchError: The server does not answer.
        """
        message = self.message(indices)
        lane: Lane | None = getattr(self._local, "lane", None)
        try:
            reply = (lane or self._open()).exchange(message)
        except (BenchError, OSError):
            if lane is None:
                raise
            reply = self._open().exchange(message)
        self.check(reply, len(indices))

    def close(self) -> None:
        self._opened.close()

    def _open(self) -> Lane:
        connection = connect(*self.target.address())
        with self._lock:
            self._opened.enter_context(connection)
        self._local.lane = Lane(connection, self.target.wire(), lambda _: None)
        lane: Lane = self._local.lane
        return lane


class System:
    """The server as LoadGen's system under test.

    LoadGen cannot represent a failed query, and its native code must not see an exception. After a failure, no more
    requests are sent, and the run is void.

    Attributes:
        failure: Why the run is void; None if it is not.
    """

    def __init__(self, loadgen: Any, client: Client, scenario: Scenario) -> None:  # noqa: ANN401  the extra's module
        self.failure: Exception | None = None
        self._loadgen, self._client, self._scenario = loadgen, client, scenario
        self._pool = ThreadPoolExecutor(scenario.connections) if scenario.connections > 1 else None

    def issue(self, samples: Sequence[Any]) -> None:
        """Requests the samples of a query; LoadGen calls this at the query's time."""
        for start in range(0, len(samples), self._scenario.batch):
            batch = samples[start : start + self._scenario.batch]
            if self._pool is None:
                self._ask(batch)
            else:
                self._pool.submit(self._ask, batch)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._client.close()

    def _ask(self, samples: Sequence[Any]) -> None:
        if self.failure is None:
            try:
                self._client.ask([sample.index for sample in samples])
            except (BenchError, OSError) as error:
                self.failure = error
        nothing = array("B")
        respond = self._loadgen.QuerySampleResponse
        self._loadgen.QuerySamplesComplete([respond(sample.id, *nothing.buffer_info()) for sample in samples])


def settings_of(scenario: Scenario, client: Client, rate: float, seconds: float, p99_ms: float) -> str:
    """The settings of a run, in LoadGen's format; its own configuration supplies the rest.

    SingleStream and Offline are first measured for a few seconds: LoadGen draws all queries before it starts, so it
    must know how many to draw. Raises BenchError if the server does not answer.
    """
    size = len(client.samples)
    lines = {"*.performance_sample_count_override": f"{size}"}
    if seconds < FULL_S:
        lines[f"{scenario.name}.min_duration"] = f"{round(1000 * seconds)}"
    if scenario.name == "Server":
        lines["Server.target_qps"] = f"{rate:g}"
        if p99_ms:
            lines["Server.target_latency"] = f"{p99_ms:g}"
    else:
        dice = random.Random(1)
        batches = [[dice.randrange(size) for _ in range(scenario.batch)] for _ in range(_PROBE_MESSAGES)]

        def check(reply: Reply) -> None:
            client.check(reply, scenario.batch)

        with ExitStack() as stack:
            opened = [stack.enter_context(connect(*client.target.address())) for _ in range(scenario.connections)]
            lanes = [Lane(one, client.target.wire(), check) for one in opened]
            messages = itertools.cycle([client.message(batch) for batch in batches])
            probe_s = min(_PROBE_S, seconds / 4)
            found = measure(lanes, messages, scenario.connections, probe_s / 4, probe_s)
        if scenario.name == "Offline":
            lines["Offline.min_query_count"] = f"{min(size, _OFFLINE_SAMPLES)}"
            lines["Offline.target_qps"] = f"{_MARGIN * scenario.batch * found.per_s:.6g}"
        else:
            lines["SingleStream.target_latency"] = f"{found.p50_ms / 2:.6g}"
    return "".join(f"{BENCHMARK}.{key} = {value}\n" for key, value in lines.items())


_METRICS = {
    "SingleStream": r"Early stopping 90.0th percentile estimate: (\d+)",
    "Server": r"Scheduled samples per second *: (\S+)",
    "Offline": r"Samples per second *: (\S+)",
}
"""The metric of each scenario by the rules: 90th percentile in nanoseconds, or samples per second."""


def verdict_of(summary: str, scenario: Scenario) -> tuple[bool, str]:
    """LoadGen's verdict and metric, from `mlperf_log_summary.txt`.

    Raises:
        BenchError: The summary has no verdict.
    """
    result = re.search(r"^Result is *: *(\w+)", summary, re.MULTILINE)
    if result is None:
        raise BenchError(f"LoadGen's summary has no verdict:\n{summary}")
    missed = re.findall(r"^ *(.+?) satisfied *: *NO", summary, re.MULTILINE)
    errors = re.search(r"^(\d+) ERRORS? encountered", summary, re.MULTILINE)
    reasons = [f"{name.lower()} not satisfied" for name in missed] + ([errors[0].lower()] if errors else [])
    metric = re.search(_METRICS[scenario.name], summary)
    value = "no metric" if metric is None else f"{metric[1]} samples/s"
    if metric is not None and scenario.name == "SingleStream":
        value = f"p90 {int(metric[1]) / 1e6:.2f} ms"
    valid = result[1] == "VALID" and not errors
    word = "VALID" if valid else f"INVALID ({', '.join(reasons)})"
    return valid, f"{scenario.name}: {word}, {value}"


def parser() -> argparse.ArgumentParser:
    """Builds the argument parser."""
    made = OptionParser(
        prog="python -m bertserve.loadtest.mlperf",
        description="Run a scenario of MLPerf's LoadGen against a server, over the Open Inference Protocol.",
        epilog=f"The environment variable {KEY_VARIABLE} holds the API key, if the server wants one.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--target", default="http://127.0.0.1:8000", metavar="URL", help="Server to test (default: %(default)s).")
    add("--model", default="", help="Model to request (default: the server's only one).")
    add("--scenario", choices=SCENARIOS, required=True, help="Scenario to run.")
    add("--texts", type=Path, metavar="FILE", help="Texts, one per line, or JSON lines of a task's fields.")
    add("--rate", type=float, metavar="R", help="Query rate of the `server` scenario, in queries/s.")
    add("--p99-ms", type=float, metavar="MS", help="p99 limit of the `server` scenario, in ms (default: 130).")
    add("--seconds", type=float, default=FULL_S, metavar="S", help="Minimum duration, in seconds (default: 600).")
    add("--out", type=Path, default=Path("mlperf-results"), metavar="DIR", help="Results (default: %(default)s).")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(parser().parse_args(argv))
    except BenchError as error:
        print(f"mlperf: {error}", file=sys.stderr)
        return IMPOSSIBLE


def run(arguments: argparse.Namespace) -> int:
    """Runs the scenario and prints LoadGen's verdict; returns the exit code.

    Raises:
        BenchError: An argument is wrong, LoadGen is not installed, or the server did not answer every request.
    """
    scenario = SCENARIOS[arguments.scenario]
    if scenario.name == "Server" and arguments.rate is None:
        raise BenchError("--rate is missing; set the query rate of `server` (bertserve load --find-capacity finds it)")
    check_above_zero(arguments, "rate", "seconds", "p99_ms")
    try:
        import mlperf_loadgen as loadgen  # noqa: PLC0415  an extra's package
    except ImportError:
        raise BenchError("MLPerf LoadGen is not installed: pip install mlcommons-loadgen") from None
    client = _client(arguments)
    looked_up = cached_of(client.target)
    out = arguments.out / arguments.scenario
    configuration = out / "user.conf"
    try:
        out.mkdir(parents=True, exist_ok=True)
        made = settings_of(scenario, client, arguments.rate or 0.0, arguments.seconds, arguments.p99_ms or 0.0)
        configuration.write_text(made, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--out {arguments.out}: {error.strerror}") from error
    _load(loadgen, client, scenario, configuration)
    valid, text = verdict_of((out / "mlperf_log_summary.txt").read_text(encoding="utf-8"), scenario)
    breaches = []
    if arguments.seconds < FULL_S:
        breaches.append(f"MLPerf requires at least {FULL_S:g} s")
    if looked_up is not None and cached_of(client.target) != looked_up:
        breaches.append("MLPerf forbids the response cache; start the server without --response-cache-mb")
    print(text + "".join(f"; not compliant: {breach}" for breach in breaches))
    return VALID if valid else INVALID


def _client(arguments: argparse.Namespace) -> Client:
    target = dataclasses.replace(Target.of(arguments.target, "v2", "", api_key()), timeout_ms=_TIMEOUT_MS)
    if target.tls is not None:
        raise BenchError(f"{target.url}: the LoadGen client does not support TLS; use http://host:port")
    found = models_of(target, arguments.model)
    if len(found) != 1:
        known = ", ".join(f"{one.name} ({one.task})" for one in found) or "none"
        raise BenchError(f"{target.authority} must have one model, or choose one with --model; it has {known}")
    [model] = found
    file = arguments.texts
    samples: Sequence[Text] = different_texts(4, 40, 1024)
    if file is not None:
        samples = texts_for(model.task, file, read_texts(file))
    return Client(dataclasses.replace(target, model=model.name), model.task, samples)


def _load(loadgen: Any, client: Client, scenario: Scenario, configuration: Path) -> None:  # noqa: ANN401  the extra's module
    settings = loadgen.TestSettings()
    if settings.FromConfig(str(configuration), BENCHMARK, scenario.name):
        raise BenchError(f"LoadGen rejects {configuration}")
    settings.scenario = getattr(loadgen.TestScenario, scenario.name)
    settings.mode = loadgen.TestMode.PerformanceOnly
    logs = loadgen.LogSettings()
    logs.log_output.outdir = str(configuration.parent)
    logs.enable_trace = False
    asked = System(loadgen, client, scenario)
    system = loadgen.ConstructSUT(asked.issue, lambda: None)
    # The samples are always in memory, so there is nothing to load or unload.
    library = loadgen.ConstructQSL(len(client.samples), len(client.samples), lambda _: None, lambda _: None)
    # Names a file that does not exist, so that LoadGen reads no audit configuration from the working directory.
    nothing = str(configuration.with_name("no-audit.config"))
    loadgen.StartTestWithLogSettings(system, library, settings, logs, nothing)
    asked.close()
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(system)
    if asked.failure is not None:
        raise BenchError(f"a request failed, so the run is void: {asked.failure}")


if __name__ == "__main__":
    sys.exit(main())
