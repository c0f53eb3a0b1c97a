"""Our server beside those that a user would pick instead."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from charts.bars import Bar, Block, bars_file
from loadtest.benchmarks.peers import servers
from loadtest.benchmarks.peers.kit import PeerBenchmark, versions_of
from loadtest.benchmarks.peers.page import CONFIGURATIONS, tables, verdict_table
from loadtest.benchmarks.peers.rounds import Rounds
from loadtest.benchmarks.peers.subjects import MANY, ONE, SERVERS, subjects
from loadtest.benchmarks.runner import Page, Part, Picture
from loadtest.benchmarks.turns import Samples
from loadtest.generator.child import Child
from loadtest.generator.workload import find_bundle, make_texts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store

_TEXTS = 200
_COLOURS = {"bertserve": "blue", "raw engine": "violet"}


class PeersBenchmark(PeerBenchmark):
    """`make bench-peers`."""

    name = "peers"
    purpose = "the server beside Triton, infinity and a FastAPI application"
    rounds = 5
    seconds = 2.0

    def steps(self) -> Iterator[Step]:
        yield "versions", self.versions
        yield "check", self._check
        yield from super().steps()

    @cached_property
    def _rounds(self) -> Rounds:
        kit = self.kit
        peers = {name: servers.peer(kit, name) for name in SERVERS}
        for name, peer in peers.items():
            self.say(f"starting {name}")
            self.stack.enter_context(peer.process)
        raw = "loadtest.benchmarks.raw_engine"
        modules = {"fp32": raw, "raw": raw, "client": "loadtest.generator.client"}
        children = {name: self.stack.enter_context(Child(module)) for name, module in modules.items()}
        rounds = Rounds(subjects(kit.ort.model), peers, children)
        self.say("comparing the vectors")
        texts = {tokens: make_texts(kit.ort.path, tokens, _TEXTS) for tokens in self.options.tokens}
        rounds.open(find_bundle(self.options.models, "fp32"), kit.ort, texts, kit.threads)
        return rounds

    def _check(self) -> dict[str, Any]:
        return {"least_cosine": self._rounds.likeness, "idle_percent": self._rounds.idle_percent}

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every round is the same
        return self._rounds.run(tokens, self.options.seconds, self.say)

    def page(self, store: Store) -> Page:
        samples, check = Samples.of(store), store.steps["check"]
        idle = ", ".join(f"{name} {percent:.1f}%" for name, percent in check["idle_percent"].items())
        facts = versions_of(store)
        method = (
            f"Interleaved rounds ({samples.counts()}), {store.facts['seconds']:g} s a measurement after its warm-up;"
            " medians of the rounds, least to greatest in brackets; ratios are taken within a round."
            f" {samples.quiet()}."
        )
        model = store.facts["model"]
        parts: list[Part] = [
            Picture("", plot(samples, model), "p50 and throughput of every server"),
            *tables(samples, model, check["least_cosine"]),
            verdict_table(samples, model),
            CONFIGURATIONS,
        ]
        title = "Beside the servers that one would pick instead"
        return Page(title, method, parts, facts={**facts, "idle, of one core": idle})


def plot(samples: Samples, model: str) -> str:
    """Bars for every server, lengths side by side, latency above throughput."""
    shown = subjects(model)

    def block(title: str, connections: int, figure: str, decimals: int) -> Block:
        panels = {}
        for tokens in samples.rounds:
            spreads = [samples.spread(tokens, subject.key(connections), figure) for subject in shown]
            panels[f"{tokens} tokens"] = [Bar(spread.median, spread.low, spread.high) for spread in spreads]
        return Block(title, decimals, panels)

    blocks = [
        block("p50 at 1 connection, ms (shorter is better)", ONE, "p50_ms", 2),
        block(f"texts a second at {MANY} connections (longer is better)", MANY, "per_s", 0),
    ]
    names = [(subject.name, _COLOURS.get(subject.system, "grey")) for subject in shown]
    return bars_file("p50 and throughput of every server", names, blocks)
