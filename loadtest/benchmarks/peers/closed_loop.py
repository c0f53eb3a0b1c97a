"""Our server and popular alternatives in a closed loop: texts of one length, one connection and many."""

from __future__ import annotations

import dataclasses
import signal
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from export.pages.plots import Bars, as_file
from loadtest.benchmarks.peers import who
from loadtest.benchmarks.peers.who import (
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
from loadtest.benchmarks.turns import Samples, Turn, idle_percent, send_signal
from loadtest.errors import BenchError
from loadtest.generator.client import GRPC
from loadtest.generator.workload import find_bundle, make_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.peers.who import Subject
    from loadtest.benchmarks.server_process import ServerProcess
    from loadtest.benchmarks.store import Step, Store
    from loadtest.generator.child import Child
    from loadtest.generator.workload import Text
    from loadtest.report.sample import Spread

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
    purpose = "the server beside Triton, infinity and a FastAPI application"
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
                # infinity quantized the same model for itself; all others run the bundle's file.
                if subject.engine == ORT and subject.system != "infinity":
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
        judged = [(aim, [aim.judged(samples, model, tokens) for tokens in LENGTHS]) for aim in AIMS]
        return {"samples": samples, "subjects": shown, "judged": judged, "lengths": LENGTHS}

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


class Aim(NamedTuple):
    """A target for our server relative to another.

    Attributes:
        what: The comparison in words.
        figure: The compared figure, one of `_COMPARED`.
        ours: Our engine.
        theirs: System, engine and protocol of the other.
        protocol: Protocol of our server.
        asked: Limits at 8, 32 and 128 tokens: a minimum for throughput, else a maximum.
    """

    what: str
    figure: str
    ours: str
    theirs: tuple[str, str, str]
    protocol: str
    asked: Sequence[float]

    def judged(self, samples: Samples, model: str, tokens: int) -> str:
        """Whether the target is met at that length."""
        asked = dict(zip(LENGTHS, self.asked, strict=False)).get(tokens)
        if asked is None:
            return ""
        more = self.figure == _PER_S
        words = f"{'at least' if more else 'at most'} {asked:.2f}"
        if tokens not in samples.rounds:
            return f"{words}: not measured"
        found = self._found(samples, model, tokens)
        is_met = found.median >= asked if more else found.median <= asked
        return f"{words}: {'yes' if is_met else 'NO'}, {found.text(2)}"

    def _found(self, samples: Samples, model: str, tokens: int) -> Spread:
        """Our figures and the other's, over the rounds of a length."""
        ours, theirs = who.find(model, "bertserve", self.ours, self.protocol), who.find(model, *self.theirs)
        count, field, is_ratio = _COMPARED[self.figure]
        compare = samples.ratio if is_ratio else samples.above
        return compare(tokens, ours.key(count), theirs.key(count), field)


LENGTHS = (8, 32, 128)
_P50, _PER_S, _OVER = "p50 at 1 connection, ratio", f"texts/s at {MANY}, ratio", "p50 at 1 connection, ms above"
_COMPARED = {_P50: (ONE, "p50_ms", True), _PER_S: (MANY, "per_s", True), _OVER: (ONE, "p50_ms", False)}
_TRITON_PROTOCOLS = ((HTTP, V2), (V2, V2), (GRPC_NAME, GRPC_NAME))
"""Protocols of our server, and of Triton, which has only one over HTTP."""
_SAME, _OWN = "same engine and file as Triton", "beside Triton with ORT's own INT8"
_OVER_RAW = "ORT over the raw engine"
_BESIDE_TRITON = (
    (f"{_SAME}, ORT", _P50, ORT, ORT, (0.90, 0.90, 0.90)),
    (f"{_SAME}, OpenVINO", _P50, OPENVINO, OPENVINO, (0.90, 0.90, 0.90)),
    (f"{_SAME}, ORT", _PER_S, ORT, ORT, (1.15, 1.15, 1.10)),
    (f"{_SAME}, OpenVINO", _PER_S, OPENVINO, OPENVINO, (1.15, 1.15, 1.10)),
    (f"{_SAME} without its batcher, ORT", _PER_S, ORT, ORT, (1.15, 1.15, 1.10)),
    (f"{_SAME} without its batcher, OpenVINO", _PER_S, OPENVINO, OPENVINO, (1.15, 1.15, 1.10)),
    (f"ORT {_OWN}", _P50, ORT, DYNAMIC, (0.90, 0.95, 0.75)),
    (f"ORT {_OWN}", _PER_S, ORT, DYNAMIC, (1.10, 1.15, 1.15)),
    (f"OpenVINO {_OWN}", _P50, OPENVINO, DYNAMIC, (0.85, 0.90, 0.65)),
    (f"OpenVINO {_OWN}", _PER_S, OPENVINO, DYNAMIC, (1.3, 1.5, 1.8)),
    (f"best of both {_OWN}", _P50, BEST, DYNAMIC, (0.85, 0.85, 0.75)),
    (f"best of both {_OWN}", _PER_S, BEST, DYNAMIC, (1.4, 1.5, 1.4)),
)
AIMS = (
    *(
        Aim(what, figure, ours, (TRITON_PLAIN if "without" in what else TRITON, theirs, its), protocol, asked)
        for what, figure, ours, theirs, asked in _BESIDE_TRITON
        for protocol, its in (_TRITON_PROTOCOLS[:2] if "without" in what else _TRITON_PROTOCOLS)
    ),
    Aim("ORT beside infinity, PyTorch", _P50, ORT, ("infinity", TORCH, HTTP), HTTP, (0.20, 0.20, 0.25)),
    Aim("ORT beside infinity, ONNX INT8", _P50, ORT, ("infinity", ORT, HTTP), HTTP, (0.20, 0.20, 0.25)),
    Aim(_OVER_RAW, _OVER, ORT, RAW[:3], HTTP, (0.30,)),
    Aim(_OVER_RAW, _OVER, ORT, RAW[:3], GRPC_NAME, (0.50,)),
    Aim(_OVER_RAW, _PER_S, ORT, RAW[:3], HTTP, (0.65, 0.80, 0.88)),
    Aim(_OVER_RAW, _PER_S, ORT, RAW[:3], GRPC_NAME, (0.65, 0.80, 0.88)),
)
