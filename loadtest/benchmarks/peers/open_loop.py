"""Compares servers under open-loop load: mixed-length texts with random arrivals, and deadlines.

Every server gets the same Poisson arrivals of texts of 6 to 250 words, at rates from a fifth of our capacity with the
same engine to twice that. Short blocks alternate, so that changes of the host's speed affect all servers alike.
"""

from __future__ import annotations

import signal
import statistics
import time
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from bertserve.export.pages.plots import Axis, Lines, Series, as_file
from bertserve.loadtest.benchmarks.drive import block, closed_loop, drive, even, mixed_texts
from bertserve.loadtest.benchmarks.peers.who import ENGINES, OPEN_LOOP, OPENVINO, ORT, OURS, QUEUE_MS, PeerBenchmark
from bertserve.loadtest.benchmarks.server_process import HOST
from bertserve.loadtest.benchmarks.turns import send_signal, thawed
from bertserve.loadtest.generator.messages import Target
from bertserve.loadtest.report.sample import Spread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bertserve.loadtest.benchmarks.drive import Workload
    from bertserve.loadtest.benchmarks.server_process import ServerProcess
    from bertserve.loadtest.benchmarks.store import Step, Store

DEADLINE_MS = 250
"""Deadline of the clients; a later answer is useless."""

SHARES = (0.2, 0.6, 1.0, 1.5, 2.0)
"""Offered rates, as shares of our closed-loop throughput with the same engine and few clients."""

COMPARED_SHARES = TAIL_SHARE, OVERLOAD_SHARE = 0.6, 1.5

_CONNECTIONS, _CAPACITIES, _CAPACITY_S = 4, 3, 3.0
_PATIENCE_S = 2.0
_COLLAPSED = 0.1
"""Share of good answers below which a server without deadlines gets no higher rate."""
_FIRST_S, _FIRST_RATE = 4.0, 20.0
_REST_S, _RESTING_CPU_S, _LONGEST_REST_S = 0.2, 0.02, 10.0
_ENDPOINTS = {"fastapi": ("http", "/embed-threads"), "infinity-onnx": ("openai", "/embeddings")}

_GOOD, _TAIL, _SHORT_TAIL = "good_per_s", "p99_ms", "short_p99_ms"
_COLOURS = ("blue", "orange", "violet", "green", "grey")

Block = dict[str, float]
Blocks = dict[tuple[str, float], dict[int, Block]]
"""Measurements by entrant and share, then by round."""


class Entrant(NamedTuple):
    """A server in the comparison: name, engine, server as `Kit.server` calls it, Triton model, and rates."""

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
        """Whether it reads the v2 parameter `timeout`."""
        return self.server not in _ENDPOINTS

    def target(self, port: int, model: str) -> Target:
        """Its form of request at a port for a model."""
        if endpoint := _ENDPOINTS.get(self.server):
            return Target(endpoint[0], HOST, port, model, endpoint=endpoint[1])
        return Target("v2", HOST, port, f"{model}-{self.model}" if self.model else model, timeout_ms=DEADLINE_MS)


def _ours(option: str) -> Entrant:
    return Entrant(f"bertserve, {option}", ENGINES[option], f"{OURS}{option}")


GROUPS = {
    ORT: (
        _ours("ort-cpu"),
        Entrant("Triton, ORT, one by one", ORT, "triton", "ort-plain"),
        Entrant("Triton, ORT, ragged batches", ORT, "triton", "ort-apart", COMPARED_SHARES),
        Entrant("Triton, ORT, padded batches", ORT, "triton", "ort-padded", COMPARED_SHARES),
    ),
    OPENVINO: (
        _ours("cpu"),
        _ours("openvino"),
        Entrant("Triton, OpenVINO, one by one", OPENVINO, "triton", "openvino-plain"),
        Entrant("Triton, OpenVINO, ragged batches", OPENVINO, "triton", "openvino-apart"),
        Entrant("FastAPI, ORT", ORT, "fastapi"),
        Entrant("infinity, ORT", ORT, "infinity-onnx"),
    ),
}
"""Servers compared at the same rates, by our engine that sets them; ours first."""


