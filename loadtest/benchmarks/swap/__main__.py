"""`python -m loadtest.benchmarks.swap`: p99 during a swap of versions beside p99 before it, on this machine.

    python -m loadtest.benchmarks.swap --models models --minutes 30

Each step that is measured is kept in the file named by --out: the same command goes on where it was ended. The page
beside the file is written anew each time.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.ending import in_order
from loadtest.benchmarks.store import Store, add_options
from loadtest.benchmarks.swap import page
from loadtest.benchmarks.swap.measure import Bench, Plan, steps
from loadtest.errors import BenchError
from loadtest.generator.workload import find_bundle
from loadtest.report import machine

if TYPE_CHECKING:
    from collections.abc import Sequence


def measure(given: argparse.Namespace, plan: Plan) -> Store:
    """Measures what is missing and returns everything.

    Raises:
        BenchError: A server does not start, a version is refused, or the file holds something else.
    """
    bundle = find_bundle(given.models, given.precision)
    digest = hashlib.sha256(bundle.artifact.read_bytes()).hexdigest()
    facts = {"machine": machine.facts(), "model": bundle.model, bundle.artifact.name: digest, "plan": asdict(plan)}
    store = Store.open(given.out, facts, fresh=given.fresh)
    if given.page_only:
        return store
    for name, capacity in (("mixed", given.capacity_mixed), ("short", given.capacity_short)):
        if capacity is not None and f"capacity {name}" not in store.steps:
            store.keep(f"capacity {name}", {"capacity_per_s": capacity, "confidence": "given"})
    with tempfile.TemporaryDirectory(dir=given.scratch) as place:
        bench = Bench.over(bundle, machine.usable_cores(), Path(place), plan, store)
        store.fill(steps(bench), given.minutes, lambda name: (given.only or "") in name)
    return store


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.swap", description=(__doc__ or "").partition("\n")[0]
    )
    usual = Plan()
    add_options(made, "docs/benchmarks/swap.json")
    made.add_argument("--scratch", type=Path, help="where there is room for the versions of one round")
    made.add_argument("--only", help="measure only steps whose names hold this")
    made.add_argument("--rounds", type=int, default=usual.rounds, help=f"default: {usual.rounds}")
    made.add_argument("--swaps", type=int, default=usual.swaps, help=f"of a round (default: {usual.swaps})")
    made.add_argument("--calm-s", type=float, default=usual.calm_s, help=f"before each (default: {usual.calm_s:g})")
    made.add_argument("--room-s", type=float, default=usual.room_s, help=f"for each (default: {usual.room_s:g})")
    made.add_argument("--capacity-mixed", type=float, help="requests a second, in place of a search for it")
    made.add_argument("--capacity-short", type=float, help="the same of short texts")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 0 whatever the verdict, and 1 where nothing can be measured."""
    words = sys.argv[1:] if argv is None else argv
    given = parser().parse_args(words)
    if min(given.rounds, given.swaps) < 1 or min(given.calm_s, given.room_s) < 1:
        parser().error("--rounds, --swaps, --calm-s and --room-s must be at least 1")
    try:
        with in_order():
            store = measure(given, Plan(given.rounds, given.swaps, given.calm_s, given.room_s))
    except BenchError as error:
        print(f"loadtest.benchmarks.swap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if store.steps:
        page.write(store, shlex.join(["python", "-m", "loadtest.benchmarks.swap", *words]))
        print(f"written: {store.path}, its page and its plots")
    return 0


if __name__ == "__main__":
    sys.exit(main())
