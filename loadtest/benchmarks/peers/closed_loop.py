"""Our server beside those that a user would pick instead: texts of one length, one connection and many."""

from __future__ import annotations

import os
import signal
from functools import cached_property, partial
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
from loadtest.benchmarks.runner import Page, Part, Picture
from loadtest.benchmarks.show import table
from loadtest.benchmarks.turns import Samples, Turn, idle_percent, measure_round, send_signal
from loadtest.errors import BenchError
from loadtest.generator.child import Child
from loadtest.generator.client import GRPC
from loadtest.generator.workload import find_bundle, make_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.peers.who import Peer, Subject
    from loadtest.benchmarks.store import Step, Store
    from loadtest.generator.workload import Bundle, Text
    from loadtest.report.sample import Spread
    from loadtest.report.tables import Table

_TEXTS, _COMPARED_TEXTS, _ASK_S = 200, 8, 120.0
_LEAST_COSINE = {"fp32": 0.9999, "INT8": 0.95}
_LEAST_COSINE_OF_ONE_ARTIFACT = 0.9999
_FROZEN_FROM_PERCENT = 1.0
_LONG_TOKENS, _LONGER = 128, 4.0
"""A server that answers 32 long texts at once takes a second or two: a window has to hold some."""

_COLOURS = {"bertserve": "blue", "raw engine": "violet"}

CONFIGURATIONS = """\
## Who is who

- **raw engine**: the INT8 file in a bare loop around ONNX Runtime, inputs made beforehand: one session on all cores
  at 1 connection, a single-threaded session a core at 32.
- **bertserve**: its defaults, `--engine ort-cpu`, `--engine openvino` and `--engine cpu` (best of both, what `make run`
  serves), over `POST /embed`, over the very requests that Triton gets (`HTTP v2`), and over gRPC.
- **Triton**: a `tritonserver` with its Python backend. The text model is as lean as it goes: tokenizer, engine,
  length 1, without the checks of the one that `bertserve export --triton` writes. Artifacts, engines and their
  versions are ours, and so are OpenVINO's options; ONNX Runtime's are its own defaults. `ORT dynamic INT8` is what one
  has without our export: the same fused graph, quantised by ONNX Runtime's own `quantize_dynamic` (INT8, per channel).
  Of the configurations that were tried ([decisions.md](decisions.md#triton)) it has the fastest: at 1 connection one
  instance on all cores, at 32 a single-threaded instance a core, which computes what the dynamic batcher puts together
  as one batch. That recipe's answers change with the company ([int8.md](../int8.md)), so it is computed text by text;
  `batched` is what it does where nobody asks for the same answer. `Triton, no batcher` is the same without dynamic
  batching, as one has it before one tunes it. Over HTTP Triton is asked with binary tensors, its client's default.
- **infinity**: PyTorch, and its ONNX engine with an INT8 model that its own `optimum` exported and quantised for
  AVX-512 VNNI; over its OpenAI route.
- **FastAPI**: a tokenizer and ONNX Runtime with our INT8 file in an application of 60 lines on uvicorn with uvloop and
  httptools. At 1 connection it computes on all cores where it stands, at 32 in threads on a session a core, which
  carry twice as much.

All run at once on the machine, one is asked at a time; what an idle one would cost the others is left out: servers
that use 1% of a core or more while nobody asks are stopped (SIGSTOP) meanwhile. Every reply is looked at for its form,
and the first texts of each length for their vectors. The client is one process on the same cores."""


