"""`bertserve load`: runs an open-loop load test and checks it against an SLO.

The server's API key is read only from the environment, so that no command line and no report contains it.

Exit codes: 0 the objectives hold (or none were given), 1 an objective is missed, 2 nothing could be measured.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertserve.export.pages.tables import show
from bertserve.loadtest.errors import NEVER_SENT, BenchError, check_above_zero, check_installed
from bertserve.loadtest.generator.discovery import models_of
from bertserve.loadtest.generator.measure import Measurement
from bertserve.loadtest.generator.messages import KEY_VARIABLE, Target, api_key
from bertserve.loadtest.generator.routes import PLAIN, PROTOCOLS, ROUTES, route
from bertserve.loadtest.generator.scenario import SCENARIOS, find_scenario
from bertserve.loadtest.generator.search import plan, search
from bertserve.loadtest.generator.tls import Tls
from bertserve.loadtest.generator.workload import find_bundle
from bertserve.loadtest.report import compare, page
from bertserve.loadtest.report.progress import Progress
from bertserve.loadtest.report.result import Result
from bertserve.loadtest.report.slo import judge, parse_slo
from bertserve.serving.options import OptionParser
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from bertserve.export.pages.tables import Table
    from bertserve.loadtest.generator.scenario import Scenario
    from bertserve.loadtest.report.slo import Objective, Verdict

HELD, MISSED, IMPOSSIBLE = 0, 1, 2
_INTERRUPTED = 130
_USUAL_MODEL = "minilm"
_OUT = Path("load-report")
_COMPARING = ("compare", "out")
_PROBE_S = 10.0
"""Default length of one run of a capacity search."""


@dataclass(slots=True, frozen=True)
class Options:
    """A validated command line.

    Attributes:
        target: The server.
        scenario: The scenario, with the changes of the command line applied.
        bundle: Bundle that counts tokens; None: the server counts them.
        model: The chosen model; empty: the server is asked.
        texts: File with the texts; None: the built-in text.
        slo: The objectives; may be empty.
        find_capacity: Whether to search for the highest rate.
        seed: Seed of the schedules.
        out: Directory of the reports.
    """

    target: Target
    scenario: Scenario
    bundle: Path | None
    model: str
    texts: Path | None
    slo: tuple[Objective, ...]
    find_capacity: bool
    seed: int
    out: Path

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Validates the arguments from argparse.

        Raises:
            BenchError: An argument is invalid or missing; the message is one line.
        """
        if arguments.target is None:
            raise BenchError("--target is missing; set the URL of the server")
        if arguments.find_capacity and not arguments.slo:
            raise BenchError("--find-capacity needs --slo: capacity is the highest rate that meets it")
        scenario = _scenario(arguments)
        bundle = find_bundle(arguments.models) if arguments.models else None
        protocol = arguments.protocol or (None if "://" in arguments.target else scenario.protocol)
        model = arguments.model or (bundle.model if bundle else "")
        files = Tls.of(arguments.ca, arguments.cert, arguments.key)
        target = Target.of(arguments.target, protocol, model or _USUAL_MODEL, api_key(), files)
        # If the protocol's requests name no model, the path names the chosen one.
        target = dataclasses.replace(target, in_path=arguments.model is not None, timeout_ms=arguments.timeout_ms)
        if target.timeout_ms < 0:
            raise BenchError(f"--timeout-ms must be 0 (no deadline) or more, not {target.timeout_ms}")
        for task in scenario.tasks:
            route(target.protocol, task)
        if len(scenario.tasks) > 1 and (target.in_path or target.protocol not in PLAIN):
            tasks = ", ".join(scenario.tasks)
            raise BenchError(f"scenario {scenario.name} has several tasks, a model one; set --task to one of {tasks}")
        slo = parse_slo(arguments.slo) if arguments.slo else ()
        return cls(
            target,
            scenario,
            bundle.path if bundle else None,
            model,
            arguments.texts,
            slo,
            arguments.find_capacity,
            arguments.seed,
            arguments.out or _OUT,
        )

    def asked(self) -> Options:
        """Returns a copy in which the server's reported model and task replace missing choices.

        Raises:
            BenchError: The server has no suitable model, or several.
        """
        target, tasks = self.target, self.scenario.tasks
        if tasks and (self.model or target.protocol in PLAIN):
            return self
        found = models_of(target, self.model)
        if not found:  # the server reports no models
            return dataclasses.replace(self, scenario=dataclasses.replace(self.scenario, tasks=tasks or {"embed": 1.0}))
        fitting = [model for model in found if model.task in (tasks or ROUTES[target.protocol])]
        if len(fitting) != 1:
            told = ", ".join(f"{model.name} ({model.task})" for model in fitting or found)
            if fitting:
                raise BenchError(f"{target.authority} has several models: {told}; choose one with --model")
            wanted = ", ".join(tasks or ROUTES[target.protocol])
            raise BenchError(f"{target.authority} has no model for {wanted} over {target.protocol}; it has {told}")
        [model] = fitting
        return dataclasses.replace(
            self,
            target=dataclasses.replace(target, model=model.name),
            scenario=dataclasses.replace(self.scenario, tasks=tasks or {model.task: 1.0}),
        )


