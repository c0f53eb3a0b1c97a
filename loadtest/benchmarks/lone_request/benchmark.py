"""A lone `/embed` over an engine that costs nothing, beside the same reply by the bare HTTP port.

Both servers run at once and are asked in turns by one process. Where the time goes is noted in a third server, which
carries a clock and is measured by itself: the clock costs time too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import BertServer, ServerProcess, free_ports
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.errors import BenchError
from loadtest.generator.child import Child, module_environment
from loadtest.generator.workload import make_texts
from loadtest.report.sample import Spread
from loadtest.report.tables import MET, Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store

_BARE = Path(__file__).parents[1] / "wires" / "inside" / "ours.py"
_STAMPED = Path(__file__).parent / "inside" / "stamped.py"
_REPLY_BYTES = 5120
_TEXTS, _TOKENS = 8, 8
_MOST_TIMES = 2.2
_STAMPED_S = 5.0
_FAKE = ("--engine", "fake", "--fake-ms", "0")

BARE, EMBED = "bare HTTP port", "/embed"
_STAGES = "stages"


class StampedServer(BertServer):
    """`bertserve serve` with a clock in it, which writes its file when it ends."""

    def __init__(self, models: Path, precision: str, out: Path) -> None:
        """As `BertServer`, with a free engine."""
        super().__init__(models, precision, available_cpus(), *_FAKE)
        self._command = [sys.executable, str(_STAMPED), str(out), *self._command[1:]]
        self._environment = {**self._environment, **module_environment()}


class LoneRequestBenchmark(Benchmark):
    """Both in turns, the first one changing; then the stages."""

    name = "lone-request"
    purpose = "one request at a time over an engine that costs nothing, beside the bare HTTP port, stage by stage"
    rounds = 40
    seconds = 0.5
    length = _TOKENS

    @cached_property
    def _texts(self) -> list[str]:
        return [text.text for text in make_texts(self.bundle.path, _TOKENS, _TEXTS)]

    @cached_property
    def _turns(self) -> list[Turn]:
        [port] = free_ports(1)
        bare = ServerProcess([sys.executable, str(_BARE), "http", str(port)], module_environment(), (port, ""))
        server = BertServer(self.options.models, self.options.precision, available_cpus(), *_FAKE)
        bodies = [json.dumps({"inputs": text}) for text in self._texts]
        client = self.stack.enter_context(Child("loadtest.generator.client"))
        turns = []
        ways: tuple[tuple[str, ServerProcess, int, str, str, int, list[str]], ...] = (
            (BARE, bare, port, "bytes", "/", _REPLY_BYTES, bodies),
            (EMBED, server, server.http_port, "ours", "/embed", self.bundle.hidden_size, self._texts),
        )
        for subject, process, at, form, path, size, texts in ways:
            self.stack.enter_context(process)
            way: dict[str, Any] = {"way": subject, "form": form, "port": at, "endpoint": path}
            client.ask("open", hidden_size=size, texts={_TOKENS: texts}, **way)
            arguments = {"way": subject, "tokens": _TOKENS, "connections": 1}
            turns.append(Turn(subject, client, arguments, self.options.seconds, process))
        return turns

    def steps(self) -> Iterator[Step]:
        yield from super().steps()
        yield _STAGES, self._stages

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  there is one length
        return measure_round(self._turns if number % 2 else self._turns[::-1], self.say)

    def _stages(self) -> dict[str, float]:
        """Median microseconds of each stage."""
        with tempfile.TemporaryDirectory() as folder, Child("loadtest.generator.client") as client:
            out = Path(folder, "stages.json")
            with StampedServer(self.options.models, self.options.precision, out) as server:
                way: dict[str, Any] = {"way": EMBED, "form": "ours", "port": server.http_port, "endpoint": "/embed"}
                client.ask("open", hidden_size=self.bundle.hidden_size, texts={_TOKENS: self._texts}, **way)
                seconds = min(_STAMPED_S, 4 * self.options.seconds)
                client.ask("measure", way=EMBED, connections=1, tokens=_TOKENS, warm_up_s=seconds / 4, seconds=seconds)
            try:
                stages: dict[str, float] = json.loads(out.read_bytes())
            except (OSError, ValueError) as error:
                raise BenchError(f"the server with a clock wrote no stages: {error}") from error
            return stages

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        ratios = samples.ratios(_TOKENS, EMBED, BARE, "p50_ms")
        times = Spread.quartiles(ratios) if len(ratios) > 1 else Spread.of(ratios)
        verdict = (
            f"**`/embed` over a free engine takes {times.median:.2f} times what the bare HTTP port does**"
            f" at 1 connection (quartiles {times.low:.2f} and {times.high:.2f}; at most {_MOST_TIMES:g} is asked:"
            f" {MET[times.median <= _MOST_TIMES]})."
        )
        rows = [
            [
                subject,
                *(samples.spread(_TOKENS, subject, figure).text(3) for figure in ("p50_ms", "p99_ms")),
                f"{samples.spread(_TOKENS, subject, 'server_cpu_us').median:.0f}",
                f"{samples.spread(_TOKENS, subject, 'engine_cpu_us').median:.0f}",
            ]
            for subject in (BARE, EMBED)
        ]
        method = (
            f"One connection, texts of {_TOKENS} tokens, {len(ratios)} rounds of {store.facts['seconds']:g} s a"
            f" measurement in turns; the bare port answers {_REPLY_BYTES:,} bytes to the same bodies without looking at"
            f" them. {samples.quiet()}."
        )
        head = ("", "p50, ms", "p99, ms", "server's CPU, us", "engine's CPU, us")
        parts = [Table("Beside the bare port", "Medians, least to greatest in brackets.", head, rows, words=1)]
        stages: dict[str, float] = store.steps.get(_STAGES, {})
        if stages:
            note = (
                "Medians of a run of its own in which the server carried a clock, whose reading is part of each stage."
                " What comes before the first and after the last is the client's and the kernel's. The bare port has"
                " the first two and the last two stages too."
            )
            stage_rows = [[name, f"{us:.1f}"] for name, us in stages.items()]
            stage_rows.append(["all", f"{sum(stages.values()):.1f}"])
            parts.append(Table("Where the time goes", note, ("up to", "us"), stage_rows, words=1))
        return Page("What a lone request costs", method, parts, verdict)
