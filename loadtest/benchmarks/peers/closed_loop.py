"""Our server and popular alternatives in a closed loop: texts of one length, one connection and many."""

from __future__ import annotations

import dataclasses
import signal
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from bertserve.export.pages.plots import Bars, as_file
from bertserve.loadtest.benchmarks.peers import who
from bertserve.loadtest.benchmarks.peers.who import (
    BEST,
    DYNAMIC,
    GRPC_NAME,
    HTTP,
    MANY,
    ONE,
    OPENVINO,
    ORT,
    RAW,
    TORCH,
    TRITON,
    TRITON_PLAIN,
    V2,
    subjects,
)
from bertserve.loadtest.benchmarks.turns import Samples, Turn, idle_percent, send_signal
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.client import GRPC
from bertserve.loadtest.generator.workload import find_bundle, make_texts
from bertserve.serving import host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from bertserve.loadtest.benchmarks.peers.who import Subject
    from bertserve.loadtest.benchmarks.server_process import ServerProcess
    from bertserve.loadtest.benchmarks.store import Step, Store
    from bertserve.loadtest.generator.child import Child
    from bertserve.loadtest.generator.workload import Text

_TEXTS, _COMPARED_TEXTS, _ASK_S = 200, 8, 120.0
_MIN_COSINE = {"fp32": 0.9999, "INT8": 0.95}
_MIN_COSINE_OF_ONE_ARTIFACT = 0.9999
_FROZEN_FROM_PERCENT = 1.0
_LONG_TOKENS, _LONGER = 128, 4.0
"""A server that answers 32 long texts at once takes a second or two: a window must be longer than that."""

_COLOURS = {"bertserve": "blue", "raw engine": "violet"}


class PeersBenchmark(who.PeerBenchmark):
    """`make bench-peers`."""

    name = "peers"
    purpose = "Compare the server with Triton, infinity and a FastAPI application, in a closed loop."
    rounds = 5
    seconds = 2.0
    tokens = (8, 32, 128)

    def steps(self) -> Iterator[Step]:
        yield "versions", self.versions
        yield "check", lambda: self._checked
        yield from super().steps()

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        return subjects(self.kit.ort.model)

    @cached_property
    def _servers(self) -> dict[str, ServerProcess]:
        names = dict.fromkeys(subject.server for subject in self.subjects if subject is not RAW)
        return {name: self.opened(name, lambda name=name: self.kit.server(name)) for name in names}  # type: ignore[misc]

    @cached_property
    def _texts(self) -> dict[int, list[Text]]:
        return {tokens: make_texts(self.kit.ort.path, tokens, _TEXTS) for tokens in self.options.tokens}

    @cached_property
    def _raw(self) -> dict[str, Child]:
        """Raw engines over the fp32 model and over our INT8 file."""
        ids = {tokens: [text.ids for text in group] for tokens, group in self._texts.items()}
        bundles = {"fp32": find_bundle(self.options.models, "fp32"), "INT8": self.kit.ort}
        return {name: self.raw_engine(bundle, ids) for name, bundle in bundles.items()}

    @cached_property
    def _asked(self) -> dict[str, Callable[..., Turn]]:
        """Turns for each subject at each number of connections."""
        texts = {tokens: [text.text for text in group] for tokens, group in self._texts.items()}
        found = {}
        for subject in self.subjects:
            if subject is not RAW:
                server = self._servers[subject.server]
                port = server.grpc_port if subject.form == GRPC else server.http_port
                for connections in (ONE, MANY):
                    place, key = (subject.form, port, subject.endpoint(connections)), subject.key(connections)
                    found[key] = self.asked(key, server, place, self.kit.ort.hidden_size, texts)
        return found

    @cached_property
    def _checked(self) -> dict[str, dict[str, float]]:
        """Minimum cosine of each subject's vectors to the fp32 model's, and the CPU use of idle servers in percent.

        Servers that are busy while idle are stopped from here on, except during their turns.

        Raises:
            BenchError: A server's vectors are not the model's.
        """
        self.say("comparing the vectors")
        likeness: dict[str, float] = {}
        for tokens in self.options.tokens:
            asked: dict[str, Any] = {"limit_s": _ASK_S, "tokens": tokens, "count": _COMPARED_TEXTS}
            exact, same = (self._raw[name].ask("vectors", **asked) for name in ("fp32", "INT8"))
            for subject in self.subjects:
                keys = [key for key in (subject.key(ONE), subject.key(MANY)) if key in self._asked]
                vectors = [self.client.ask("vectors", way=key, **asked) for key in keys] or [same]
                alike = min(_least_cosine(found, exact) for found in vectors)
                if alike < next(least for precision, least in _MIN_COSINE.items() if precision in subject.engine):
                    raise BenchError(f"{subject.name}: wrong embedding of {tokens} tokens (cosine {alike:.4f})")
                # infinity quantized the same model for itself; all others run the bundle's file. Without VNNI, the sums
                # of others saturate.
                is_same = subject.system == "bertserve" if host.saturates() else subject.system != "infinity"
                if subject.engine == ORT and is_same:
                    alike_raw = min(_least_cosine(found, same) for found in vectors)
                    if alike_raw < _MIN_COSINE_OF_ONE_ARTIFACT:
                        raise BenchError(f"{subject.name}: another artifact than the raw engine's ({alike_raw:.5f})")
                likeness[subject.name] = min(alike, likeness.get(subject.name, 1.0))
        idle = idle_percent(self._servers)
        for name, percent in idle.items():
            if percent >= _FROZEN_FROM_PERCENT:
                send_signal(self._servers[name], signal.SIGSTOP)
                # A stopped process would not receive its signal to end.
                self.stack.callback(send_signal, self._servers[name], signal.SIGCONT)
        return {"least_cosine": likeness, "idle_percent": idle}

    def turns(self, tokens: int) -> Iterator[Turn]:
        idle = self._checked["idle_percent"]
        for connections in (ONE, MANY):
            seconds = self.options.seconds * (_LONGER if connections == MANY and tokens >= _LONG_TOKENS else 1.0)
            for subject in self.subjects:
                key = subject.key(connections)
                if subject is RAW:
                    arguments = {"tokens": tokens, "options": "served", "way": subject.endpoint(connections)}
                    yield Turn(key, self._raw["INT8"], arguments, seconds)
                else:
                    is_frozen = idle[subject.server] >= _FROZEN_FROM_PERCENT
                    turn = self._asked[key](tokens, connections, seconds, is_frozen=is_frozen)
                    yield dataclasses.replace(turn, subject=key)

    def figures(self, store: Store) -> dict[str, Any]:
        samples, model = Samples.of(store), store.facts["model"]
        shown = [(subject, subject.key(ONE), subject.key(MANY)) for subject in subjects(model)]
        ratios = [(each, [each.cells(samples, model, protocol) for protocol in _SHOWN]) for each in COMPARED]
        return {"samples": samples, "subjects": shown, "ratios": ratios, "protocols": _SHOWN}

    def plots(self, store: Store) -> dict[str, str]:
        return {"": _plot(Samples.of(store), store.facts["model"])}


