"""MLPerf's LoadGen beside our own search for capacity: is Server VALID at the rate that ours finds?

Ours finds the highest rate that holds MLPerf's own bound, over the same requests. LoadGen's Server then runs at that
rate and below, and the other scenarios with it, for performance and for accuracy.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.runner import Benchmark, Option, Page
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.errors import BenchError
from loadtest.generator.measure import Measurement
from loadtest.generator.run import Kind
from loadtest.generator.scenario import Phase, Scenario
from loadtest.generator.search import search
from loadtest.mlperf.accuracy import ERROR
from loadtest.mlperf.scenarios import FULL_S, SCENARIOS
from loadtest.mlperf.session import Load, Session, target_of
from loadtest.mlperf.verdict import METRICS, Verdict
from loadtest.report.progress import Progress
from loadtest.report.slo import parse_slo
from loadtest.report.tables import MET, Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store
    from loadtest.mlperf.session import Runs

_SLO = "p99=130ms,errors=0%"
_SEARCH_S = 30.0
"""Of a run of the search: shorter ones miss what disturbs a machine now and then, which LoadGen's minute does not."""
_SHARES = (1.0, 0.95, 0.9)
_LEAST_SHARE = 0.9
_BOTH = ("performance", "accuracy")
_NAMES = ("embed", "answer")
_FULL = "full server, {}"
_WORD = {True: "passed", False: "**failed**"}
_METHOD = (
    "Capacity is the highest rate of Poisson arrivals that holds `{slo}`, MLPerf's bound for BERT's Server, in runs of"
    " {search:g} s: what `bertserve load --find-capacity` searches for, with the samples and the requests that"
    " LoadGen sends (the Open Inference Protocol over HTTP). LoadGen's runs last {seconds:g} s; the rules ask for"
    " 600 s, so that only those in full keep them. Models and data are those of the open division. Server, client and"
    " LoadGen share the machine."
)
_HEAD = ("model", "run", "LoadGen says", "rate", "judged by", "figure", "p50 ms", "p99 ms", "accuracy")
_NOTE = (
    "`rate`: queries a second that Server was given. `accuracy`: in LoadGen's accuracy mode; of embed the mean cosine"
    " to fp32, of answer F1 and the standard error of its difference to fp32's, and what the gate asks for: a cosine"
    " of 0.99, 99% of fp32's F1."
)


class Served(NamedTuple):
    """A model repository, what is asked of it, and where the search for its capacity begins, a second."""

    models: Path
    data: Path | None
    rate: float


class MlperfBenchmark(Benchmark):
    """Capacity by ours, then every scenario by LoadGen, model by model."""

    name = "mlperf"
    purpose = "MLPerf's LoadGen in every scenario, at the capacity that bertserve load finds"
    rounds = 1
    seconds = 60.0
    precision = "int8"

    own = (
        Option("--questions", None, "SQuAD 1.1's JSON, for the model of answers", Path),
        Option("--questions-models", None, "the repository of that model", Path),
        Option("--results", Path("build/mlperf"), "LoadGen's logs (%(default)s)"),
    )

    def steps(self) -> Iterator[Step]:
        for name in self._served:
            yield f"{name} capacity", partial(self._capacity, name)
            for scenario in SCENARIOS:
                yield f"{name} {scenario}", partial(self._run, name, scenario)
            yield _FULL.format(name), partial(self._full, name)

    @cached_property
    def _served(self) -> dict[str, Served]:
        served = {"embed": Served(self.options.models, None, 200.0)}
        if self.options.questions and self.options.questions_models:
            served["answer"] = Served(self.options.questions_models, self.options.questions, 30.0)
        return served

    def _session(self, name: str) -> Session:
        """The INT8 server of that name, with fp32's answers; only one runs at a time."""
        if name not in self._sessions:
            self.stack.close()
            self._sessions.clear()
            models, data, _ = self._served[name]
            self.say(f"starting {name}")
            server = self.stack.enter_context(BertServer(models, "int8", available_cpus()))
            session = Session.open(target_of(_url(server)), "", data, self.options.results)
            with BertServer(models, "fp32", available_cpus()) as reference:
                self._sessions[name] = session.beside(target_of(_url(reference)))
        return self._sessions[name]

    @cached_property
    def _sessions(self) -> dict[str, Session]:
        return {}

    def _capacity(self, name: str) -> dict[str, Any]:
        session = self._session(name)
        scenario = Scenario("even", "", (Phase(_SEARCH_S, 1, 1),), {}, rate=self._served[name].rate)
        kind = Kind("samples", session.library.task, 1.0, session.library.samples)
        measurement = Measurement(session.conversation.target, scenario, (kind,), parse_slo(_SLO), 1)
        found = search(measurement, scenario, self.progress or Progress(_SEARCH_S))
        if found.highest is None:
            raise BenchError(f"{name} holds {_SLO} at no rate")
        return {"per_s": found.highest, "confidence": found.confidence(), "source": session.library.source}

    def _run(self, name: str, scenario: str) -> list[dict[str, Any]]:
        """The runs of a scenario; of Server, at shares of the capacity, down to the first that is VALID."""
        session = self._session(name)
        capacity = self.store.steps[f"{name} capacity"]["per_s"]
        runs: list[dict[str, Any]] = []
        for share in _SHARES if scenario == "server" else _SHARES[:1]:
            modes = _BOTH if not runs else _BOTH[:1]
            load = Load(share * capacity, self.options.seconds)
            runs.append({"share": share, **_values(session.run(scenario, modes, load))})
            if runs[-1]["verdict"]["valid"]:
                break
        return runs

    def _full(self, name: str) -> list[dict[str, Any]]:
        """Server in its full duration, at the highest share that was VALID in short."""
        share = self.store.steps[f"{name} server"][-1]["share"]
        load = Load(share * self.store.steps[f"{name} capacity"]["per_s"], FULL_S)
        return [{"share": share, **_values(self._session(name).run("server", _BOTH[:1], load))}]

    def page(self, store: Store) -> Page:
        names = [name for name in _NAMES if f"{name} capacity" in store.steps]
        capacities = [
            f"- {name}, {found['source']}: {found['per_s']:.1f} a second ({found['confidence']})"
            for name in names
            for found in [store.steps[f"{name} capacity"]]
        ]
        rows = [
            _row(name, what, store.steps[f"{name} capacity"]["per_s"], run)
            for name in names
            for what, key in (
                *((what, f"{name} {what}") for what in SCENARIOS),
                ("server, in full", _FULL.format(name)),
            )
            for run in store.steps.get(key, ())
        ]
        return Page(
            "MLPerf's LoadGen at our capacity",
            _METHOD.format(search=_SEARCH_S, seconds=store.facts["seconds"], slo=_SLO),
            [
                "\n".join(["## Capacity, by our search", "", *capacities]),
                Table("The scenarios, by LoadGen", _NOTE, _HEAD, rows, words=3),
            ],
            _verdict(names, store),
        )


