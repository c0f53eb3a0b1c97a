"""`python -m loadtest.benchmarks.metrics_cost`: what keeping the metrics takes of the server's throughput.

    python -m loadtest.benchmarks.metrics_cost --models models --out docs/benchmarks/metrics-cost.md

The server as it is, and the same with the recording of requests and batches taken out, answer in turns that are so
short that a host which changes its speed meets both alike; what counts is the ratio within a turn.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from loadtest.benchmarks.ending import in_order
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle, make_texts
from loadtest.report import machine
from loadtest.report.progress import Progress
from loadtest.report.tables import Table, as_markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

_SILENT = """
import sys
import bertserve
from serving.telemetry.metrics import Metrics
Metrics.answered = Metrics.batch_started = Metrics.batch_ended = lambda *_: None
sys.exit(bertserve.main())
"""
"""The server without what it records; a process of its own runs this, as this package shares no code with it."""

_TOKENS, _TEXTS, _CONNECTIONS = 8, 200, 32
_WARM_UP_S = 0.1
_MOST_PERCENT = 3.0
"""What metrics may cost, by docs/metrics.md."""


class SilentServer(BertServer):
    """`bertserve serve` that records nothing."""

    def __init__(self, models: Path, precision: str, threads: int) -> None:
        """As `BertServer`."""
        super().__init__(models, precision, threads)
        self._command = [sys.executable, "-c", _SILENT, *self._command[1:]]


@dataclass(slots=True)
class Found:
    """Replies a second, turn by turn.

    Attributes:
        counted: Of the server as it is.
        silent: Of the one that records nothing.
    """

    counted: list[float] = field(default_factory=list)
    silent: list[float] = field(default_factory=list)

    @property
    def percents(self) -> list[float]:
        """What recording took in each turn, in percent of the throughput without it."""
        return [100 * (1 - one / other) for one, other in zip(self.counted, self.silent, strict=True)]


def measure(models: Path, rounds: int, seconds: float, progress: Progress) -> Found:
    """Measures both in turns, the first one changing.

    Raises:
        BenchError: A server does not start, or a reply is wrong.
    """
    bundle, threads = find_bundle(models, "auto"), machine.usable_cores()
    texts = {_TOKENS: make_texts(bundle.path, _TOKENS, _TEXTS)}
    found = Found()
    with contextlib.ExitStack() as stack:
        clients = []
        for server in (BertServer(models, "auto", threads), SilentServer(models, "auto", threads)):
            stack.enter_context(server)
            client = stack.enter_context(Child("loadtest.generator.http_client"))
            told = {tokens: [text.text for text in group] for tokens, group in texts.items()}
            client.ask("open", host=HOST, port=server.http_port, hidden_size=bundle.hidden_size, texts=told)
            clients.append(client)
        turns = [(clients[0], found.counted), (clients[1], found.silent)]
        for number in range(rounds):
            for client, rates in turns if number % 2 else reversed(turns):
                asked = {"connections": _CONNECTIONS, "tokens": _TOKENS, "warm_up_s": _WARM_UP_S, "seconds": seconds}
                rates.append(client.ask("measure", **asked)["per_s"])
            progress.say(f"turn {number + 1} of {rounds}: {statistics.median(found.percents):+.1f}% so far")
    return found


def page(found: Found, command: str) -> str:
    """The page in Markdown."""
    percents = found.percents
    middle = statistics.median(percents)
    low, _, high = statistics.quantiles(percents, n=4) if len(percents) > 1 else (middle, middle, middle)
    rows = [
        [name, f"{statistics.median(rates):,.0f}"]
        for name, rates in (("as it is", found.counted), ("recording nothing", found.silent))
    ]
    table = Table("Replies a second", "", ("server", "median"), rows, words=1)
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.facts().items())
    verdict = "kept" if middle <= _MOST_PERCENT else "MISSED"
    return (
        "# What metrics cost\n\n"
        f"**Recording requests and batches takes {middle:.1f}% of the throughput** (quartiles {low:.1f}% and"
        f" {high:.1f}%; at most {_MOST_PERCENT:g}% is asked: {verdict}).\n\n"
        f"Made by `{command}`. {_CONNECTIONS} connections, texts of {_TOKENS} tokens: the load under which the server"
        f" itself costs most. {len(percents)} turns, each the ratio of two neighbouring measurements.\n\n{facts}\n\n"
        f"{as_markdown(table)}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and writes; returns 1 where that is impossible."""
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.benchmarks.metrics_cost", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--models", type=Path, default=Path("models"), help="model repository")
    parser.add_argument("--rounds", type=int, default=100, help="turns (default: 100)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a measurement (default: 0.5)")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/metrics-cost.md"), help="the page")
    given = parser.parse_args(words)
    if given.rounds < 1 or given.seconds <= 0:
        parser.error("--rounds and --seconds must be positive")
    try:
        with in_order(), Progress(0.0) as progress:
            found = measure(given.models, given.rounds, given.seconds, progress)
    except BenchError as error:
        print(f"loadtest.benchmarks.metrics_cost: {error}", file=sys.stderr)
        return 1
    given.out.write_text(
        page(found, shlex.join(["python", "-m", "loadtest.benchmarks.metrics_cost", *words])), encoding="utf-8"
    )
    print(f"written: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
