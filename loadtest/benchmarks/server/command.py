"""`make bench`: the server against the raw engine, on this machine, in one run.

    python -m loadtest.benchmarks.server.command --models models --out docs/benchmarks/main-job.json

What is compared is measured in turns, length by length and round by round, so that whatever else the
machine does meets all subjects alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.ending import in_order
from loadtest.benchmarks.processes import machine_cpu_s
from loadtest.benchmarks.server import page
from loadtest.benchmarks.server.report import Report
from loadtest.benchmarks.server.rounds import Plan, Rounds
from loadtest.benchmarks.server.subjects import LENGTHS
from loadtest.benchmarks.server_process import BertServer
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle, make_texts
from loadtest.report import machine

if TYPE_CHECKING:
    from collections.abc import Sequence


_TEXTS_PER_LENGTH = 200


@dataclass(slots=True, frozen=True)
class Settings:
    """What a run is told.

    Attributes:
        models: A model repository.
        precision: `auto`, `int8` or `fp32`.
        plan: What to measure.
        out: Where the figures go, if anywhere.
    """

    models: Path
    precision: str
    plan: Plan
    out: Path | None


def run(settings: Settings, command: str) -> Report:
    """Measures and returns the report; starts and ends everything that it needs.

    Raises:
        BenchError: The server does not start, or a reply is wrong.
    """
    bundle = find_bundle(settings.models, settings.precision)
    plan, threads = settings.plan, machine.usable_cores()
    if max(plan.lengths) > bundle.max_length:
        raise BenchError(f"{bundle.path} takes {bundle.max_length} tokens at most; choose other lengths with --tokens")
    texts = {tokens: make_texts(bundle.path, tokens, _TEXTS_PER_LENGTH) for tokens in plan.lengths}
    with contextlib.ExitStack() as stack:
        _show("starting the server")
        server = stack.enter_context(BertServer(settings.models, settings.precision, threads))
        modules = {
            "raw": "loadtest.benchmarks.raw_engine",
            "HTTP": "loadtest.generator.http_client",
            "gRPC": "loadtest.generator.grpc_client",
        }
        children = {name: stack.enter_context(Child(module)) for name, module in modules.items()}
        rounds = Rounds(plan, server, children)
        rounds.open(bundle, threads, texts)
        steal, started = machine_cpu_s()[1], time.perf_counter()
        rounds.run(_show, batch_invariant=bundle.batch_invariant)
        _show("")
        stolen = (machine_cpu_s()[1] - steal) / (time.perf_counter() - started) / (os.cpu_count() or 1)
        memory = server.memory_bytes()
        return Report(
            command=command,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine.facts(),
            model={"model": bundle.model, "version": str(bundle.version), "precision": bundle.precision},
            repeats=rounds.repeats,
            settings={
                "rounds": plan.rounds,
                "seconds": plan.seconds,
                "warm_up_s": plan.warm_up_s,
                "texts_per_length": _TEXTS_PER_LENGTH,
                "cores": threads,
            },
            samples=rounds.samples,
            ready_s=server.ready_s,
            server_mb=memory.server / 1e6,
            engine_mb=memory.engine / 1e6,
            idle_percent=rounds.idle_percent,
            steal_percent=100 * stolen,
        )


def parse(argv: Sequence[str] | None) -> Settings:
    """The settings that a command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.server.command", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="model repository (default: models)")
    parser.add_argument("--precision", choices=("auto", "int8", "fp32"), default="auto", help="artifact to measure")
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="lengths of the texts")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default: 20)")
    parser.add_argument("--seconds", type=float, help="length of a measurement (default: 0.4)")
    parser.add_argument("--quick", action="store_true", help="1 round: does it work at all?")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file and a Markdown page beside it")
    given = parser.parse_args(argv)
    # Many short rounds: a shared host changes its speed every few seconds, and what is compared must meet the same.
    rounds = given.rounds if given.rounds is not None else 1 if given.quick else 20
    seconds = given.seconds if given.seconds is not None else 0.4
    if rounds < 1 or seconds <= 0 or min(given.tokens) < 1:
        parser.error("--rounds, --seconds and --tokens must be positive")
    return Settings(given.models, given.precision, Plan(tuple(given.tokens), rounds, seconds), given.out)


def write(report: Report, out: Path) -> None:
    """Writes the figures, and the page beside them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(page.markdown(report), encoding="utf-8")
    print(f"\nwritten: {out} and {out.with_suffix('.md')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0 once it is measured, whatever the verdict, and 1 where it cannot be."""
    settings = parse(argv)
    words = sys.argv[1:] if argv is None else argv
    try:
        with in_order():
            report = run(settings, shlex.join(["python", "-m", "loadtest.benchmarks.server.command", *words]))
    except BenchError as error:
        _show("")
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(page.text(report))
    if settings.out is not None:
        write(report, settings.out)
    return 0


def _show(progress: str) -> None:
    """Shows where the run is: on a terminal in one line that changes, elsewhere line by line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{progress}", end="", file=sys.stderr, flush=True)
    elif progress:
        print(progress, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
