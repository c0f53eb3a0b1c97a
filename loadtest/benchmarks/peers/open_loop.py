"""What users have, beside other servers: texts of mixed lengths that arrive at random, deadlines, texts that repeat.

Every server gets the same arrivals (Poisson) of texts of 6 to 250 words, at rates from a fifth of what ours carries
with the same engine to twice that. Short blocks alternate, so that a host which changes its speed meets all alike.
"""

from __future__ import annotations

import signal
import statistics
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from export.pages.plots import Axis, Lines, Series, as_file
from loadtest.benchmarks.drive import REPEATED_TEXTS, closed_loop, drive, even, mixed_texts, repeated_texts
from loadtest.benchmarks.peers.who import (
    CACHED,
    ENGINES,
    LENGTH_STEP,
    OPENVINO,
    ORT,
    OURS,
    QUEUE_MS,
    TRITON_BATCH,
    PeerBenchmark,
    versions_of,
)
from loadtest.benchmarks.runner import Page, Part, Picture, model_of
from loadtest.benchmarks.server_process import HOST
from loadtest.benchmarks.show import table
from loadtest.benchmarks.turns import send_signal, thawed
from loadtest.generator.messages import Target
from loadtest.report.sample import Spread
from loadtest.report.tables import MET, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from loadtest.benchmarks.drive import Workload
    from loadtest.benchmarks.peers.who import Peer
    from loadtest.benchmarks.server_process import ServerProcess
    from loadtest.benchmarks.store import Step, Store

DEADLINE_MS = 250
"""What the clients allow; an answer that took longer is good for nobody."""

SHARES = (0.2, 0.6, 1.0, 1.5, 2.0)
"""Offered rates, of the texts a second that ours answers with the same engine to a few clients in a closed loop."""

JUDGED_SHARES = TAIL_SHARE, OVERLOAD_SHARE = 0.6, 1.5
ZIPF_SHARES = (2.0,)
"""The same of what ours carries of texts that do not repeat."""

CACHE_MB, KNOWN_TEXTS = 64, 500
"""So many of the most frequent texts are asked for before a server with a cache is measured."""

_CONNECTIONS, _CAPACITIES, _CAPACITY_S = 4, 3, 3.0
_PATIENCE_S = 2.0
_COLLAPSED = 0.1
"""Of the requests: who takes no deadlines and answers fewer in time is asked at no higher rate."""
_FIRST_S, _FIRST_RATE, _KNOWN_RATE = 4.0, 20.0, 25.0
_REST_S, _RESTING_CPU_S, _LONGEST_REST_S = 0.2, 0.02, 10.0
_ENDPOINTS = {"fastapi": ("http", "/embed-threads"), "infinity-onnx": ("openai", "/embeddings")}

_GOOD, _TAIL, _SHORT_TAIL = "good_per_s", "p99_ms", "short_p99_ms"
_COLOURS = ("blue", "orange", "violet", "green", "grey")

_WHO = f"""\
## Who is who

- **bertserve**: its defaults with `--engine` as named. **FastAPI**, **infinity**: as in [peers.md](peers.md), at their
  best for many clients; they take no deadlines, and what nobody waits for any more they compute all the same. Once one
  of them answers less than a tenth in time it is asked at no higher rate.
- **Triton**: the lean text model of [peers.md](peers.md) with the same artifact, a single-threaded instance a core, its
  dynamic batcher, and its queue policy: what has waited for {QUEUE_MS} ms is refused. Its default has no such limit;
  half of the deadline gave more answers in time than the whole. *One by one*: batches of one. *Ragged batches*: up to
  {TRITON_BATCH} texts handed to an instance, which computes them one after the other and answers when the last is
  done. *Padded batches*: up to {TRITON_BATCH // 2} texts computed as one batch as long as its longest. With OpenVINO
  lengths are padded to multiples of {LENGTH_STEP}, as OpenVINO prepares its kernels for each length.
- Ours and Triton get the same bytes: Open Inference Protocol over HTTP, binary tensors, and the deadline of
  {DEADLINE_MS} ms as its parameter `timeout`. Triton compares that with the time in its queue alone, ours predicts when
  the answer will be there.

All run at once on the machine, one is asked at a time; the servers of others are stopped (SIGSTOP) meanwhile. After a
block the next one waits until the server has finished what is left."""

Block = dict[str, float]
Blocks = dict[tuple[str, float], dict[int, Block]]
"""What was measured by entrant and share, and of that by round."""


