"""The server in turns with the raw engine: what it adds to a text's latency, and what it leaves of the throughput."""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.raw_engine import OPTIONS, WIDE, ways
from loadtest.benchmarks.runner import Benchmark, Page, model_of
from loadtest.benchmarks.turns import Samples, Turn, idle_percent, measure_round
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.client import GRPC
from loadtest.generator.workload import make_texts
from loadtest.report.tables import MET, Table
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from loadtest.benchmarks.server_process import BertServer
    from loadtest.benchmarks.store import Step, Store
    from loadtest.report.sample import Spread

CONNECTIONS = (1, 8, 32)
PROTOCOLS = ("HTTP", "gRPC")
OVER_RAW_MS = {"HTTP": 0.45, "gRPC": 0.65}
LATENCY_TOKENS, THROUGHPUT_TOKENS, THROUGHPUT_CONNECTIONS = 8, 128, 32
LEAST_PERCENT_OF_RAW = 85
MEMORY_MB = 500
READY_S = 10

_TEXTS = 200
_LEAST_COSINE = 0.9999
_RAW = "raw "


def fastest_raw(samples: Samples, tokens: int) -> str:
    """The raw engine with the least median latency: the wide session, with the better options."""
    subjects = [f"{_RAW}{WIDE} {options}" for options in OPTIONS]
    return min(subjects, key=lambda subject: samples.spread(tokens, subject, "p50_ms").median)


def busiest_raw(samples: Samples, tokens: int) -> str:
    """The raw engine that brings most texts through, whatever way it goes."""
    subjects = [subject for subject in samples.subjects(tokens) if subject.startswith(_RAW)]
    return max(subjects, key=lambda subject: samples.spread(tokens, subject, "per_s").median)


def over_raw_ms(samples: Samples, tokens: int, protocol: str) -> Spread:
    """How much the median latency at 1 connection lies above the fastest raw engine's of the same round."""
    return samples.above(tokens, f"{protocol} 1", fastest_raw(samples, tokens), "p50_ms")


def percent_of_raw(samples: Samples, tokens: int, protocol: str, connections: int) -> Spread:
    """Throughput in percent of the busiest raw engine's of the same round."""
    return samples.ratio(tokens, f"{protocol} {connections}", busiest_raw(samples, tokens), "per_s").times(100)


class Target(NamedTuple):
    """A figure that the specification asks for, and what was measured; `met` is None where it was not."""

    what: str
    limit: str
    result: str = "not measured"
    met: bool | None = None


def targets(samples: Samples, usage: dict[str, float] | None) -> list[Target]:
    """The specification's targets and whether they are met."""
    judged = []
    for protocol in PROTOCOLS:
        most = OVER_RAW_MS[protocol]
        what = f"{protocol}, {LATENCY_TOKENS} tokens, 1 connection: p50 above the raw engine's"
        target = Target(what, f"at most {most} ms")
        if LATENCY_TOKENS in samples.rounds:
            ms = over_raw_ms(samples, LATENCY_TOKENS, protocol)
            target = Target(what, target.limit, f"{ms.text(2)} ms", ms.median <= most)
        judged.append(target)
    for protocol in PROTOCOLS:
        what = f"{protocol}, {THROUGHPUT_TOKENS} tokens, {THROUGHPUT_CONNECTIONS} connections: throughput, of the raw"
        target = Target(f"{what} engine's best", f"at least {LEAST_PERCENT_OF_RAW}%")
        if THROUGHPUT_TOKENS in samples.rounds:
            percent = percent_of_raw(samples, THROUGHPUT_TOKENS, protocol, THROUGHPUT_CONNECTIONS)
            target = Target(*target[:2], f"{percent.text(0)}%", percent.median >= LEAST_PERCENT_OF_RAW)
        judged.append(target)
    if usage is not None:
        own, engine, ready = usage["server_mb"], usage["engine_mb"], usage["ready_s"]
        memory = f"{own + engine:.0f} MB ({own:.0f} + {engine:.0f})"
        what = "Resident memory of server and engine after the load"
        judged.append(Target(what, f"at most {MEMORY_MB} MB", memory, own + engine <= MEMORY_MB))
        judged.append(Target("Start to READY", f"at most {READY_S} s", f"{ready:.1f} s", ready <= READY_S))
    return judged