class PeersBenchmark(who.PeerBenchmark):
    """`make bench-peers`."""

    name = "peers"
    purpose = "the server beside Triton, infinity and a FastAPI application"
    rounds = 5
    seconds = 2.0
    tokens = (8, 32, 128)

    def steps(self) -> Iterator[Step]:
        yield "versions", self.versions
        yield "check", lambda: {"least_cosine": self._rounds.likeness, "idle_percent": self._rounds.idle_percent}
        yield from super().steps()

    @cached_property
    def _rounds(self) -> Rounds:
        kit = self.kit
        peers = {name: kit.peer(name) for name in who.SERVERS}
        for name, peer in peers.items():
            self.say(f"starting {name}")
            self.stack.enter_context(peer.process)
        fp32, raw = (self.stack.enter_context(Child("loadtest.benchmarks.raw_engine")) for _ in range(2))
        rounds = Rounds(subjects(kit.ort.model), peers, {"fp32": fp32, "raw": raw, "client": self.client})
        self.say("comparing the vectors")
        texts = {tokens: make_texts(kit.ort.path, tokens, _TEXTS) for tokens in self.options.tokens}
        rounds.open(find_bundle(self.options.models, "fp32"), kit.ort, texts, kit.threads)
        return rounds

    def measure(self, number: int, tokens: int) -> dict[str, Any]:  # noqa: ARG002  every round is the same
        return self._rounds.run(tokens, self.options.seconds, self.say)

    def page(self, store: Store) -> Page:
        samples, check, model = Samples.of(store), store.steps["check"], store.facts["model"]
        idle = ", ".join(f"{name} {percent:.1f}%" for name, percent in check["idle_percent"].items())
        method = (
            f"Interleaved rounds ({samples.counts()}), {store.facts['seconds']:g} s a measurement after its warm-up;"
            " medians of the rounds, least to greatest in brackets; ratios are taken within a round."
            f" {samples.quiet()}."
        )
        parts: list[Part] = [
            Picture("", _plot(samples, model), "p50 and throughput of every server"),
            *(_figures(samples, model, tokens, check["least_cosine"]) for tokens in samples.rounds),
            _verdict(samples, model),
            CONFIGURATIONS,
        ]
        facts = {**who.versions_of(store), "idle, of one core": idle}
        return Page("Beside the servers that one would pick instead", method, parts, facts=facts)


