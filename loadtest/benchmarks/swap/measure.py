"""Swaps one after another under an even load, and the latencies around each of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import statistics
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from loadtest.benchmarks.drive import Recorded, Requests, Workload, find_capacity, mixed_texts, short_texts
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.errors import BenchError
from loadtest.generator.messages import Target
from loadtest.generator.run import Load, run
from loadtest.generator.scenario import Phase, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from loadtest.benchmarks.store import Store
    from loadtest.generator.workload import Bundle
    from loadtest.report.result import Result

SHARE = 0.3
"""Of capacity, the load during which is swapped."""

STEP_S = 0.5
"""Of the curve around a swap."""

_PATIENCE_S = 10.0
_WARM_S = 5.0
_AFTER_S = 0.5
"""What follows the load call's reply still counts as the swap: the old version is drained then."""

_PROBE_S = 15.0
_FIRST_GUESS = {"mixed": 50.0, "short": 800.0}
_SWAP_LIMIT_S = 120.0


@dataclass(slots=True, frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: Servers that are started for each kind of texts.
        swaps: Of each of them.
        calm_s: Before each swap: with it the swap is compared.
        room_s: For a swap.
    """

    rounds: int = 5
    swaps: int = 20
    calm_s: float = 5.0
    room_s: float = 5.0

    @property
    def each_s(self) -> float:
        """From one swap to the next."""
        return self.calm_s + self.room_s


@dataclass(slots=True, frozen=True)
class Swap:
    """When a swap was, in seconds of the schedule: from the load call to its reply."""

    begin: float
    end: float


@dataclass(slots=True)
class Swapper:
    """Asks for one version after another while a load runs.

    Attributes:
        port: Of the server's HTTP.
        model: The model.
        versions: Directories, to be moved into the repository one by one, and where to.
        plan: When.
        swaps: Those that were made.
        fault: Why there are no more.
    """

    port: int
    model: str
    versions: Sequence[tuple[Path, Path]]
    plan: Plan
    swaps: list[Swap] = field(default_factory=list)
    fault: str = ""
    _started: threading.Event = field(default_factory=threading.Event)
    _start: float = 0.0

    def show(self, _: Result, passed_s: float) -> None:
        """Learns from the run's progress when it began."""
        if not self._started.is_set():
            self._start = time.perf_counter() - passed_s
            self._started.set()

    def run(self) -> None:
        """Makes the swaps, each after a calm; one that takes longer than planned moves those that follow."""
        self._started.wait(_SWAP_LIMIT_S)
        for number, (staged, target) in enumerate(self.versions):
            calm_from = max(number * self.plan.each_s, self.swaps[-1].end if self.swaps else 0.0)
            due = calm_from + self.plan.calm_s
            if due + self.plan.room_s > len(self.versions) * self.plan.each_s:
                return
            time.sleep(max(0.0, self._start + due - time.perf_counter()))
            staged.rename(target)
            begin = time.perf_counter() - self._start
            try:
                _load(self.port, self.model)
            except (OSError, http.client.HTTPException, BenchError) as error:
                self.fault = str(error)
                return
            self.swaps.append(Swap(begin, time.perf_counter() - self._start))


def _load(port: int, model: str) -> None:
    connection = http.client.HTTPConnection(HOST, port, timeout=_SWAP_LIMIT_S)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/repository/models/{model}/load")
        reply = connection.getresponse()
        body = reply.read().decode("utf-8", "replace")
    if reply.status != http.HTTPStatus.OK:
        raise BenchError(f"the server does not load the next version: {body}")


@dataclass(slots=True)
class Bench:
    """A bundle in many versions, and texts.

    Attributes:
        bundle: The version that all others are copies of.
        threads: Cores of the engine.
        directory: A directory with room for the versions of one round.
        plan: How much is measured.
        store: What was found.
        workloads: Texts by name.
    """

    bundle: Bundle
    threads: int
    directory: Path
    plan: Plan
    store: Store
    workloads: dict[str, Workload]

    @classmethod
    def over(cls, bundle: Bundle, threads: int, directory: Path, plan: Plan, store: Store) -> Bench:
        """Makes the texts."""
        workloads = {"mixed": mixed_texts(bundle), "short": short_texts(bundle)}
        return cls(bundle, threads, directory, plan, store, workloads)

    def target(self, server: BertServer) -> Target:
        """Where requests go."""
        return Target("http", HOST, server.http_port, self.bundle.model)


def steps(bench: Bench) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of all steps and what finds each of them, in order."""
    for name in bench.workloads:
        yield f"capacity {name}", partial(_capacity, bench, name)
    for number in range(1, bench.plan.rounds + 1):
        for name in bench.workloads:
            yield f"round {number} {name}", partial(_round, bench, name, number)


def _capacity(bench: Bench, name: str) -> dict[str, Any]:
    bundle = bench.bundle
    with BertServer(bundle.path.parents[1], bundle.precision, bench.threads) as server:
        return find_capacity(bench.target(server), bench.workloads[name], _PROBE_S, _FIRST_GUESS[name])


def _round(bench: Bench, name: str, number: int) -> dict[str, Any]:
    """One server, swapped again and again under 0.3 of its capacity."""
    plan, workload = bench.plan, bench.workloads[name]
    rate = SHARE * bench.store.steps[f"capacity {name}"]["capacity_per_s"]
    with _versions(bench) as (repository, versions):
        options = ("--model-control", "true")
        with BertServer(repository, bench.bundle.precision, bench.threads, *options) as server:
            target = bench.target(server)
            _drive(target, workload, _WARM_S, rate, 1000 + number, lambda *_: None)
            swapper = Swapper(server.http_port, bench.bundle.model, versions, plan)
            thread = threading.Thread(target=swapper.run)
            thread.start()
            requests = _drive(target, workload, plan.swaps * plan.each_s, rate, number, swapper.show)
            thread.join()
            if swapper.fault or not swapper.swaps:
                raise BenchError(f"{swapper.fault}\n\nThe server said last:\n{server.last_words()}")
    return {"rate": rate, **figures(requests, swapper.swaps, plan)}


def _drive(
    target: Target, workload: Workload, seconds: float, rate: float, seed: int, show: Callable[[Result, float], None]
) -> Requests:
    scenario = Scenario("swap", "", (Phase(seconds, 1, 1),), {1: 1.0})
    recorded = Recorded({}, seconds)
    run(target, Load(scenario, rate, workload.kinds, seed, _PATIENCE_S), recorded, show)
    return Requests.of(recorded, workload.tokens)


def figures(requests: Requests, swaps: Sequence[Swap], plan: Plan) -> dict[str, Any]:
    """What the swaps of a round cost: their windows together beside the calm before them together.

    Args:
        requests: All of the round.
        swaps: When they were.
        plan: How long the calm is.
    """
    before = np.concatenate([_between(requests, swap.begin - plan.calm_s + _AFTER_S, swap.begin) for swap in swaps])
    during = np.concatenate([_between(requests, swap.begin, swap.end + _AFTER_S) for swap in swaps])
    curve = []
    for at in np.arange(-plan.calm_s + _AFTER_S, plan.room_s, STEP_S).tolist():
        step = np.concatenate([_between(requests, swap.begin + at, swap.begin + at + STEP_S) for swap in swaps])
        if len(step):
            curve.append([at + STEP_S / 2, *(_percentile(step, percent) for percent in (50, 99))])
    found = {
        f"{when}_p{percent}_ms": _percentile(latencies, percent)
        for when, latencies in (("before", before), ("during", during))
        for percent in (50, 99)
    }
    return {
        "swaps": len(swaps),
        "swap_s": statistics.median(swap.end - swap.begin for swap in swaps),
        "requests_before": len(before),
        "requests_during": len(during),
        "without_answer": int((~requests.answered).sum()),
        **found,
        "ratio": found["during_p99_ms"] / found["before_p99_ms"],
        "curve": curve,
    }


def _between(requests: Requests, begin_s: float, end_s: float) -> NDArray[np.float64]:
    """Latencies of what should have been sent in a stretch; of what has no answer, as if it took for ever."""
    found = requests.within(begin_s, end_s)
    return np.where(found.answered, found.latency_ms, _PATIENCE_S * 1e3)


def _percentile(latencies: NDArray[np.float64], percent: float) -> float:
    if not len(latencies):
        raise BenchError("no request fell into the window of a swap: the rate is too low or the windows too short")
    return float(np.percentile(latencies, percent, method="inverted_cdf"))


@contextlib.contextmanager
def _versions(bench: Bench) -> Iterator[tuple[Path, list[tuple[Path, Path]]]]:
    """A repository with version 1, and what its further versions are called staged and in their place."""
    repository, staged = bench.directory / "models", bench.directory / "staged"
    versions = repository / bench.bundle.model
    try:
        _copy(bench.bundle.path, versions / "1", 1)
        moves = []
        for version in range(2, bench.plan.swaps + 2):
            _copy(bench.bundle.path, staged / str(version), version)
            moves.append((staged / str(version), versions / str(version)))
        yield repository, moves
    finally:
        shutil.rmtree(repository, ignore_errors=True)
        shutil.rmtree(staged, ignore_errors=True)


def _copy(bundle: Path, target: Path, version: int) -> None:
    shutil.copytree(bundle, target)
    manifest = json.loads((target / "manifest.json").read_bytes())
    (target / "manifest.json").write_text(json.dumps(manifest | {"version": version}), encoding="utf-8")