def _least_cosine(found: list[list[float]], expected: list[list[float]]) -> float:
    """Minimum over pairs of vectors of length 1."""
    return min(sum(a * b for a, b in zip(*pair, strict=True)) for pair in zip(found, expected, strict=True))


def _plot(samples: Samples, model: str) -> str:
    """Bars for every server, lengths side by side, latency above throughput."""
    shown = subjects(model)
    names = [(subject.name, _COLOURS.get(subject.system, "grey")) for subject in shown]

    def bars(title: str, connections: int, figure: str, decimals: int) -> Bars:
        panels = {}
        for tokens in samples.rounds:
            spreads = [samples.spread(tokens, subject.key(connections), figure) for subject in shown]
            panels[f"{tokens} tokens"] = [(spread.median, spread.low, spread.high) for spread in spreads]
        return Bars(title, decimals, names, panels)

    return as_file(
        "p50 and throughput of every server",
        bars("p50 at 1 connection, ms (shorter is better)", ONE, "p50_ms", 2),
        bars(f"texts a second at {MANY} connections (longer is better)", MANY, "per_s", 0),
        width=900,
    )


class Comparison(NamedTuple):
    """A figure of our server beside that of another.

    Attributes:
        figure: The compared figure, one of `_FIGURES`.
        ours: Our engine.
        theirs: System and engine of the other.
        protocols: Protocols of our server, each with the other's.
    """

    figure: str
    ours: str
    theirs: tuple[str, str]
    protocols: Mapping[str, str]

    def cells(self, samples: Samples, model: str, protocol: str) -> str:
        """The ratio or difference at each length over one of our protocols."""
        if protocol not in self.protocols:
            return "-"
        count, field, is_ratio = _FIGURES[self.figure]
        compare = samples.ratio if is_ratio else samples.above
        ours = who.find(model, "bertserve", self.ours, protocol).key(count)
        theirs = who.find(model, *self.theirs, self.protocols[protocol]).key(count)
        return ", ".join(f"{compare(tokens, ours, theirs, field).median:.2f}" for tokens in samples.rounds)


_SHOWN = (HTTP, GRPC_NAME)
"""Protocols of the page; the store has HTTP v2 too."""
_P50, _PER_S, _OVER = "p50", "texts/s", "ms above p50"
_FIGURES = {_P50: (ONE, "p50_ms", True), _PER_S: (MANY, "per_s", True), _OVER: (ONE, "p50_ms", False)}
_HTTP_OF_TRITON = {HTTP: V2, V2: V2}
"""Triton has only one protocol over HTTP."""
_BOTH = {**_HTTP_OF_TRITON, GRPC_NAME: GRPC_NAME}
_OF_RAW = {HTTP: "", GRPC_NAME: ""}
COMPARED = (
    Comparison(_P50, ORT, (TRITON, ORT), _BOTH),
    Comparison(_P50, OPENVINO, (TRITON, OPENVINO), _BOTH),
    Comparison(_PER_S, ORT, (TRITON, ORT), _BOTH),
    Comparison(_PER_S, OPENVINO, (TRITON, OPENVINO), _BOTH),
    Comparison(_PER_S, ORT, (TRITON_PLAIN, ORT), _HTTP_OF_TRITON),
    Comparison(_PER_S, OPENVINO, (TRITON_PLAIN, OPENVINO), _HTTP_OF_TRITON),
    Comparison(_P50, ORT, (TRITON, DYNAMIC), _BOTH),
    Comparison(_P50, BEST, (TRITON, DYNAMIC), _BOTH),
    Comparison(_PER_S, ORT, (TRITON, DYNAMIC), _BOTH),
    Comparison(_PER_S, BEST, (TRITON, DYNAMIC), _BOTH),
    Comparison(_P50, ORT, ("infinity", TORCH), {HTTP: HTTP}),
    Comparison(_P50, ORT, ("infinity", ORT), {HTTP: HTTP}),
    Comparison(_OVER, ORT, RAW[:2], _OF_RAW),
    Comparison(_PER_S, ORT, RAW[:2], _OF_RAW),
)
