"""Front processes: the cost of a text in each process with a no-op engine, and mixed lengths with a real engine."""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from bertserve.loadtest.benchmarks.drive import block, closed_loop, drive, even, mixed_texts
from bertserve.loadtest.benchmarks.runner import Benchmark, Option
from bertserve.loadtest.benchmarks.server_process import HOST
from bertserve.loadtest.benchmarks.turns import Samples, Turn, measure_round
from bertserve.loadtest.generator.client import GRPC
from bertserve.loadtest.generator.messages import Target
from bertserve.loadtest.generator.workload import make_texts
from bertserve.loadtest.report.sample import Spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bertserve.loadtest.benchmarks.drive import Workload
    from bertserve.loadtest.benchmarks.server_process import BertServer
    from bertserve.loadtest.benchmarks.store import Step, Store
    from bertserve.loadtest.report.sample import Sample

COUNTS = ONE, FRONTS = 1, 2
"""Front processes of the servers. With one, a single process does everything but the engine's work."""

PROTOCOLS = ("HTTP", "gRPC")
DEADLINE_MS = 250
SHARES = (0.6, 1.5)
"""Offered rates of mixed lengths, as shares of the closed-loop throughput with one process."""

_FAKE = ("--engine", "fake", "--fake-ms", "0", "--precision", "fp32")
_BUSY, _LONE = (32, 128), 1
_TEXTS = 200
_CAPACITIES, _CAPACITY_CONNECTIONS, _CAPACITY_S = 3, 4, 3.0
_PATIENCE_S = 2.0
_FIRST_S, _FIRST_RATE = 4.0, 20.0

Block = dict[str, float]
Blocks = dict[float, list[dict[int, Block]]]
"""Open-loop measurements by share: of each round, by the number of fronts."""


class FrontsBenchmark(Benchmark):
    """`python -m bertserve.loadtest.benchmarks fronts`."""

    name = "fronts"
    purpose = "Compare a server with two front processes with a server in one process."
    rounds = 10
    seconds = 1.0
    tokens = (8, 128)
    own = (
        Option("--block-s", 8.0, "Duration of an open-loop measurement, in seconds (default: %(default)s)."),
        Option("--blocks", 10, "Number of open-loop measurements of each server and rate (default: %(default)s)."),
    )

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "block_s": self.options.block_s}

    def steps(self) -> Iterator[Step]:
        yield from super().steps()
        for number in range(1, _CAPACITIES + 1):
            yield f"capacity {number}", self._capacity
        for number in range(1, self.options.blocks + 1):
            for share in SHARES:
                for count in COUNTS[:: 1 if number % 2 else -1]:
                    yield f"block {number} {share:g} {count}", partial(self._block, number, share, count)

    def measure(self, number: int, tokens: int) -> dict[str, Any]:
        turns = self.turns(tokens)
        return measure_round(turns[:: 1 if number % 2 else -1], self.say)

    def turns(self, tokens: int) -> list[Turn]:
        return [
            self._asked[protocol, count](tokens, connections)
            for protocol in PROTOCOLS
            for connections in (*_BUSY, _LONE)
            for count in COUNTS
        ]

    @cached_property
    def _asked(self) -> dict[tuple[str, int], Any]:
        """The clients of the servers whose engine answers at once."""
        bundle, asked = self.bundle, {}
        texts = {length: make_texts(bundle.path, length, _TEXTS) for length in self.options.tokens}
        words = {length: [text.text for text in group] for length, group in texts.items()}
        for count in COUNTS:
            server = self._server(count, *_FAKE)
            places = {"HTTP": ("ours", server.http_port, "/embed"), "gRPC": (GRPC, server.grpc_port, bundle.model)}
            for protocol, place in places.items():
                asked[protocol, count] = self.asked(f"{protocol} N={count}", server, place, bundle.hidden_size, words)
        return asked

    def _server(self, count: int, *words: str) -> BertServer:
        return self.server(*words, *(("--front-processes", str(count)) if count > 1 else ()))

    @cached_property
    def _mixed(self) -> Workload:
        return mixed_texts(self.bundle)

    @cached_property
    def _targets(self) -> dict[int, Target]:
        """The servers with a real engine, after their first load."""
        targets = {}
        for count in COUNTS:
            server = self._server(count)
            targets[count] = Target("v2", HOST, server.http_port, self.bundle.model, timeout_ms=DEADLINE_MS)
            drive(targets[count], self._mixed, even(_FIRST_S), _FIRST_RATE, 1)
        return targets

    def _capacity(self) -> dict[str, float]:
        """Texts per second of a few clients in a closed loop, with one process."""
        target = self._targets[ONE]
        place, texts = ("v2", target.port, target.path("embed")), self._mixed.texts[::7]
        return {"per_s": closed_loop(place, self.bundle.hidden_size, texts, _CAPACITY_CONNECTIONS, _CAPACITY_S)}

    def _block(self, number: int, share: float, count: int) -> dict[str, float]:
        rate = share * _capacity(self.store)
        limits = {"good_ms": DEADLINE_MS, "patience_s": _PATIENCE_S}
        return block(self._targets[count], self._mixed, self.options.block_s, rate, 10 * number, **limits)

    def figures(self, store: Store) -> dict[str, Any]:
        samples, blocks = Samples.of(store), _blocks(store)
        shown = {"protocols": PROTOCOLS, "busy": _BUSY, "subject": _subject, "deadline_ms": DEADLINE_MS}
        found = {"samples": samples, "all_cpu": _all_cpu, "blocks": blocks, "ratio": _ratio}
        return {"capacity": _capacity(store) if blocks else None, **shown, **found}


def _subject(protocol: str, count: int, connections: int) -> str:
    return f"{protocol} N={count} {connections}"


def _all_cpu(samples: Samples, tokens: int, protocol: str, connections: int) -> Spread:
    """CPU time of core and fronts, as a multiple of the one process's."""

    def ratio(one: Sample, fronts: Sample) -> float:
        return (fronts.server_cpu_us + fronts.fronts_cpu_us) / one.server_cpu_us

    return Spread.of(samples.values(tokens, [_subject(protocol, count, connections) for count in COUNTS], ratio))


def _capacity(store: Store) -> float:
    return statistics.median(float(found["per_s"]) for found in store.named("capacity ").values())


def _blocks(store: Store) -> Blocks:
    """The rounds of each rate in which both servers were measured."""
    found: defaultdict[float, defaultdict[int, dict[int, Block]]] = defaultdict(lambda: defaultdict(dict))
    for name, measured in store.named("block ").items():
        number, share, count = name.split()
        found[float(share)][int(number)][int(count)] = measured
    whole = {share: [pair for pair in rounds.values() if len(pair) == len(COUNTS)] for share, rounds in found.items()}
    return {share: pairs for share, pairs in whole.items() if pairs}


def _ratio(pairs: Sequence[dict[int, Block]], figure: str) -> Spread:
    """A figure with fronts divided by the same in one process."""
    return Spread.of([pair[FRONTS][figure] / pair[ONE][figure] for pair in pairs])
