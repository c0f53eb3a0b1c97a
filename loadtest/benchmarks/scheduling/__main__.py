"""`python -m loadtest.benchmarks.scheduling`: our scheduling beside first come, first served, on this machine.

    python -m loadtest.benchmarks.scheduling --models models --minutes 8

Each step that is measured is kept in the file named by --out: the same command goes on where it was ended, so that
it can be measured in several sittings (--minutes). The page beside the file is written anew each time.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from loadtest.benchmarks.ending import in_order
from loadtest.benchmarks.scheduling import page
from loadtest.benchmarks.scheduling.steps import Bench, Plan, steps
from loadtest.benchmarks.store import Store, add_options
from loadtest.errors import BenchError
from loadtest.generator.workload import find_bundle
from loadtest.report import machine

if TYPE_CHECKING:
    from collections.abc import Sequence


def measure(given: argparse.Namespace, plan: Plan) -> Store:
    """Measures what is missing and returns everything.

    Raises:
        BenchError: A server does not start or a generator fails, or the file holds something else.
    """
    bundle = find_bundle(given.models, given.precision)
    digest = hashlib.sha256(bundle.artifact.read_bytes()).hexdigest()
    model = {"model": bundle.model, "version": str(bundle.version), bundle.artifact.name: digest}
    store = Store.open(given.out, {"machine": machine.facts(), **model, "plan": asdict(plan)}, fresh=given.fresh)
    if given.page_only:
        return store
    with contextlib.ExitStack() as stack:
        bench = Bench.over(bundle, machine.usable_cores(), store, plan, stack)
        store.fill(steps(bench), given.minutes, lambda name: name.startswith(given.only or ""))
    return store


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.scheduling", description=(__doc__ or "").partition("\n")[0]
    )
    usual = Plan()
    add_options(made, "docs/benchmarks/scheduling.json")
    made.add_argument("--only", help="measure only steps whose names begin so")
    made.add_argument("--rounds", type=int, default=usual.rounds, help=f"default: {usual.rounds}")
    made.add_argument("--seconds", type=float, default=usual.seconds, help=f"of a run (default: {usual.seconds:g})")
    made.add_argument("--overload-s", type=float, default=usual.overload_s, help=f"default: {usual.overload_s:g}")
    made.add_argument("--probe-s", type=float, default=usual.probe_s, help=f"default: {usual.probe_s:g}")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 0 whatever the verdict, and 1 where nothing can be measured."""
    words = sys.argv[1:] if argv is None else argv
    given = parser().parse_args(words)
    if given.rounds < 1 or min(given.seconds, given.overload_s, given.probe_s) <= 0:
        parser().error("--rounds, --seconds, --overload-s and --probe-s must be positive")
    plan = Plan(given.rounds, given.seconds, given.overload_s, given.probe_s)
    try:
        with in_order():
            store = measure(given, plan)
    except BenchError as error:
        print(f"loadtest.benchmarks.scheduling: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if store.steps:
        page.write(store, shlex.join(["python", "-m", "loadtest.benchmarks.scheduling", *words]))
        print(f"written: {store.path}, its page and its plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