class Entrant(NamedTuple):
    """Who is asked: its name, engine, server as `Kit.open_loop_peer` calls it, model of Triton, and rates."""

    name: str
    engine: str
    server: str
    model: str = ""
    shares: tuple[float, ...] = SHARES

    @property
    def is_ours(self) -> bool:
        return self.server.startswith(OURS)

    @property
    def takes_deadlines(self) -> bool:
        """Whether it reads v2's parameter `timeout`."""
        return self.server not in _ENDPOINTS

    def target(self, port: int, model: str) -> Target:
        """How it is asked at a port for a model."""
        if endpoint := _ENDPOINTS.get(self.server):
            return Target(endpoint[0], HOST, port, model, endpoint=endpoint[1])
        return Target("v2", HOST, port, f"{model}-{self.model}" if self.model else model, timeout_ms=DEADLINE_MS)


def groups() -> dict[str, list[Entrant]]:
    """Who is compared at the same rates, by the engine of ours that sets them; ours in front."""
    ours: dict[str, list[Entrant]] = {ORT: [], OPENVINO: []}
    for option, engine in ENGINES.items():
        ours[ORT if engine == ORT else OPENVINO].append(Entrant(f"bertserve, {option}", engine, f"{OURS}{option}"))
    return {
        ORT: [
            *ours[ORT],
            Entrant("Triton, ORT, one by one", ORT, "triton", "ort-single"),
            Entrant("Triton, ORT, ragged batches", ORT, "triton", "ort-ragged", JUDGED_SHARES),
            Entrant("Triton, ORT, padded batches", ORT, "triton", "ort-padded", JUDGED_SHARES),
        ],
        OPENVINO: [
            *ours[OPENVINO],
            Entrant("Triton, OpenVINO, one by one", OPENVINO, "triton", "openvino-single"),
            Entrant("Triton, OpenVINO, ragged batches", OPENVINO, "triton", "openvino-ragged"),
            Entrant("FastAPI, ORT", ORT, "fastapi"),
            Entrant("infinity, ORT", ORT, "infinity-onnx"),
        ],
    }


REPEATING = (
    Entrant("bertserve, ort-cpu", ORT, f"{OURS}ort-cpu"),
    Entrant("bertserve, ort-cpu, with its cache", ORT, f"{OURS}ort-cpu{CACHED}"),
    Entrant("Triton, ORT, one by one", ORT, "triton", "ort-single"),
    Entrant("Triton, ORT, one by one, with its cache", ORT, f"triton{CACHED}", "ort-single"),
)
"""Who is asked for texts that repeat."""