class Rounds:
    """The measurements over servers and measuring processes that are up.

    Attributes:
        likeness: The least cosine of each subject's vectors to those of the fp32 model.
        idle_percent: CPU that each server used while nobody asked, in percent of one core.
    """

    def __init__(self, subjects: Sequence[Subject], peers: dict[str, Peer], children: dict[str, Child]) -> None:
        """Takes what is running: servers by name, and the children `fp32`, `raw` (raw engines) and `client`."""
        self._subjects = subjects
        self._peers = peers
        self._children = children
        self._frozen: set[str] = set()
        self.likeness: dict[str, float] = {}
        self.idle_percent: dict[str, float] = {}

    def open(self, fp32: Bundle, ort: Bundle, texts: dict[int, list[Text]], threads: int) -> None:
        """Hands every child its work, compares all vectors, and freezes the servers that do not rest.

        Raises:
            BenchError: A server's vectors are not the model's.
        """
        ids = {tokens: [text.ids for text in group] for tokens, group in texts.items()}
        words = {tokens: [text.text for text in group] for tokens, group in texts.items()}
        for name, bundle in (("fp32", fp32), ("raw", ort)):
            opened: dict[str, Any] = {"artifact": str(bundle.artifact), "names": bundle.inputs, "texts": ids}
            self._children[name].ask("open", threads=threads, cores=os.cpu_count(), **opened)
        for subject, connections in self._asked():
            peer, form = self._peers[subject.server], subject.form
            way: dict[str, Any] = {"way": subject.key(connections), "form": form, "hidden_size": ort.hidden_size}
            way |= {"port": peer.grpc_port if form == GRPC else peer.http_port, "texts": words}
            self._children["client"].ask("open", endpoint=subject.endpoint(connections), **way)
        for tokens in texts:
            self._compare(tokens)
        self.idle_percent = idle_percent({name: peer.process for name, peer in self._peers.items()})
        for name, percent in self.idle_percent.items():
            if percent >= _FROZEN_FROM_PERCENT:
                self._frozen.add(name)
                send_signal(self._peers[name].process, signal.SIGSTOP)

    def run(self, tokens: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
        """One round at one length: samples by subject, as JSON values."""
        return measure_round(list(self._turns(tokens, seconds)), say)

    def _asked(self) -> Iterator[tuple[Subject, int]]:
        return ((subject, count) for subject in self._subjects if subject is not RAW for count in (ONE, MANY))

    def _turns(self, tokens: int, seconds: float) -> Iterator[Turn]:
        for connections in (ONE, MANY):
            each_s = seconds * (_LONGER if connections == MANY and tokens >= _LONG_TOKENS else 1.0)
            for subject in self._subjects:
                key = subject.key(connections)
                if subject is RAW:
                    arguments = {"tokens": tokens, "options": "served", "way": subject.endpoint(connections)}
                    yield Turn(key, self._children["raw"], arguments, each_s)
                    continue
                asked = {"tokens": tokens, "connections": connections, "way": key}
                server, is_frozen = self._peers[subject.server].process, subject.server in self._frozen
                yield Turn(key, self._children["client"], asked, each_s, server, is_frozen)

    def _compare(self, tokens: int) -> None:
        asked: dict[str, Any] = {"limit_s": _ASK_S, "tokens": tokens, "count": _COMPARED_TEXTS}
        exact, same = (self._children[name].ask("vectors", **asked) for name in ("fp32", "raw"))
        self._note(RAW, tokens, same, exact)
        for subject, connections in self._asked():
            found = self._children["client"].ask("vectors", way=subject.key(connections), **asked)
            self._note(subject, tokens, found, exact)
            # infinity quantised the same model for itself; everybody else runs the bundle's file.
            alike = _least_cosine(found, same)
            if subject.engine == ORT and subject.system != "infinity" and alike < _LEAST_COSINE_OF_ONE_ARTIFACT:
                raise BenchError(f"{subject.name}: another artifact than the raw engine's (cosine {alike:.5f})")

    def _note(self, subject: Subject, tokens: int, found: list[list[float]], exact: list[list[float]]) -> None:
        alike = _least_cosine(found, exact)
        if alike < next(least for precision, least in _LEAST_COSINE.items() if precision in subject.engine):
            raise BenchError(f"{subject.name}: a text of {tokens} tokens has a wrong embedding (cosine {alike:.4f})")
        self.likeness[subject.name] = min(alike, self.likeness.get(subject.name, 1.0))


def _least_cosine(found: list[list[float]], expected: list[list[float]]) -> float:
    """Of vectors of length 1, pair by pair."""
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


def _figures(samples: Samples, model: str, tokens: int, cosines: dict[str, float]) -> Table:
    def spread(figure: str, connections: int = ONE) -> Callable[[Subject], Spread]:
        return lambda subject: samples.spread(tokens, subject.key(connections), figure)

    def cpu_us(subject: Subject) -> str:
        used = sum(spread(name, MANY)(subject).median for name in ("server_cpu_us", "engine_cpu_us"))
        return "-" if subject is RAW else f"{used:.0f}"

    note = (
        f"`CPU`: time that all of the server's processes spent on a text at {MANY} connections, in microseconds;"
        " `client`: that of the client for a request at 1. `cosine`: the least to the fp32 model's."
    )
    return table(
        f"{tokens} tokens",
        note if tokens == next(iter(samples.rounds)) else "",
        subjects(model),
        ("system", lambda subject: subject.system),
        ("engine", lambda subject: subject.engine),
        ("protocol", lambda subject: subject.protocol),
        ("p50 ms", lambda subject: spread("p50_ms")(subject).text(2)),
        ("p99 ms", lambda subject: spread("p99_ms")(subject).text(2)),
        (f"texts/s at {MANY}", lambda subject: spread("per_s", MANY)(subject).text(0)),
        ("CPU", cpu_us),
        ("client", lambda subject: "-" if subject is RAW else f"{spread('client_cpu_us')(subject).median:.0f}"),
        ("cosine", lambda subject: f"{cosines[subject.name]:.4f}"),
        words=3,
    )


class Aim(NamedTuple):
    """What is asked of ours beside another.

    Attributes:
        what: The comparison in words.
        figure: What is compared, one of `_COMPARED`.
        ours: Engine of ours.
        theirs: System, engine and protocol of the other.
        protocol: Over which ours is asked.
        asked: At 8, 32 and 128 tokens.
    """

    what: str
    figure: str
    ours: str
    theirs: tuple[str, str, str]
    protocol: str
    asked: Sequence[float]

    @property
    def more(self) -> bool:
        """Whether ours shall be at least what is asked; else at most."""
        return self.figure == _PER_S

    def found(self, samples: Samples, model: str, tokens: int) -> Spread:
        """Ours and the other's, over the rounds of a length."""
        ours, theirs = who.find(model, "bertserve", self.ours, self.protocol), who.find(model, *self.theirs)
        count, field, is_ratio = _COMPARED[self.figure]
        compare = samples.ratio if is_ratio else samples.above
        return compare(tokens, ours.key(count), theirs.key(count), field)

    def is_met(self, found: Spread, asked: float) -> bool:
        return found.median >= asked if self.more else found.median <= asked


LENGTHS = (8, 32, 128)
_P50, _PER_S, _OVER = "p50 at 1 connection, ratio", f"texts/s at {MANY}, ratio", "p50 at 1 connection, ms above"
_COMPARED = {_P50: (ONE, "p50_ms", True), _PER_S: (MANY, "per_s", True), _OVER: (ONE, "p50_ms", False)}
_TRITON_PROTOCOLS = ((HTTP, V2), (V2, V2), (GRPC_NAME, GRPC_NAME))
"""Of ours, and of Triton, whose only way over HTTP it is."""
_SAME, _OWN, _OVER_RAW = (
    "same engine and file as Triton",
    "beside Triton with ORT's own INT8",
    "ORT over the raw engine",
)
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
_RAW = RAW[:3]
AIMS = (
    *(
        Aim(what, figure, ours, (TRITON_PLAIN if "without" in what else TRITON, theirs, its), protocol, asked)
        for what, figure, ours, theirs, asked in _BESIDE_TRITON
        for protocol, its in (_TRITON_PROTOCOLS[:2] if "without" in what else _TRITON_PROTOCOLS)
    ),
    Aim("ORT beside infinity, PyTorch", _P50, ORT, ("infinity", TORCH, HTTP), HTTP, (0.20, 0.20, 0.25)),
    Aim("ORT beside infinity, ONNX INT8", _P50, ORT, ("infinity", ORT, HTTP), HTTP, (0.20, 0.20, 0.25)),
    Aim(_OVER_RAW, _OVER, ORT, _RAW, HTTP, (0.30,)),
    Aim(_OVER_RAW, _OVER, ORT, _RAW, GRPC_NAME, (0.50,)),
    Aim(_OVER_RAW, _PER_S, ORT, _RAW, HTTP, (0.65, 0.80, 0.88)),
    Aim(_OVER_RAW, _PER_S, ORT, _RAW, GRPC_NAME, (0.65, 0.80, 0.88)),
)


def _verdict(samples: Samples, model: str) -> Table:
    """What was aimed at, and whether it is so."""
    return table(
        "Verdict",
        "Ratios are ours divided by theirs.",
        AIMS,
        ("ours", lambda aim: aim.what),
        ("protocol", lambda aim: aim.protocol),
        ("figure", lambda aim: aim.figure),
        *((f"{tokens} tokens", partial(judged, samples, model, tokens)) for tokens in LENGTHS),
        words=3,
    )


def judged(samples: Samples, model: str, tokens: int, aim: Aim) -> str:
    """Whether an aim is met at that length."""
    asked = dict(zip(LENGTHS, aim.asked, strict=False)).get(tokens)
    if asked is None:
        return ""
    words = f"{'at least' if aim.more else 'at most'} {asked:.2f}"
    if tokens not in samples.rounds:
        return f"{words}: not measured"
    found = aim.found(samples, model, tokens)
    return f"{words}: {'yes' if aim.is_met(found, asked) else 'NO'}, {found.text(2)}"
