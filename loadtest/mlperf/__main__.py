"""`python -m loadtest.mlperf`: MLPerf's LoadGen against a running server.

Exit codes: 0 LoadGen's verdicts are VALID and the accuracy gates are passed, 1 one is not, 2 nothing could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.discovery import models_of, precision_of
from loadtest.generator.messages import KEY_VARIABLE, Target, api_key
from loadtest.mlperf import accuracy
from loadtest.mlperf.library import TASKS, Conversation, Library
from loadtest.mlperf.ours import beside
from loadtest.mlperf.run import MODES
from loadtest.mlperf.scenarios import FULL_S, SCENARIOS, user_conf
from loadtest.mlperf.submission import Rules, Submission
from loadtest.mlperf.verdict import read_verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

PASSED, MISSED, IMPOSSIBLE = 0, 1, 2
_TIMEOUT_MS = 30_000
"""The deadline of every request: LoadGen knows no refusal, so that lateness must show as latency."""

_LIMIT_S = 3600.0


@dataclass(slots=True, frozen=True)
class Options:
    """A command line that makes sense.

    Attributes:
        target: The server.
        reference: The server of the same model in fp32; None: accuracy is not measured.
        model: The one that the command line chooses; empty: the only one with a task that is known here.
        scenarios: Of `SCENARIOS`.
        modes: Of `MODES`.
        data: The file of the samples; None: the built-in ones.
        rate: Queries a second of Server.
        seconds: The least duration of a performance run.
        latency_ms: Server's bound; 0: the benchmark's own.
        ours: Whether our generators measure too.
        out: Where the results go.
    """

    target: Target
    reference: Target | None
    model: str
    scenarios: tuple[str, ...]
    modes: tuple[str, ...]
    data: Path | None
    rate: float
    seconds: float
    latency_ms: float
    ours: bool
    out: Path

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Reads what argparse found.

        Raises:
            BenchError: What is wrong, in one line.
        """
        modes = tuple(MODES) if arguments.mode == "both" else (arguments.mode,)
        scenarios = tuple(arguments.scenario or SCENARIOS)
        if "server" in scenarios and arguments.rate is None:
            raise BenchError("--rate is missing: the queries a second of `server`, see bertserve load --find-capacity")
        if "accuracy" in modes and arguments.reference is None:
            raise BenchError("--reference is missing: accuracy is judged beside a server of the same model in fp32")
        for name in ("rate", "seconds", "p99_ms"):
            value = getattr(arguments, name)
            if value is not None and not 0 < value < float("inf"):
                raise BenchError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
        return cls(
            _target(arguments.target),
            _target(arguments.reference) if arguments.reference else None,
            arguments.model or "",
            scenarios,
            modes,
            arguments.data,
            arguments.rate or 0.0,
            arguments.seconds,
            arguments.p99_ms or 0.0,
            arguments.beside_ours,
            arguments.out,
        )