class ServerBenchmark(Benchmark):
    """`make bench`."""

    name = "server"
    purpose = "the server beside the raw engine: latency, throughput, memory, start"
    out = "main-job"
    # Many short rounds: a shared host changes its speed every few seconds, and what is compared must meet the same.
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
    def _children(self) -> dict[str, Child]:
        """The measuring processes, with their work; all of them give the same vectors.

        Raises:
            BenchError: The server's vectors are not the raw engine's: they would not do the same work.
        """
        bundle, server = self.bundle, self._server
        texts = {tokens: make_texts(bundle.path, tokens, _TEXTS) for tokens in self.options.tokens}
        ids = {tokens: [text.ids for text in group] for tokens, group in texts.items()}
        words = {tokens: [text.text for text in group] for tokens, group in texts.items()}
        raw = self.raw_engine(ids)
        children = {"raw": raw}
        ways = {"HTTP": ("ours", server.http_port, "/embed"), "gRPC": (GRPC, server.grpc_port, bundle.model)}
        for protocol, (form, port, endpoint) in ways.items():
            client = children[protocol] = self.stack.enter_context(Child("loadtest.generator.client"))
            way: dict[str, Any] = {"way": protocol, "form": form, "port": port, "endpoint": endpoint}
            client.ask("open", hidden_size=bundle.hidden_size, texts=words, **way)
            for tokens in texts:
                [expected] = raw.ask("vectors", tokens=tokens, count=1)
                [vector] = client.ask("vectors", way=protocol, tokens=tokens, count=1)
                cosine = sum(a * b for a, b in zip(expected, vector, strict=True))
                if cosine < _LEAST_COSINE:
                    raise BenchError(
                        f"over {protocol} a text of {tokens} tokens has another embedding than from the raw engine"
                        f" (cosine {cosine:.5f}): they do not run the same artifact"
                    )
        return children

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every round is the same
        return measure_round(list(self._turns(tokens)), self.say)

    def _turns(self, tokens: int) -> Iterator[Turn]:
        """In an order that puts what is compared side by side: the machine's own speed drifts."""
        others = [way for way in ways(batch_invariant=self.bundle.batch_invariant) if way != WIDE]
        for group, connections in (([WIDE], CONNECTIONS[:1]), (others, CONNECTIONS[1:])):
            for options, protocol in zip(OPTIONS, PROTOCOLS, strict=True):
                for way in group:
                    arguments = {"tokens": tokens, "way": way, "options": options}
                    yield Turn(f"{_RAW}{way} {options}", self._children["raw"], arguments, self.options.seconds)
                for count in connections:
                    arguments = {"tokens": tokens, "way": protocol, "connections": count}
                    client = self._children[protocol]
                    yield Turn(f"{protocol} {count}", client, arguments, self.options.seconds, self._server)

    def _usage(self) -> dict[str, float]:
        memory = self._server.memory_bytes()
        return {
            "ready_s": self._server.ready_s,
            "server_mb": memory.server / 1e6,
            "engine_mb": memory.engine / 1e6,
            "idle_percent": idle_percent({"server": self._server})["server"],
            "cores": available_cpus(),
        }

    def page(self, store: Store) -> Page:
        samples, usage = Samples.of(store), store.steps.get("usage")
        method = (
            f"Interleaved rounds ({samples.counts()}) of {store.facts['seconds']:g} s a measurement after a warm-up;"
            f" medians of the rounds, least to greatest in brackets. {samples.quiet()}."
        )
        facts = model_of(store)
        if usage:
            facts["idle"] = f"the server uses {usage['idle_percent']:.1f}% of a core while nobody asks"
        rows = [(target.what, target.limit, target.result, MET[target.met]) for target in targets(samples, usage)]
        tables = [_latency(samples), _throughput(samples), _raw(samples), _costs(samples)]
        verdict = Table("Verdict", "", ("target", "asked", "found", "met"), rows, words=3)
        return Page("The server against the raw engine", method, [*tables, verdict], facts=facts)