def _scenario(arguments: argparse.Namespace) -> Scenario:
    """The scenario with the changes of the command line.

    Raises:
        BenchError: The scenario is unknown, or a number is out of range.
    """
    scenario = find_scenario(arguments.scenario)
    check_above_zero(arguments, "rate", "duration")
    if arguments.rate is not None:
        scenario = dataclasses.replace(scenario, rate=arguments.rate)
    if arguments.task is not None:
        scenario = dataclasses.replace(scenario, tasks={arguments.task: 1.0})
    if arguments.duration is not None:
        return scenario.lasting(arguments.duration)
    return scenario.lasting(_PROBE_S) if arguments.find_capacity else scenario


def parser() -> argparse.ArgumentParser:
    """Builds the argument parser."""
    made = OptionParser(
        prog="bertserve load",
        description="Run an open-loop load test and check it against an SLO. The load generator never waits for "
        "replies, and measures latency from the scheduled send time.",
        epilog=f"The environment variable {KEY_VARIABLE} holds the API key, if the server needs one. Scenarios: "
        + " ".join(f"{name}: {found.purpose}" for name, found in SCENARIOS.items()),
        allow_abbrev=False,
    )
    made.add_argument(
        "--target", metavar="URL", help="URL of the server: http://host:port, grpc://host:port, https:// or grpcs://."
    )
    made.add_argument(
        "--scenario",
        default="steady",
        metavar="NAME|FILE",
        help=f"Scenario to run: {', '.join(SCENARIOS)}, or a TOML file (default: steady).",
    )
    made.add_argument(
        "--rate", type=float, metavar="R", help="Peak rate, in requests per second (default: the scenario's)."
    )
    made.add_argument(
        "--duration", type=float, metavar="S", help="Length of the test, in seconds (default: the scenario's)."
    )
    made.add_argument("--task", choices=TASKS, help="Task to request (default: the scenario's, or the model's).")
    made.add_argument(
        "--protocol",
        choices=PROTOCOLS,
        help="Protocol to use. `http`: native routes; `tei`: text-embeddings-inference; `v2`, `grpc`: Open Inference"
        " Protocol v2 (default: http or grpc, from the target or the scenario).",
    )
    made.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="File of texts to send: one per line, or .jsonl with the task's fields (default: built-in texts).",
    )
    made.add_argument(
        "--ca", type=Path, metavar="FILE", help="PEM file of the authority to trust (default: the system's)."
    )
    made.add_argument("--cert", type=Path, metavar="FILE", help="PEM file of the client certificate, for mutual TLS.")
    made.add_argument("--key", type=Path, metavar="FILE", help="PEM file of the client's key, if not in `--cert`.")
    made.add_argument(
        "--timeout-ms", type=int, default=0, metavar="MS", help="Deadline per request, in milliseconds (default: none)."
    )
    made.add_argument("--slo", metavar="P", help="Objectives to check, such as p99=2ms,errors=0.1%%.")
    made.add_argument("--find-capacity", action="store_true", help="Search for the highest rate that meets the SLO.")
    made.add_argument(
        "--models", type=Path, metavar="DIR", help="Model repository with the tokenizer that counts tokens."
    )
    made.add_argument("--model", help="Model to request (default: from `--models`, or the server's only one).")
    made.add_argument("--seed", type=int, default=1, help="Seed of arrivals and texts (default: 1).")
    made.add_argument(
        "--out", type=Path, metavar="DIR", help=f"Directory for reports (default: {_OUT}, or none with `--compare`)."
    )
    made.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.json", "B.json"),
        help="Compare two reports instead of running a test. Only `--out` goes with it.",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        if arguments.compare:
            return compare_reports(arguments)
        options = Options.of(arguments)
        return find_capacity(options) if options.find_capacity else load(options)
    except BenchError as error:
        print(f"bertserve load: {error}", file=sys.stderr)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        print("bertserve load: interrupted", file=sys.stderr)
        return _INTERRUPTED