class OpenLoopBenchmark(PeerBenchmark):
    """The curves of the README."""

    name = "open-loop"
    purpose = "texts of mixed lengths that arrive at random, beside Triton, infinity and FastAPI"
    rounds = 3
    seconds = 8.0

    def steps(self) -> Iterator[Step]:
        yield "versions", self.versions
        for number in range(1, _CAPACITIES + 1):
            for engine, entrants in groups().items():
                yield f"capacity {number} {engine}", partial(self._capacity, entrants[0])
        for number in range(1, self.options.rounds + 1):
            turn = 1 if number % 2 else -1
            for engine, entrants in groups().items():
                for share in sorted({share for entrant in entrants for share in entrant.shares}):
                    for entrant in entrants[::turn]:
                        if share in entrant.shares and not self._has_collapsed(entrant, number):
                            block = partial(self._block, entrant, engine, share, number)
                            yield f"block {number} {share:g} {entrant.name}", block
            for share in ZIPF_SHARES:
                for entrant in REPEATING[::turn]:
                    block = partial(self._block, entrant, entrant.engine, share, number, repeat=True)
                    yield f"zipf {number} {share:g} {entrant.name}", block

    def _has_collapsed(self, entrant: Entrant, number: int) -> bool:
        blocks = (self.store.steps.get(f"block {number} {share:g} {entrant.name}") for share in entrant.shares)
        return not entrant.takes_deadlines and any(
            block["good_per_s"] < _COLLAPSED * block["offered_per_s"] for block in blocks if block
        )

    @cached_property
    def _mixed(self) -> Workload:
        return mixed_texts(self.kit.ort)

    @cached_property
    def _repeated(self) -> Workload:
        return repeated_texts(self.kit.ort)

    @cached_property
    def _peers(self) -> dict[str, Peer]:
        """Who has been started."""
        return {}

    def _peer(self, entrant: Entrant) -> Peer:
        """Its server, started when it is first asked for; another project's is stopped meanwhile."""
        if entrant.server not in self._peers:
            self.say(f"starting {entrant.server}")
            peer = self.kit.open_loop_peer(entrant.server, CACHE_MB)
            self.stack.enter_context(peer.process)
            self._peers[entrant.server] = peer
            for other in (other for group in groups().values() for other in group if other.server == entrant.server):
                target = other.target(peer.http_port, self.kit.ort.model)
                drive(target, self._mixed, even(_FIRST_S), _FIRST_RATE, 1)
            if entrant.server.endswith(CACHED):
                texts = [kind.texts[0] for kind in self._repeated.kinds[:KNOWN_TEXTS]]
                # No more at once than it computes at once: it may refuse what waits.
                self._closed_loop(entrant, peer, texts, KNOWN_TEXTS / _KNOWN_RATE, self.kit.threads)
            _rest(peer.process)
            if not entrant.is_ours:
                send_signal(peer.process, signal.SIGSTOP)
                # What is stopped would not hear that it shall end.
                self.stack.callback(send_signal, peer.process, signal.SIGCONT)
        return self._peers[entrant.server]

    def _capacity(self, entrant: Entrant) -> dict[str, float]:
        texts = [kind.texts[0] for kind in self._mixed.kinds]
        return {"per_s": self._closed_loop(entrant, self._peer(entrant), texts[::7], _CAPACITY_S, _CONNECTIONS)}

    def _closed_loop(self, who: Entrant, peer: Peer, texts: Sequence[Any], seconds: float, connections: int) -> float:
        """Texts a second that a few clients get, who ask for them in turn."""
        target = who.target(peer.http_port, self.kit.ort.model)
        place = ("v2", target.port, target.path("embed"))
        return closed_loop(place, self.kit.ort.hidden_size, texts, connections, seconds)

    def _block(
        self, entrant: Entrant, engine: str, share: float, number: int, *, repeat: bool = False
    ) -> dict[str, float]:
        peer, rate = self._peer(entrant), share * _capacities(self.store)[engine]
        target, seconds = entrant.target(peer.http_port, self.kit.ort.model), self.options.seconds
        workload = self._repeated if repeat else self._mixed
        with thawed(None if entrant.is_ours else peer.process):
            requests, generator = drive(target, workload, even(seconds), rate, 10 * number, _PATIENCE_S)
            _rest(peer.process)
        late_ms = generator.lateness.percentile_ms(99)
        return {"rate": rate, **requests.figures(seconds, DEADLINE_MS), "generator_late_p99_ms": late_ms}

    def page(self, store: Store) -> Page:
        method = (
            "Texts of 6 to 250 words of real English in even steps, Poisson arrivals, open loop: a latency counts from"
            f" the intended time. Alternating blocks of {store.facts['seconds']:g} s; rates are shares of the texts a"
            " second that ours answers with the same engine to 4 clients in a closed loop. A client waits for 2 s at"
            " most. The generator shares the cores."
        )
        blocks, repeated = _blocks(store, "block "), _blocks(store, "zipf ")
        parts: list[Part] = []
        if blocks:
            words = "p99 of short texts and answers in time, over the offered rate"
            parts += [Picture("", _plot(groups()[OPENVINO], blocks), words), _verdict(blocks)]
            parts += [_table(f"Beside {engine}", _NOTE, among, blocks) for engine, among in groups().items()]
        if repeated:
            parts.append(_table("Texts that repeat", _NOTE_OF_REPEATED, REPEATING, repeated))
        found = ", ".join(f"{engine} {per_s:.0f}/s" for engine, per_s in _capacities(store).items())
        facts = {**model_of(store), **versions_of(store), "capacity C": found}
        return Page("Texts that arrive at random, beside other servers", method, [*parts, _WHO], facts=facts)


def _rest(server: ServerProcess) -> None:
    """Waits until a server has finished what nobody waits for any more."""
    until = time.perf_counter() + _LONGEST_REST_S
    before = server.cpu_s().all
    while time.perf_counter() < until:
        time.sleep(_REST_S)
        now = server.cpu_s().all
        if now - before < _RESTING_CPU_S:
            return
        before = now


def _capacities(store: Store) -> dict[str, float]:
    """What ours carries with each engine, in texts a second."""
    measured: dict[str, list[float]] = {}
    for name, found in store.named("capacity ").items():
        measured.setdefault(name.partition(" ")[2], []).append(found["per_s"])
    return {engine: statistics.median(values) for engine, values in measured.items()}


def _blocks(store: Store, prefix: str) -> Blocks:
    found: Blocks = {}
    for name, block in store.named(prefix).items():
        number, share, entrant = name.split(" ", 2)
        found.setdefault((entrant, float(share)), {})[int(number)] = block
    return found


