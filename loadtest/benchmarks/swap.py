"""The cost of a version swap for the requests that arrive meanwhile: p99 during the swap and before it."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from loadtest.benchmarks.drive import Requests, Running, drive, even, find_capacity, mixed_texts, short_texts
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.benchmarks.show import chart
from loadtest.errors import BenchError
from loadtest.generator.messages import Target
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from loadtest.benchmarks.drive import Workload
    from loadtest.benchmarks.store import Step, Store

STEP_S = 0.5
"""Resolution of the curve around a swap, in seconds."""

_SHARE = 0.3
_PATIENCE_S = 10.0
_WARM_S = 5.0
_AFTER_S = 0.5
"""Seconds after the load call's reply that still count as the swap: the old version is drained then."""

_PROBE_S, _SWAP_LIMIT_S = 15.0, 120.0
_FIRST_GUESS = {"mixed": 50.0, "short": 800.0}
_TEXTS = {"mixed": "6 to 250 words", "short": "8 tokens"}

Moves = list[tuple[Path, Path]]
"""Directories of versions: where each is staged, and its place in the repository."""


@dataclass(slots=True, frozen=True)
class Plan:
    """Servers started for each kind of texts, swaps of each, and the seconds before and for a swap."""

    rounds: int = 5
    swaps: int = 20
    calm_s: float = 5.0
    room_s: float = 5.0

    @property
    def seconds(self) -> float:
        """Duration of a round."""
        return self.swaps * (self.calm_s + self.room_s)


class Swap(NamedTuple):
    """Time of a swap in seconds of the schedule: from the load call to its reply."""

    begin: float
    end: float


class SwapBenchmark(Benchmark):
    """`make bench-swap`."""

    name = "swap"
    purpose = "Compare latency during a hot swap with latency before it."
    rounds = Plan().rounds
    seconds = Plan().calm_s
    own = (
        Option("--scratch", None, "Directory with enough space for the versions of one round.", Path),
        Option("--swaps", Plan().swaps, "Swaps per round (default: %(default)s)."),
        Option(
            "--room-s",
            Plan().room_s,
            "Time for each swap, in seconds, after --seconds without one (default: %(default)s).",
        ),
        Option("--capacity-mixed", None, "Capacity for mixed lengths, in requests/s (default: search for it).", float),
        Option("--capacity-short", None, "Capacity for short texts, in requests/s (default: search for it).", float),
    )

    @property
    def _plan(self) -> Plan:
        options = self.options
        return Plan(options.rounds, options.swaps, options.seconds, options.room_s)

    def facts(self) -> dict[str, Any]:
        model = self.model_facts()
        del model["version"]  # each swap makes another one
        return {**model, "plan": asdict(self._plan)}

    def steps(self) -> Iterator[Step]:
        for name in _TEXTS:
            yield f"capacity {name}", partial(self._capacity, name)
        for number in range(1, self.options.rounds + 1):
            for name in _TEXTS:
                yield f"round {number} {name}", partial(self._round, name, number)

    @cached_property
    def _workloads(self) -> dict[str, Workload]:
        return {"mixed": mixed_texts(self.bundle), "short": short_texts(self.bundle)}

    def _capacity(self, name: str) -> dict[str, Any]:
        if given := getattr(self.options, f"capacity_{name}"):
            return {"capacity_per_s": given, "confidence": "given"}
        with self.new_server() as server:
            target = Target("http", HOST, server.http_port, self.bundle.model)
            return find_capacity(target, self._workloads[name], _PROBE_S, _FIRST_GUESS[name])

    def _round(self, name: str, number: int) -> dict[str, Any]:
        """One server, swapped repeatedly under a share of its capacity."""
        plan, workload, bundle = self._plan, self._workloads[name], self.bundle
        rate = _SHARE * self.store.steps[f"capacity {name}"]["capacity_per_s"]
        with tempfile.TemporaryDirectory(dir=self.options.scratch) as scratch:
            repository, moves = _versions(bundle.path, Path(scratch), bundle.model, plan.swaps)
            control = ("--model-control", "true")
            with BertServer(repository, bundle.precision, available_cpus(), *control) as server:
                target = Target("http", HOST, server.http_port, bundle.model)
                drive(target, workload, even(_WARM_S), rate, 1000 + number, _PATIENCE_S)
                load = Running(target, workload.kinds, even(plan.seconds), rate, number, patience_s=_PATIENCE_S)
                try:
                    swaps = list(_swaps(target, moves, plan, load.began()))
                except (OSError, http.client.HTTPException, BenchError) as error:
                    raise BenchError(f"{error}\n\nThe server said last:\n{server.last_words()}") from error
                finally:
                    recorded = load.join()
        return {"rate": rate, **figures(Requests.of(recorded, workload.tokens), swaps, plan)}

    def figures(self, store: Store) -> dict[str, Any]:
        return {"texts": _TEXTS, "rounds": _rounds(store)}

    def plots(self, store: Store) -> dict[str, str]:
        return {name: _plot(found, name) for name, found in _rounds(store).items()}