class OpenLoopBenchmark(PeerBenchmark):
    """The curves of the README."""

    name = "open-loop"
    purpose = "Compare the server with Triton, infinity and FastAPI, in an open loop with mixed lengths."
    rounds = 3
    seconds = 8.0

    def steps(self) -> Iterator[Step]:
        yield "versions", self.versions
        for number in range(1, _CAPACITIES + 1):
            for engine, entrants in GROUPS.items():
                yield f"capacity {number} {engine}", partial(self._capacity, entrants[0])
        for number in range(1, self.options.rounds + 1):
            for engine, entrants in GROUPS.items():
                for share in sorted({share for entrant in entrants for share in entrant.shares}):
                    for entrant in entrants[:: 1 if number % 2 else -1]:
                        if share in entrant.shares and not self._has_collapsed(entrant, number):
                            measure = partial(self._block, entrant, engine, share, number)
                            yield f"block {number} {share:g} {entrant.name}", measure

    def _has_collapsed(self, entrant: Entrant, number: int) -> bool:
        blocks = (self.store.steps.get(f"block {number} {share:g} {entrant.name}") for share in entrant.shares)
        return not entrant.takes_deadlines and any(
            block["good_per_s"] < _COLLAPSED * block["offered_per_s"] for block in blocks if block
        )

    @cached_property
    def _mixed(self) -> Workload:
        return mixed_texts(self.kit.ort)

    @cached_property
    def _servers(self) -> dict[str, ServerProcess]:
        """Servers started so far."""
        return {}

    def _server(self, entrant: Entrant) -> ServerProcess:
        """An entrant's server, started on first use; peers' servers are stopped meanwhile."""
        if entrant.server not in self._servers:
            server = self.opened(entrant.server, lambda: self.kit.server(entrant.server, OPEN_LOOP, QUEUE_MS))
            self._servers[entrant.server] = server
            for other in (other for group in GROUPS.values() for other in group if other.server == entrant.server):
                drive(other.target(server.http_port, self.kit.ort.model), self._mixed, even(_FIRST_S), _FIRST_RATE, 1)
            _rest(server)
            if not entrant.is_ours:
                send_signal(server, signal.SIGSTOP)
                # A stopped process would not receive its signal to end.
                self.stack.callback(send_signal, server, signal.SIGCONT)
        return self._servers[entrant.server]

    def _capacity(self, entrant: Entrant) -> dict[str, float]:
        """Texts per second of a few clients, each asking again once it is answered."""
        target = entrant.target(self._server(entrant).http_port, self.kit.ort.model)
        place, size = ("v2", target.port, target.path("embed")), self.kit.ort.hidden_size
        return {"per_s": closed_loop(place, size, self._mixed.texts[::7], _CONNECTIONS, _CAPACITY_S)}

    def _block(self, entrant: Entrant, engine: str, share: float, number: int) -> dict[str, float]:
        server, rate = self._server(entrant), share * _capacities(self.store)[engine]
        target = entrant.target(server.http_port, self.kit.ort.model)
        limits = {"good_ms": DEADLINE_MS, "patience_s": _PATIENCE_S}
        with thawed(None if entrant.is_ours else server):
            found = block(target, self._mixed, self.options.seconds, rate, 10 * number, **limits)
            _rest(server)
        return found

    def figures(self, store: Store) -> dict[str, Any]:
        blocks = _blocks(store)
        pairs = [pair for group in GROUPS.values() for pair in product(group, group)]
        rows = [
            (entrant.name, *(list(blocks.get((entrant.name, share), {}).values()) for share in COMPARED_SHARES))
            for group in GROUPS.values()
            for entrant in group
        ]
        verdict = [
            (one.name, other.name, [each.ratios(blocks, one, other) for each in COMPARED])
            for one, other in pairs
            if blocks and one.is_ours and other.server == "triton"
        ]
        shown = {"rows": rows, "shares": COMPARED_SHARES, "lost": _lost}
        return {"capacities": _capacities(store), "compared": COMPARED, "verdict": verdict, **shown}

    def plots(self, store: Store) -> dict[str, str]:
        blocks = _blocks(store)
        return {"": _plot(GROUPS[OPENVINO], blocks)} if blocks else {}


def _lost(blocks: Sequence[Block]) -> list[float]:
    """Requests without an answer, in percent."""
    return [100 * (1 - found["answered_per_s"] / found["offered_per_s"]) for found in blocks]


def _rest(server: ServerProcess) -> None:
    """Waits until a server has finished abandoned requests."""
    until = time.perf_counter() + _LONGEST_REST_S
    before = server.cpu_s().all
    while time.perf_counter() < until:
        time.sleep(_REST_S)
        now = server.cpu_s().all
        if now - before < _RESTING_CPU_S:
            return
        before = now


def _capacities(store: Store) -> dict[str, float]:
    """Our capacity with each engine, in texts per second."""
    measured: dict[str, list[float]] = {}
    for name, found in store.named("capacity ").items():
        measured.setdefault(name.partition(" ")[2], []).append(found["per_s"])
    return {engine: statistics.median(values) for engine, values in measured.items()}


def _blocks(store: Store) -> Blocks:
    found: Blocks = {}
    for name, measured in store.named("block ").items():
        number, share, entrant = name.split(" ", 2)
        found.setdefault((entrant, float(share)), {})[int(number)] = measured
    return found


def _plot(entrants: Sequence[Entrant], blocks: Blocks) -> str:
    """p99 of the shortest third, and answers in time, of the servers measured at every rate."""
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


class Compared(NamedTuple):
    """A figure at one rate, compared with Triton's: ours divided by theirs."""

    words: str
    share: float
    figure: str

    def ratios(self, blocks: Blocks, one: Entrant, other: Entrant) -> list[float]:
        """Ratios by round; rounds without the figure have none."""
        ours, theirs = (blocks.get((entrant.name, self.share), {}) for entrant in (one, other))
        return [
            ours[number][self.figure] / theirs[number][self.figure]
            for number in ours.keys() & theirs.keys()
            if self.figure in ours[number] and theirs[number].get(self.figure)
        ]


COMPARED = (
    Compared("p99", TAIL_SHARE, _TAIL),
    Compared("p99 of the shortest third", TAIL_SHARE, _SHORT_TAIL),
    Compared(f"answers within {DEADLINE_MS} ms", OVERLOAD_SHARE, _GOOD),
)