def _latency(samples: Samples) -> Table:
    rows = []
    for tokens in samples.rounds:
        raw = fastest_raw(samples, tokens)
        row = [str(tokens), samples.spread(tokens, raw, "p50_ms").text(2), _median(samples, tokens, raw, "p99_ms")]
        for protocol in PROTOCOLS:
            row += [_median(samples, tokens, f"{protocol} 1", figure) for figure in ("p50_ms", "p99_ms")]
            row.append(over_raw_ms(samples, tokens, protocol).text(2, sign="+"))
        rows.append(row)
    own = (f"{protocol} {what}" for protocol in PROTOCOLS for what in ("p50", "p99", "over raw"))
    note = "`over raw`: p50 above the raw engine's p50 of the same round."
    return Table("Latency at 1 connection, ms", note, ("tokens", "raw p50", "raw p99", *own), rows)


def _throughput(samples: Samples) -> Table:
    rows = []
    for tokens in samples.rounds:
        best = samples.spread(tokens, busiest_raw(samples, tokens), "per_s").text(0)
        for connections in CONNECTIONS[1:]:
            row = [str(tokens), str(connections), best]
            for protocol in PROTOCOLS:
                row.append(_median(samples, tokens, f"{protocol} {connections}", "per_s", 0))
                row.append(percent_of_raw(samples, tokens, protocol, connections).text(0))
            rows.append(row)
    own = (f"{protocol}{what}" for protocol in PROTOCOLS for what in ("", " % of raw"))
    note = (
        "`% of raw`: of the raw engine's best of the same round. Clients and server share the cores; the raw engine has"
        " them alone."
    )
    return Table("Throughput, texts a second", note, ("tokens", "connections", "raw best", *own), rows)


def _raw(samples: Samples) -> Table:
    rows = []
    for tokens in samples.rounds:
        best = {"latency": fastest_raw(samples, tokens), "throughput": busiest_raw(samples, tokens)}
        for subject in filter(lambda subject: subject.startswith(_RAW), samples.subjects(tokens)):
            marks = " and ".join(name for name, chosen in best.items() if chosen == subject)
            p50, per_s = (samples.spread(tokens, subject, figure) for figure in ("p50_ms", "per_s"))
            p99 = _median(samples, tokens, subject, "p99_ms")
            rows.append([*subject.split()[1:], marks, str(tokens), p50.text(2), p99, per_s.text(0)])
    note = (
        "`wide`: one session on all cores; `narrow`: a single-threaded session a core, in parallel; `served`: session"
        " options as the server has them; `default`: ONNX Runtime's own. The better one is the baseline."
    )
    head = ("session", "options", "baseline of", "tokens", "p50 ms", "p99 ms", "texts/s")
    return Table("The raw engine, and what of it is the baseline", note, head, rows, words=3)


def _costs(samples: Samples) -> Table:
    rows = []
    for tokens in samples.rounds:
        for protocol in PROTOCOLS:
            for connections in CONNECTIONS:
                median: Callable[..., str] = partial(_median, samples, tokens, f"{protocol} {connections}")
                times = (median(figure) for figure in ("p50_ms", "p99_ms"))
                cpu = (median(f"{who}_cpu_us", 0) for who in ("client", "server", "engine"))
                rows.append([protocol, str(tokens), str(connections), *times, *cpu])
    note = "The client's cost is the benchmark's own, on the same cores."
    head = ("protocol", "tokens", "connections", "p50 ms", "p99 ms", "client", "server", "engine")
    return Table("What a request costs, CPU time in microseconds", note, head, rows, words=1)


def _median(samples: Samples, tokens: int, subject: str, figure: str, decimals: int = 2) -> str:
    return f"{samples.spread(tokens, subject, figure).median:.{decimals}f}"