def _target(url: str) -> Target:
    target = dataclasses.replace(Target.of(url, "v2", "", api_key()), timeout_ms=_TIMEOUT_MS)
    if target.tls is not None:
        raise BenchError(f"{target.url}: LoadGen asks without TLS; name it as http://host:port")
    return target


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.mlperf",
        description="Run MLPerf's LoadGen against a server, over the Open Inference Protocol.",
        epilog=f"The environment variable {KEY_VARIABLE} holds the API key, if the server wants one.",
        allow_abbrev=False,
    )
    made.add_argument("--target", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s")
    made.add_argument("--model", help="the model to ask (default: the server's only one that embeds or answers)")
    made.add_argument(
        "--scenario", action="append", choices=SCENARIOS, help="may be given more than once (default: all four)"
    )
    made.add_argument("--mode", choices=[*MODES, "both"], default="performance", help="default: %(default)s")
    made.add_argument("--data", type=Path, metavar="FILE", help="texts, one a line, or questions in SQuAD 1.1's JSON")
    made.add_argument("--reference", metavar="URL", help="a server of the same model in fp32, for the accuracy gate")
    made.add_argument("--rate", type=float, metavar="R", help="queries a second of `server`")
    made.add_argument("--p99-ms", type=float, metavar="MS", help="the bound of `server` (default: BERT's, 130)")
    made.add_argument(
        "--seconds", type=float, default=FULL_S, metavar="S", help="least duration; below 600 is not compliant"
    )
    made.add_argument(
        "--beside-ours", action="store_true", help="measure single-stream and server with our generators too"
    )
    made.add_argument("--out", type=Path, default=Path("mlperf-results"), metavar="DIR", help="default: %(default)s")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        return measure(Options.of(parser().parse_args(argv)))
    except BenchError as error:
        print(f"mlperf: {error}", file=sys.stderr)
        return IMPOSSIBLE


def measure(options: Options) -> int:
    """Runs every scenario in every mode and writes the results; returns the exit code.

    Raises:
        BenchError: Nothing could be measured.
    """
    target, task = _chosen(options.target, options.model)
    library = Library.read(task, options.data)
    conversation = Conversation(target, library)
    submission = Submission(options.out, target.model, precision_of(target))
    fp32 = None
    if options.reference is not None and "accuracy" in options.modes:
        fp32 = accuracy.reference(Conversation(_reference(options.reference, target.model), library))
    print(f"{target.model} ({task}, {submission.precision}): {library.source}")
    submission.describe(library)
    passed = True
    for scenario in options.scenarios:
        conf = user_conf(SCENARIOS[scenario], conversation, options.rate, options.seconds, options.latency_ms)
        for mode in options.modes:
            file = submission.begin(scenario, mode, conf)
            with Child("loadtest.mlperf.run") as child:
                child.ask(
                    "run",
                    _LIMIT_S + 2 * options.seconds,
                    target=dataclasses.asdict(target),
                    task=task,
                    data=str(options.data) if options.data else None,
                    scenario=scenario,
                    mode=mode,
                    conf=str(file),
                    out=str(submission.logs(scenario, mode)),
                )
        rules = _rules(submission, scenario, options, library, fp32)
        submission.conclude(scenario, library, rules)
        passed = passed and rules.passed
        if options.ours and (found := beside(scenario, conversation, options.rate, options.seconds)):
            print(f"{SCENARIOS[scenario].name}, ours: {found}", flush=True)
    print(f"results: {options.out}")
    return PASSED if passed else MISSED


def _rules(
    submission: Submission, scenario: str, options: Options, library: Library, fp32: Sequence[bytes] | None
) -> Rules:
    """What came of a scenario's runs, which is printed too."""
    verdict = judged = None
    if "performance" in options.modes:
        verdict = read_verdict(submission.logs(scenario, "performance") / "mlperf_log_summary.txt")
        print(verdict.text(), flush=True)
    if fp32 is not None:
        log = submission.logs(scenario, "accuracy") / "mlperf_log_accuracy.json"
        judged = accuracy.judge(library, accuracy.read_log(log, len(library.samples)), fp32)
        print(f"{SCENARIOS[scenario].name}, accuracy: {judged.text()}", flush=True)
    if verdict is not None and options.seconds < FULL_S:
        print(f"  not compliant: runs of {options.seconds:g} s, the rules ask for {FULL_S:g} s")
    return Rules(options.seconds, verdict, judged)


def _chosen(target: Target, name: str) -> tuple[Target, str]:
    """The target with its model, and the model's task.

    Raises:
        BenchError: There is none, or several.
    """
    found = [model for model in models_of(target, name) if model.task in TASKS]
    if len(found) != 1:
        known = ", ".join(f"{model.name} ({model.task})" for model in found) or "none"
        raise BenchError(f"{target.authority} must have one model for {' or '.join(TASKS)}, or --model; it has {known}")
    return dataclasses.replace(target, model=found[0].name), found[0].task


def _reference(target: Target, model: str) -> Target:
    """The reference with the same model.

    Raises:
        BenchError: It does not compute in fp32.
    """
    found = dataclasses.replace(target, model=model)
    precision = precision_of(found)
    if precision not in {"float32", ""}:
        raise BenchError(f"--reference {target.url}: {model} is {precision} there; start it with --precision fp32")
    return found


if __name__ == "__main__":
    sys.exit(main())
