"""`python -m loadtest.benchmarks.rolling`: proves that replicas can be restarted under load and no request is lost.

    python -m loadtest.benchmarks.rolling --models models --restarts 20 --requests 200000

Exit codes: 0 every promise was kept, 1 one was broken or nothing could be measured.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.ending import in_order
from loadtest.benchmarks.rolling import page
from loadtest.benchmarks.rolling.drive import Plan, experiment
from loadtest.errors import BenchError
from loadtest.report.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.rolling", description=(__doc__ or "").partition("\n")[0]
    )
    made.add_argument("--models", type=Path, default=Path("models"), help="model repository")
    made.add_argument("--restarts", type=int, default=20, help="at least so many (default: 20)")
    made.add_argument("--requests", type=int, default=200_000, help="at least so many (default: 200000)")
    made.add_argument("--rate", type=float, help="requests a second (default: 0.7 of the capacity, which is measured)")
    made.add_argument("--lame-duck-s", type=float, default=5.0, help="as the servers are told (default: 5)")
    made.add_argument("--server", default="", metavar="WORDS", help="more options of each server, as one word")
    made.add_argument("--out", type=Path, default=Path("docs/benchmarks/rolling.md"), help="the page")
    made.add_argument("--logs", type=Path, help="keep the logs of servers and proxy there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes and judges."""
    words = sys.argv[1:] if argv is None else argv
    given = parser().parse_args(words)
    if given.restarts < 1 or given.requests < 1 or (given.rate is not None and given.rate <= 0):
        parser().error("--restarts, --requests and --rate must be positive")
    options = tuple(shlex.split(given.server))
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        plan = Plan(given.models, folder, given.restarts, given.requests, given.rate, options, given.lame_duck_s)
        try:
            with in_order(), Progress(0.0) as progress:
                found = experiment(plan, progress.say)
        except BenchError as error:
            print(f"loadtest.benchmarks.rolling: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    server = shlex.join(["bertserve", "serve", "--lame-duck-s", f"{given.lame_duck_s:g}", *options])
    page.write(found, given.out, shlex.join(["python", "-m", "loadtest.benchmarks.rolling", *words]), server)
    wrong = found.verdict()
    for line in wrong:
        print(f"loadtest.benchmarks.rolling: {line}", file=sys.stderr)
    print(f"{sum(found.offered.values())} requests, {len(found.restarts)} restarts; written: {given.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
