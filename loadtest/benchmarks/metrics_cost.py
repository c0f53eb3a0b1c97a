"""What keeping the metrics takes of the server's throughput.

The server as it is, and the same with the recording of requests and batches taken out, answer in turns that are so
short that a host which changes its speed meets both alike; what counts is the ratio within a turn.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import BertServer
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.generator.child import Child
from loadtest.generator.workload import make_texts
from loadtest.report.sample import Spread
from loadtest.report.tables import Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from pathlib import Path

    from loadtest.benchmarks.store import Store

_SILENT = """
import sys
import bertserve
from serving.telemetry.metrics import Metrics
Metrics.answered = Metrics.batch_started = Metrics.batch_ended = lambda *_: None
sys.exit(bertserve.main())
"""
"""The server without what it records; a process of its own runs this, as this package shares no code with it."""

_TOKENS, _TEXTS, _CONNECTIONS = 8, 200, 32
_MOST_PERCENT = 3.0
"""What metrics may cost, by docs/metrics.md."""

COUNTED, SILENT = "as it is", "recording nothing"


class SilentServer(BertServer):
    """`bertserve serve` that records nothing."""

    def __init__(self, models: Path, precision: str, threads: int) -> None:
        """As `BertServer`."""
        super().__init__(models, precision, threads)
        self._command = [sys.executable, "-c", _SILENT, *self._command[1:]]


class MetricsCostBenchmark(Benchmark):
    """Both servers in turns, the first one changing."""

    name = "metrics-cost"
    purpose = "throughput with the metrics beside throughput without them"
    rounds = 100
    seconds = 0.5

    @cached_property
    def _turns(self) -> list[Turn]:
        bundle, turns = self.bundle, []
        texts = {_TOKENS: [text.text for text in make_texts(bundle.path, _TOKENS, _TEXTS)]}
        for subject, kind in ((COUNTED, BertServer), (SILENT, SilentServer)):
            server = self.stack.enter_context(kind(self.options.models, self.options.precision, available_cpus()))
            client = self.stack.enter_context(Child("loadtest.generator.client"))
            way: dict[str, Any] = {"way": subject, "form": "ours", "port": server.http_port, "endpoint": "/embed"}
            client.ask("open", hidden_size=bundle.hidden_size, texts=texts, **way)
            arguments = {"way": subject, "tokens": _TOKENS, "connections": _CONNECTIONS}
            turns.append(Turn(subject, client, arguments, self.options.seconds, server))
        return turns

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  there is one length
        return measure_round(self._turns if number % 2 else self._turns[::-1], self.say)

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        ratios = samples.ratios(_TOKENS, COUNTED, SILENT, "per_s")
        percents = [100 * (1 - ratio) for ratio in ratios]
        cost = Spread.quartiles(percents) if len(percents) > 1 else Spread.of(percents)
        kept = "kept" if cost.median <= _MOST_PERCENT else "MISSED"
        verdict = (
            f"**Recording requests and batches takes {cost.median:.1f}% of the throughput** (quartiles {cost.low:.1f}%"
            f" and {cost.high:.1f}%; at most {_MOST_PERCENT:g}% is asked: {kept})."
        )
        method = (
            f"{_CONNECTIONS} connections, texts of {_TOKENS} tokens: the load under which the server itself costs most."
            f" {len(ratios)} turns, each the ratio of two neighbouring measurements."
        )
        rows = [[name, f"{samples.spread(_TOKENS, name, 'per_s').median:,.0f}"] for name in (COUNTED, SILENT)]
        table = Table("Replies a second", "", ("server", "median"), rows, words=1)
        return Page("What metrics cost", method, [table], verdict)