def _plot(entrants: Sequence[Entrant], blocks: Blocks) -> str:
    """p99 of the shortest third, and answers in time, of those who are asked at every rate."""
    ours, *others = [entrant for entrant in entrants if entrant.shares == SHARES]
    shown = {"bertserve": ours}
    for entrant in others:
        system, *rest = entrant.name.split(", ")
        if not entrant.is_ours:
            shown[" ".join([system, *rest[1:]])] = entrant
    lines = {
        name: [(_rate(found), found) for share in entrant.shares if (found := blocks.get((entrant.name, share)))]
        for name, entrant in shown.items()
    }
    rates = [rate for curve in lines.values() for rate, _ in curve]

    def panel(title: str, figure: str, *beside: Series, is_log: bool) -> Lines:
        series = []
        for colour, (name, curve) in zip(_COLOURS, lines.items(), strict=False):
            points = [(rate, spread.median) for rate, found in curve if (spread := _spread(found, figure))]
            series.append(Series(name, colour, points, points))
        return Lines(Axis("offered texts a second"), Axis(title, is_log), [*beside, *series])

    top = max(rates, default=1.0)
    offered = Series("_offered", "grey", [(0.0, 0.0), (top, top)], style=":")
    return as_file(
        "Texts of 6 to 250 words that arrive at random",
        panel("p99 of the shortest third, ms", _SHORT_TAIL, is_log=True),
        panel(f"answered within {DEADLINE_MS} ms, a second (dotted: all of them)", _GOOD, offered, is_log=False),
    )


def _rate(rounds: dict[int, Block]) -> float:
    return next(iter(rounds.values()))["rate"]


def _spread(rounds: dict[int, Block], figure: str) -> Spread | None:
    values = [block[figure] for block in rounds.values() if figure in block]
    return Spread.of(values) if values else None


_NOTE = (
    "Medians of the blocks, least to greatest in brackets. `short`: the shortest third of the texts. Percentiles"
    " are of the answers; what was refused or given up has none."
)
_NOTE_OF_REPEATED = (
    f"{REPEATED_TEXTS} different texts, the k-th asked for in proportion to 1/k (Zipf's law, s = 1); C is that of"
    f" texts that do not repeat. Caches of {CACHE_MB} MiB hold them all: ours `--response-cache-mb`, Triton's its"
    f" `local` response cache. The {KNOWN_TEXTS} most frequent were asked for once before."
)


def _table(title: str, note: str, entrants: Iterable[Entrant], blocks: Blocks) -> Table:
    names = [entrant.name for entrant in entrants]
    shares = sorted({share for name, share in blocks if name in names})
    rows = [(share, name, found) for share in shares for name in names if (found := blocks.get((name, share)))]

    def text(figure: str, decimals: int) -> Callable[[tuple[float, str, dict[int, Block]]], str]:
        return lambda row: spread.text(decimals) if (spread := _spread(row[2], figure)) else "-"

    def unanswered(row: tuple[float, str, dict[int, Block]]) -> str:
        lost = [100 * (1 - block["answered_per_s"] / block["offered_per_s"]) for block in row[2].values()]
        return Spread.of(lost).text(0)

    return table(
        title,
        note,
        rows,
        ("of C", lambda row: f"{row[0]:g}"),
        ("offered/s", lambda row: f"{_rate(row[2]):.0f}"),
        ("server", lambda row: row[1]),
        ("p50 ms", text("p50_ms", 1)),
        ("p99 ms", text(_TAIL, 0)),
        ("p99 of short ms", text(_SHORT_TAIL, 0)),
        (f"in {DEADLINE_MS} ms, a second", text(_GOOD, 1)),
        ("no answer, %", unanswered),
    )


class _Aim(NamedTuple):
    """What is asked of ours beside Triton: at that rate, ours divided by theirs, at most or (`more`) at least."""

    words: str
    share: float
    figure: str
    asked: float
    more: bool = False

    def judged(self, blocks: Blocks, pair: tuple[Entrant, Entrant]) -> str:
        ours, theirs = (blocks.get((entrant.name, self.share), {}) for entrant in pair)
        ratios = [
            ours[number][self.figure] / theirs[number][self.figure]
            for number in ours.keys() & theirs.keys()
            if self.figure in ours[number] and theirs[number].get(self.figure)
        ]
        if not ratios:
            return "not measured"
        spread = Spread.of(ratios)
        met = spread.median >= self.asked if self.more else spread.median <= self.asked
        return f"{MET[met]}, {spread.text(2)}"

    @property
    def head(self) -> str:
        return f"{self.words} at {self.share:g} C, {'at least' if self.more else 'at most'} {self.asked:g}"


_AIMS = (
    _Aim("p99", TAIL_SHARE, _TAIL, 0.5),
    _Aim("p99 of the shortest third", TAIL_SHARE, _SHORT_TAIL, 0.3),
    _Aim(f"answers within {DEADLINE_MS} ms", OVERLOAD_SHARE, _GOOD, 2.0, more=True),
)


def _verdict(blocks: Blocks) -> Table:
    pairs = [
        (one, other)
        for group in groups().values()
        for one in group
        for other in group
        if one.is_ours and other.server == "triton"
    ]
    return table(
        "Beside Triton",
        "Ours divided by theirs, within a round.",
        pairs,
        ("ours", lambda pair: pair[0].name),
        ("beside", lambda pair: pair[1].name),
        *((aim.head, partial(aim.judged, blocks)) for aim in _AIMS),
        words=2,
    )
