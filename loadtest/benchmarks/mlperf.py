"""Compares MLPerf's LoadGen with our capacity search: is Server VALID at the capacity that the search finds?

The search finds the highest rate that meets MLPerf's own bound, over the same requests. LoadGen's Server then runs at
that rate and below, and the other scenarios follow, for performance and for accuracy.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.errors import BenchError
from loadtest.generator.measure import Measurement
from loadtest.generator.run import Kind
from loadtest.generator.scenario import Phase, Scenario
from loadtest.generator.search import search
from loadtest.mlperf.accuracy import ERROR
from loadtest.mlperf.scenarios import SCENARIOS
from loadtest.mlperf.session import Load, Session, target_of
from loadtest.mlperf.verdict import Verdict
from loadtest.report.slo import parse_slo
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store

_SLO = "p99=130ms,errors=0%"
_SEARCH_S = 30.0
"""Length of a search run; shorter ones miss occasional disturbances of the machine, which LoadGen's minute does not."""
_SHARES = (1.0, 0.95, 0.9)
_BOTH = ("performance", "accuracy")


class _Served(NamedTuple):
    """A model repository, its requests, and the rate per second at which the capacity search starts."""

    models: Path
    data: Path | None
    rate: float


class MlperfBenchmark(Benchmark):
    """For each model: capacity by our search, then every LoadGen scenario."""

    name = "mlperf"
    purpose = "Run MLPerf's LoadGen in every scenario, at the capacity that `bertserve load` finds."
    rounds = 1
    seconds = 60.0
    precision = "int8"
    own = (
        Option("--questions", None, "Questions in the format of SQuAD 1.1, for the question answering model.", Path),
        Option("--questions-models", None, "Model repository of the question answering model.", Path),
        Option("--results", Path("build/mlperf"), "Directory for LoadGen's logs (default: %(default)s)."),
    )

    def steps(self) -> Iterator[Step]:
        for name in self._served:
            yield f"{name} capacity", partial(self._capacity, name)
            for scenario in SCENARIOS:
                yield f"{name} {scenario}", partial(self._run, name, scenario)

    @cached_property
    def _served(self) -> dict[str, _Served]:
        served = {"embed": _Served(self.options.models, None, 200.0)}
        if self.options.questions and self.options.questions_models:
            served["answer"] = _Served(self.options.questions_models, self.options.questions, 30.0)
        return served

    @cached_property
    def _sessions(self) -> dict[str, Session]:
        return {}

    def _session(self, name: str) -> Session:
        """The INT8 server of that name, with fp32's answers; only one runs at a time."""
        models, data, _ = self._served[name]
        server = self.only(name, partial(BertServer, models, "int8", available_cpus()))
        if name not in self._sessions:
            session = Session.open(target_of(f"http://{HOST}:{server.http_port}"), "", data, self.options.results)
            with BertServer(models, "fp32", available_cpus()) as reference:
                self._sessions[name] = session.beside(target_of(f"http://{HOST}:{reference.http_port}"))
        return self._sessions[name]

    def _capacity(self, name: str) -> dict[str, Any]:
        session = self._session(name)
        scenario = Scenario("even", "", (Phase(_SEARCH_S, 1, 1),), {}, rate=self._served[name].rate)
        kind = Kind("samples", session.library.task, 1.0, session.library.samples)
        measurement = Measurement(session.conversation.target, scenario, (kind,), parse_slo(_SLO), 1)
        found = search(measurement, scenario, self.progress)
        if found.highest is None:
            raise BenchError(f"{name} holds {_SLO} at no rate")
        return {"per_s": found.highest, "confidence": found.confidence(), "source": session.library.source}

    def _run(self, name: str, scenario: str) -> list[dict[str, Any]]:
        """Runs of a scenario; Server runs at decreasing shares of the capacity until one is VALID."""
        found: list[dict[str, Any]] = []
        for share in _SHARES if scenario == "server" else _SHARES[:1]:
            load = Load(share * self.store.steps[f"{name} capacity"]["per_s"], self.options.seconds)
            runs = self._session(name).run(scenario, _BOTH[:1] if found else _BOTH, load)
            accuracy = {**dataclasses.asdict(runs.accuracy), "held": runs.accuracy.held} if runs.accuracy else None
            verdict = dataclasses.asdict(runs.verdict) if runs.verdict else {}
            found.append({"share": share, "seconds": runs.seconds, "verdict": verdict, "accuracy": accuracy})
            if verdict["valid"]:
                break
        return found

    def figures(self, store: Store) -> dict[str, Any]:
        """Capacity, runs by scenario and verdict of each model."""
        models = {}
        for name in ("embed", "answer"):
            if (capacity := store.steps.get(f"{name} capacity")) is None:
                continue
            runs = {scenario: store.steps.get(f"{name} {scenario}", []) for scenario in SCENARIOS}
            offline = [run["verdict"]["metric"] for run in runs["offline"] if run["verdict"]["valid"]]
            gates = [run["accuracy"] for found in runs.values() for run in found if run["accuracy"]]
            models[name] = {
                "capacity": capacity,
                "runs": [(scenario, run) for scenario, found in runs.items() for run in found],
                "was_measured": bool(runs["server"]),
                "valid": next((run for run in runs["server"] if run["verdict"]["valid"]), None),
                "offline": max(offline, default=0.0) / capacity["per_s"] if runs["offline"] else None,
                "gate": min(gates, key=lambda gate: float(gate["found"]), default=None),
            }
        return {"models": models, "error": ERROR, "word": _word}


def _word(verdict: dict[str, Any]) -> str:
    return Verdict(**verdict).word()