def _swaps(target: Target, moves: Moves, plan: Plan, began: float) -> Iterator[Swap]:
    """Makes the swaps, each after a calm; a swap that takes longer than planned delays the next ones."""
    calm_from = 0.0
    for number, (staged, place) in enumerate(moves):
        due = max(calm_from, number * (plan.calm_s + plan.room_s)) + plan.calm_s
        if due + plan.room_s > plan.seconds:
            return
        time.sleep(max(0.0, began + due - time.perf_counter()))
        staged.rename(place)
        begin = time.perf_counter() - began
        _load(target)
        calm_from = time.perf_counter() - began
        yield Swap(begin, calm_from)


def _load(target: Target) -> None:
    connection = http.client.HTTPConnection(target.host, target.port, timeout=_SWAP_LIMIT_S)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/repository/models/{target.model}/load")
        reply = connection.getresponse()
        body = reply.read().decode("utf-8", "replace")
    if reply.status != http.HTTPStatus.OK:
        raise BenchError(f"the server does not load the next version: {body}")


def _versions(bundle: Path, scratch: Path, model: str, swaps: int) -> tuple[Path, Moves]:
    """A repository with version 1, and its further versions."""
    repository, moves = scratch / "models", []
    for version in range(1, swaps + 2):
        place = repository / model / str(version)
        folder = place if version == 1 else scratch / "staged" / str(version)
        shutil.copytree(bundle, folder)
        manifest = json.loads((folder / "manifest.json").read_bytes())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"version": version}), encoding="utf-8")
        moves.append((folder, place))
    return repository, moves[1:]


def figures(requests: Requests, swaps: Sequence[Swap], plan: Plan) -> dict[str, Any]:
    """Cost of the swaps of a round: all their windows together, and the calm before them together."""

    def latencies(windows: Sequence[tuple[float, float]]) -> NDArray[np.float64]:
        """Latencies of these requests; infinite for a request without an answer."""
        found = [requests.within(*window) for window in windows]
        return np.concatenate([np.where(one.answered, one.latency_ms, _PATIENCE_S * 1e3) for one in found])

    def around(begin_s: float, end_s: float) -> NDArray[np.float64]:
        return latencies([(swap.begin + begin_s, swap.begin + end_s) for swap in swaps])

    moments = {
        "before": around(_AFTER_S - plan.calm_s, 0.0),
        "during": latencies([(swap.begin, swap.end + _AFTER_S) for swap in swaps]),
    }
    steps = [(at, around(at, at + STEP_S)) for at in np.arange(-plan.calm_s + _AFTER_S, plan.room_s, STEP_S).tolist()]
    found = {f"{when}_p{p}_ms": _percentile(values, p) for when, values in moments.items() for p in (50, 99)}
    return {
        "swaps": len(swaps),
        "swap_s": statistics.median(swap.end - swap.begin for swap in swaps),
        **{f"requests_{when}": len(values) for when, values in moments.items()},
        "without_answer": int((~requests.answered).sum()),
        **found,
        "ratio": found["during_p99_ms"] / found["before_p99_ms"],
        "curve": [[at + STEP_S / 2, *(_percentile(step, p) for p in (50, 99))] for at, step in steps if len(step)],
    }


def _percentile(latencies: NDArray[np.float64], percent: float) -> float:
    if not len(latencies):
        raise BenchError("no request fell into the window of a swap: the rate is too low or the windows too short")
    return float(np.percentile(latencies, percent, method="inverted_cdf"))


def _rounds(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Rounds by kind of texts."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    for name, found in store.named("round ").items():
        rounds.setdefault(name.split()[1], []).append(found)
    return rounds


def _plot(rounds: list[dict[str, Any]], name: str) -> str:
    """Latency by the time from the load call: the median of the rounds at each moment."""
    moments: dict[float, list[list[float]]] = {}
    for found in rounds:
        for at, *values in found["curve"]:
            moments.setdefault(at, []).append(values)
    lines = {
        title: (colour, [(at, statistics.median(each[index] for each in moments[at])) for at in sorted(moments)])
        for index, (title, colour) in enumerate((("p50", "orange"), ("p99", "blue")))
    }
    swap_s = statistics.median(found["swap_s"] for found in rounds)
    title = f"Latency around a swap, texts of {_TEXTS[name]}; the new version serves after {swap_s:.1f} s"
    return chart(title, "seconds from the load call", "ms", lines, whole=True)
