"""What a cache of answers gains where texts repeat, and what it costs where none does.

Two streams of real texts, each to a server with the cache and one without in turns. A stream goes on from one
measurement to the next, so that what repeats in it is what a server would see of it.
"""

from __future__ import annotations

import http.client
import re
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark, Page
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.benchmarks.turns import Samples, Turn, measure_round
from loadtest.generator.arrivals import choices, zipf_weights
from loadtest.generator.child import Child
from loadtest.generator.workload import different_texts
from loadtest.report.sample import Spread
from loadtest.report.tables import MET, Table
from serving.host import available_cpus

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store

ZIPF, DIFFERENT = "Zipf", "without repeats"
STREAMS = (ZIPF, DIFFERENT)
_WORDS = (4, 32)
_DIFFERENT_TEXTS, _ZIPF_TEXTS, _ZIPF_REQUESTS = 90_000, 50_000, 250_000
_CACHE_MB, _CONNECTIONS = 16, 32
_LEAST_GAIN, _MOST_PERCENT = 3.0, 2.0
_COUNTS = re.compile(rb'^bertserve_cache_texts_total\{result="(\w+)"\} (\d+)', re.MULTILINE)


class AnswerCacheBenchmark(Benchmark):
    """Each stream to both servers, the first one changing."""

    name = "answer-cache"
    purpose = "throughput with the cache of answers beside throughput without it"
    rounds = 60
    seconds = 0.5

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        parser.add_argument("--fill-s", type=float, default=20.0, help="of Zipf's stream before its first round")
        return ("fill_s",)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "fill_s": self.options.fill_s}

    def steps(self) -> Iterator[Step]:
        yield from super().steps()
        yield "counts", lambda: {stream: _counts(self._cached[stream]) for stream in STREAMS}

    @cached_property
    def _cached(self) -> dict[str, BertServer]:
        return {stream: self._server("--response-cache-mb", str(_CACHE_MB)) for stream in STREAMS}

    def _server(self, *options: str) -> BertServer:
        return self.stack.enter_context(
            BertServer(self.options.models, self.options.precision, available_cpus(), *options)
        )

    @cached_property
    def _turns(self) -> list[Turn]:
        texts = {
            DIFFERENT: different_texts(*_WORDS, _DIFFERENT_TEXTS),
            ZIPF: _drawn(different_texts(*_WORDS, _ZIPF_TEXTS, seed=2), _ZIPF_REQUESTS),
        }
        plain, turns = self._server(), []
        for stream in STREAMS:
            for server, subject in ((plain, stream), (self._cached[stream], f"{stream}, cached")):
                client = self.stack.enter_context(Child("loadtest.generator.client"))
                way: dict[str, Any] = {"way": subject, "form": "embed", "port": server.http_port, "endpoint": "/embed"}
                client.ask("open", hidden_size=self.bundle.hidden_size, texts={self.length: texts[stream]}, **way)
                arguments = {"way": subject, "tokens": self.length, "connections": _CONNECTIONS}
                turns.append(Turn(subject, client, arguments, self.options.seconds, server))
        self.say("filling the cache")
        filled = turns[1]
        filled.child.ask(
            "measure", 2 * self.options.fill_s + 60, warm_up_s=0, seconds=self.options.fill_s, **filled.arguments
        )
        return turns

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  there is one mix of lengths
        return measure_round(self._turns if number % 2 else self._turns[::-1], self.say)

    def page(self, store: Store) -> Page:
        samples = Samples.of(store)
        ratio = partial(samples.ratios, self.length)
        gains, costs = (
            _spread([value(one) for one in ratio(f"{stream}, cached", stream, "per_s")])
            for stream, value in ((ZIPF, float), (DIFFERENT, lambda one: 100 * (1 - one)))
        )
        verdict = (
            f"**Where texts repeat by Zipf's law (s = 1), the cache brings {gains.text(1)} times the throughput"
            f" ({_LEAST_GAIN:g} is asked: {MET[gains.median >= _LEAST_GAIN]}); where none repeats, it takes"
            f" {costs.text(1)}% ({_MOST_PERCENT:g} is allowed: {MET[costs.median <= _MOST_PERCENT]}).** Quartiles in"
            " brackets."
        )
        method = (
            f"Real English of {_WORDS[0]} to {_WORDS[1]} words over `/embed`, {_CONNECTIONS} connections in a closed"
            f" loop, `--response-cache-mb {_CACHE_MB}`. Zipf's stream draws from {_ZIPF_TEXTS:,} texts, of which the"
            f" cache holds about a seventh, and ran for {store.facts['fill_s']:g} s before the first round."
            f" {len(ratio(ZIPF, ZIPF, 'per_s'))} rounds of {store.facts['seconds']:g} s a measurement; a ratio is that"
            f" of neighbours within a round. {samples.quiet()}."
        )
        rows = []
        for subject in (name for stream in STREAMS for name in (stream, f"{stream}, cached")):
            figures = (samples.spread(self.length, subject, figure) for figure in ("per_s", "p50_ms", "p99_ms"))
            counts = store.steps.get("counts", {}).get(subject.removesuffix(", cached"))
            hits = f"{_percent(counts):.0f}%" if counts and subject.endswith("cached") else "-"
            server = samples.spread(self.length, subject, "server_cpu_us").median
            rows.append([subject, *(f"{each.median:,.1f}" for each in figures), f"{server:,.0f}", hits])
        note = (
            "Medians of the rounds. `hits`: of all texts since the start; those that waited for another request count."
        )
        head = ("stream", "texts/s", "p50 ms", "p99 ms", "server's CPU, us a text", "hits")
        return Page("A cache of answers", method, [Table("Both streams", note, head, rows, words=1)], verdict)


def _drawn(texts: list[str], count: int) -> list[str]:
    return [texts[rank] for rank in choices(zipf_weights(len(texts)), count).tolist()]


def _spread(values: list[float]) -> Spread:
    return Spread.quartiles(values) if len(values) > 1 else Spread.of(values)


def _percent(counts: dict[str, int]) -> float:
    return 100 * (1 - counts["miss"] / max(1, sum(counts.values())))


def _counts(server: BertServer) -> dict[str, int]:
    """What the server says of its cache: texts by what became of them."""
    connection = http.client.HTTPConnection(HOST, server.http_port, timeout=5)
    connection.request("GET", "/metrics")
    found = _COUNTS.findall(connection.getresponse().read())
    connection.close()
    return {result.decode(): int(count) for result, count in found}