def compare_reports(arguments: argparse.Namespace) -> int:
    """Compares two reports; with `--out` it also writes the comparison.

    Raises:
        BenchError: A report cannot be read, or another option was given.
    """
    usual = vars(parser().parse_args([]))
    if other := [name for name, value in vars(arguments).items() if value != usual[name] and name not in _COMPARING]:
        raise BenchError(f"--compare runs no test; remove --{other[0].replace('_', '-')}")
    if arguments.out:
        check_installed("jinja2")
    first, second = map(Result.read, arguments.compare)
    show(*compare.lines(first, second))
    if arguments.out:
        _make(arguments.out)
        _save(arguments.out, "compare", compare.as_json(first, second), page.comparison(first, second))
    return HELD


def load(options: Options) -> int:
    """Runs a scenario once, writes its report and checks the SLO.

    Raises:
        BenchError: Nothing could be measured.
    """
    measurement = _prepared(options)
    with Progress(options.scenario.seconds) as progress:
        progress.say("measuring the load generator against a no-op server")
        result = measurement.run(measurement.scenario, options.scenario.rate, options.seed, progress.show)
    verdicts = judge(options.slo, result)
    _write(
        options.out,
        result.as_json() | {"slo": [dataclasses.asdict(v) for v in verdicts]},
        page.report(result, verdicts),
        *summary(result, verdicts),
    )
    return HELD if all(verdict.held for verdict in verdicts) else MISSED


def find_capacity(options: Options) -> int:
    """Searches for the capacity and writes the report.

    Raises:
        BenchError: Nothing could be measured.
    """
    measurement = _prepared(options)
    print(plan(options.scenario), file=sys.stderr)
    with Progress(options.scenario.seconds) as progress:
        found = search(measurement, options.scenario, progress)
    _write(options.out, found.as_json(), page.capacity_report(found), *found.lines())
    return HELD if found.highest else MISSED


def summary(result: Result, verdicts: Sequence[Verdict]) -> list[str]:
    """The terminal output for a run."""
    latency = result.latency
    lines = [
        f"offered {result.offered_per_s:.1f}/s, answered {result.answered_per_s:.1f}/s, good {result.good_per_s:.1f}/s",
    ]
    if len(latency):
        figures = " ".join(f"p{p:g} {latency.percentile_ms(p):.2f}" for p in (50, 90, 99, 99.9) if latency.resolves(p))
        lines.append(f"latency from the scheduled send time, ms: {figures} max {latency.max_ms():.2f}")
    lines += [
        f"{count} x {reason}" if reason.startswith(NEVER_SENT) else f"failed: {count} x {reason}"
        for reason, count in result.faults.most_common()
    ]
    if words := page.caution(result):
        lines.append(f"CAUTION: {words}")
    return [*lines, *(f"{'held' if v.held else 'MISSED'}: {v.objective}, found {v.found}" for v in verdicts)]


def _prepared(options: Options) -> Measurement:
    """Creates the output directory and prepares the measurement."""
    check_installed("hdrh", "jinja2", "matplotlib")  # fails before anything is measured
    _make(options.out)
    asked = options.asked()
    return Measurement.prepare(asked.target, asked.scenario, asked.bundle, asked.slo, asked.seed, asked.texts)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"--out {out}: {error.strerror}") from error


def _write(out: Path, values: dict[str, Any], html: str, *lines: str | Table) -> None:
    """Prints a report and saves it as JSON and HTML."""
    show(f"{values['facts']['task']} over {values['facts']['protocol']}", *lines)
    _save(out, "report", values, html)


def _save(out: Path, name: str, values: dict[str, Any], html: str) -> None:
    """Saves a report as JSON and HTML, and prints the paths."""
    try:
        (out / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.html").write_text(html, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"--out {out}: {error.strerror}") from error
    print(f"\nreport: {out / f'{name}.html'} (and {name}.json)")


if __name__ == "__main__":
    sys.exit(main())