def _row(name: str, scenario: str, capacity: float, run: dict[str, Any]) -> list[str]:
    verdict, accuracy = run["verdict"], run["accuracy"]
    is_offline = verdict["scenario"] == "Offline"
    rate = f"{run['share'] * capacity:.1f}" if verdict["scenario"] == "Server" else "-"
    error = f" ± {accuracy['others'][ERROR]:.2f}" if accuracy and ERROR in accuracy["others"] else ""
    gate = f"{accuracy['found']:.4f}{error} of {accuracy['least']:.4f}, {_WORD[accuracy['held']]}" if accuracy else "-"
    return [
        name,
        f"{scenario}, {run['seconds']:g} s",
        Verdict(**verdict).word(),
        rate,
        METRICS[verdict["scenario"]],
        f"{verdict['metric']:.2f}",
        *(("-", "-") if is_offline else (f"{verdict['p50_ms']:.1f}", f"{verdict['p99_ms']:.1f}")),
        gate,
    ]


def _verdict(names: list[str], store: Store) -> str:
    """Whether LoadGen calls Server VALID within a tenth of what our search found, and Offline carries as much."""
    sentences = []
    for name in names:
        capacity = store.steps[f"{name} capacity"]["per_s"]
        keys = (_FULL.format(name), f"{name} server")
        runs: list[dict[str, Any]] = next((store.steps[key] for key in keys if key in store.steps), [])
        offline = [run for run in store.steps.get(f"{name} offline", ()) if run["verdict"]["valid"]]
        if not runs:
            sentences.append(f"{name}: Server was not measured")
        elif valid := [run for run in runs if run["verdict"]["valid"]]:
            run = valid[0]
            kept = MET[run["share"] >= _LEAST_SHARE]
            sentences.append(
                f"{name}: Server is VALID at {100 * run['share']:.0f}% of our capacity in {run['seconds']:g} s"
                f" (90% is asked: {kept})"
            )
        else:
            sentences.append(f"{name}: Server is VALID at no rate that was tried (90% is asked: {MET[False]})")
        carried = offline[0]["verdict"]["metric"] / capacity if offline else 0.0
        if f"{name} offline" in store.steps:
            sentences[-1] += f", Offline at {100 * carried:.0f}% (the same: {MET[carried >= _LEAST_SHARE]})"
        gates = [
            run["accuracy"]
            for scenario in SCENARIOS
            for run in store.steps.get(f"{name} {scenario}", ())
            if run["accuracy"]
        ]
        worst = min(gates, key=lambda gate: float(gate["found"]), default=None)
        if worst is not None:
            kept = f"{worst['least']:.4f} is asked: {MET[worst['held']]}"
            sentences[-1] += f"; in accuracy mode {worst['name']} {worst['found']:.4f} ({kept})"
        sentences[-1] += "."
    return f"**{' '.join(sentences)}**"


def _url(server: BertServer) -> str:
    return f"http://{HOST}:{server.http_port}"


def _values(runs: Runs) -> dict[str, Any]:
    accuracy = {**dataclasses.asdict(runs.accuracy), "held": runs.accuracy.held} if runs.accuracy else None
    return {
        "seconds": runs.seconds,
        "verdict": dataclasses.asdict(runs.verdict) if runs.verdict else None,
        "accuracy": accuracy,
    }
