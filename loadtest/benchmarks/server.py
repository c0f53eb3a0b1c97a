"""Compares the server with the raw engine, in turns: added latency of a text, and remaining throughput."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from bertserve.loadtest.benchmarks.raw_engine import OPTIONS, WIDE, ways
from bertserve.loadtest.benchmarks.runner import Benchmark
from bertserve.loadtest.benchmarks.turns import Samples, Turn, idle_percent
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.client import GRPC
from bertserve.loadtest.generator.workload import make_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bertserve.loadtest.benchmarks.server_process import BertServer
    from bertserve.loadtest.benchmarks.store import Step, Store
    from bertserve.loadtest.generator.child import Child

CONNECTIONS = (1, 8, 32)
PROTOCOLS = ("HTTP", "gRPC")
_TEXTS = 200
_MIN_COSINE = 0.9999


class Baseline(NamedTuple):
    """The raw engine at one length: lowest median latency on the wide session, and most texts per second.

    It has no handicap: the better options and the better way count for each.
    """

    fastest: str
    busiest: str

    @classmethod
    def of(cls, samples: Samples, tokens: int) -> Baseline:
        raw = [subject for subject in samples.subjects(tokens) if subject.startswith("raw ")]
        wide = [subject for subject in raw if subject.split()[1] == WIDE]
        fastest = min(wide, key=lambda subject: samples.spread(tokens, subject, "p50_ms").median)
        return cls(fastest, max(raw, key=lambda subject: samples.spread(tokens, subject, "per_s").median))


class ServerBenchmark(Benchmark):
    """`make bench`."""

    name = "server"
    purpose = "Compare the server with the raw engine: latency, throughput, memory, start-up time."
    out = "docs/benchmarks/main-job.json"
    # Many short rounds: a shared host changes its speed every few seconds, and all subjects must meet the same speed.
    rounds = 20
    seconds = 0.4
    tokens = (8, 32, 128)

    def steps(self) -> Iterator[Step]:
        yield from super().steps()
        yield "usage", self._usage

    @cached_property
    def _server(self) -> BertServer:
        bundle = self.bundle
        if max(self.options.tokens) > bundle.max_length:
            raise BenchError(f"{bundle.path} takes {bundle.max_length} tokens at most; choose others with --tokens")
        return self.server()

    @cached_property
    def _subjects(self) -> tuple[Child, dict[str, Callable[..., Turn]]]:
        """The raw engine, and the client of the server over each protocol.

        Raises:
            BenchError: The server's vectors differ from the raw engine's: they would not do the same work.
        """
        bundle, server = self.bundle, self._server
        texts = {tokens: make_texts(bundle.path, tokens, _TEXTS) for tokens in self.options.tokens}
        raw = self.raw_engine(bundle, {tokens: [text.ids for text in group] for tokens, group in texts.items()})
        words = {tokens: [text.text for text in group] for tokens, group in texts.items()}
        asked = {}
        places = {"HTTP": ("ours", server.http_port, "/embed"), "gRPC": (GRPC, server.grpc_port, bundle.model)}
        for protocol, place in places.items():
            asked[protocol] = self.asked(protocol, server, place, bundle.hidden_size, words)
            for tokens in texts:
                [expected] = raw.ask("vectors", tokens=tokens, count=1)
                [vector] = self.client.ask("vectors", way=protocol, tokens=tokens, count=1)
                cosine = sum(a * b for a, b in zip(expected, vector, strict=True))
                if cosine < _MIN_COSINE:
                    raise BenchError(
                        f"over {protocol} a text of {tokens} tokens has another embedding than from the raw engine"
                        f" (cosine {cosine:.5f}): they do not run the same artifact"
                    )
        return raw, asked

    def turns(self, tokens: int) -> Iterator[Turn]:
        raw, asked = self._subjects
        others = [way for way in ways(batch_invariant=self.bundle.batch_invariant) if way != WIDE]
        for group, connections in (([WIDE], CONNECTIONS[:1]), (others, CONNECTIONS[1:])):
            for options, protocol in zip(OPTIONS, PROTOCOLS, strict=True):
                for way in group:
                    arguments = {"tokens": tokens, "way": way, "options": options}
                    yield Turn(f"raw {way} {options}", raw, arguments, self.options.seconds)
                yield from (asked[protocol](tokens, count) for count in connections)

    def _usage(self) -> dict[str, float]:
        memory = self._server.memory_bytes()
        idle = idle_percent({"server": self._server})["server"]
        used = {"server_mb": memory.server / 1e6, "engine_mb": memory.engine / 1e6, "idle_percent": idle}
        return {"ready_s": self._server.ready_s, **used}

    def figures(self, store: Store) -> dict[str, Any]:
        samples = Samples.of(store)
        baselines = {tokens: Baseline.of(samples, tokens) for tokens in samples.rounds}
        return {"samples": samples, "baselines": baselines, "protocols": PROTOCOLS}
