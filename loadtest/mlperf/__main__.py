"""`python -m loadtest.mlperf`: runs MLPerf LoadGen against a running server.

Exit codes: 0 LoadGen's verdicts are VALID and the accuracy gates pass, 1 one is not, 2 nothing could be measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.errors import BenchError, check_above_zero
from loadtest.generator.messages import KEY_VARIABLE
from loadtest.mlperf.ours import beside
from loadtest.mlperf.run import MODES
from loadtest.mlperf.scenarios import FULL_S, SCENARIOS
from loadtest.mlperf.session import Load, Session, target_of
from serving.options import OptionParser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from loadtest.generator.messages import Target

PASSED, MISSED, IMPOSSIBLE = 0, 1, 2


@dataclass(slots=True, frozen=True)
class Options:
    """A validated command line.

    Attributes:
        target: The server.
        reference: A server of the same model in fp32; None: accuracy is not measured.
        model: The chosen model; empty: the server's only model with a supported task.
        scenarios: From `SCENARIOS`.
        modes: From `MODES`.
        data: File with the samples; None: the built-in ones.
        load: Parameters of the performance runs.
        ours: Whether to measure with our own generators too.
        out: Directory of the results.
    """

    target: Target
    reference: Target | None
    model: str
    scenarios: tuple[str, ...]
    modes: tuple[str, ...]
    data: Path | None
    load: Load
    ours: bool
    out: Path

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Options:
        """Validates the arguments from argparse.

        Raises:
            BenchError: An argument is invalid or missing; the message is one line.
        """
        modes = tuple(MODES) if arguments.mode == "both" else (arguments.mode,)
        scenarios = tuple(arguments.scenario or SCENARIOS)
        if "server" in scenarios and arguments.rate is None:
            raise BenchError(
                "--rate is missing; set the query rate of `server` (bertserve load --find-capacity finds it)"
            )
        if "accuracy" in modes and arguments.reference is None:
            raise BenchError("--reference is missing; set the URL of a server with the same model in fp32")
        check_above_zero(arguments, "rate", "seconds", "p99_ms")
        return cls(
            target_of(arguments.target),
            target_of(arguments.reference) if arguments.reference else None,
            arguments.model or "",
            scenarios,
            modes,
            arguments.data,
            Load(arguments.rate or 0.0, arguments.seconds, arguments.p99_ms or 0.0),
            arguments.beside_ours,
            arguments.out,
        )


def parser() -> argparse.ArgumentParser:
    """Builds the argument parser."""
    made = OptionParser(
        prog="python -m loadtest.mlperf",
        description="Run MLPerf's LoadGen against a server, over the Open Inference Protocol.",
        epilog=f"The environment variable {KEY_VARIABLE} holds the API key, if the server wants one.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--target", default="http://127.0.0.1:8000", metavar="URL", help="Server to test (default: %(default)s)."
    )
    made.add_argument("--model", help="Model to request (default: the server's only one that embeds or answers).")
    made.add_argument(
        "--scenario", action="append", choices=SCENARIOS, help="Scenario to run. Repeatable (default: all four)."
    )
    made.add_argument("--mode", choices=[*MODES, "both"], default="performance", help="Mode (default: %(default)s).")
    made.add_argument(
        "--data", type=Path, metavar="FILE", help="File of texts, one per line, or of questions as SQuAD 1.1 JSON."
    )
    made.add_argument("--reference", metavar="URL", help="Server with the same model in fp32, for the accuracy gate.")
    made.add_argument("--rate", type=float, metavar="R", help="Query rate of the `server` scenario, in queries/s.")
    made.add_argument(
        "--p99-ms",
        type=float,
        metavar="MS",
        help="p99 limit of the `server` scenario, in ms (default: 130, as for BERT).",
    )
    made.add_argument(
        "--seconds",
        type=float,
        default=FULL_S,
        metavar="S",
        help="Minimum duration, in seconds. Below 600, the run is not compliant.",
    )
    made.add_argument(
        "--beside-ours",
        action="store_true",
        help="Also run `single-stream` and `server` with bertserve's load generator.",
    )
    made.add_argument(
        "--out", type=Path, default=Path("mlperf-results"), metavar="DIR", help="Results (default: %(default)s)."
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
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
    session = Session.open(options.target, options.model, options.data, options.out)
    if options.reference is not None and "accuracy" in options.modes:
        session = session.beside(options.reference)
    library, load = session.library, options.load
    print(f"{session.model} ({library.task}, {session.precision}): {library.source}")
    passed = True
    for scenario in options.scenarios:
        found = session.run(scenario, options.modes, load)
        passed = passed and found.passed
        if found.verdict is not None:
            breaches = "".join(f"; not compliant: {breach}" for breach in found.breaches)
            print(f"{found.verdict.text()}, {load.seconds:g} s{breaches}", flush=True)
        if found.accuracy is not None:
            print(f"{SCENARIOS[scenario].name}, accuracy: {found.accuracy.text()}", flush=True)
        if options.ours and (ours := beside(scenario, session.conversation, load.rate, load.seconds)):
            print(f"{SCENARIOS[scenario].name}, ours: {ours}", flush=True)
    print(f"results: {options.out}")
    return PASSED if passed else MISSED


if __name__ == "__main__":
    sys.exit(main())
