"""The page of the open loop: curves, tables and the verdict."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from charts.lines import Panel, Series, panels_file
from charts.plot import Axis
from loadtest.benchmarks.drive import REPEATED_TEXTS
from loadtest.benchmarks.peers.entrants import (
    CACHE_MB,
    DEADLINE_MS,
    KNOWN_TEXTS,
    OVERLOAD_SHARE,
    REPEATING,
    SHARES,
    TAIL_SHARE,
    groups,
)
from loadtest.benchmarks.peers.kit import versions_of
from loadtest.benchmarks.peers.servers import LENGTH_STEP, QUEUE_MS, TRITON_BATCH
from loadtest.benchmarks.peers.subjects import OPENVINO
from loadtest.benchmarks.runner import Page, Part, Picture
from loadtest.report.sample import Spread
from loadtest.report.tables import MET, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.benchmarks.peers.entrants import Entrant
    from loadtest.benchmarks.store import Store

Block = dict[str, float]
Blocks = dict[tuple[str, float], dict[int, Block]]
"""What was measured by entrant and share, and of that by round."""

_GOOD, _TAIL, _SHORT_TAIL = "good_per_s", "p99_ms", "short_p99_ms"
_COLOURS = ("blue", "orange", "violet", "green", "grey")


@dataclass(slots=True, frozen=True)
class _Aim:
    """What is asked of ours beside Triton.

    Attributes:
        words: For the reader.
        share: The offered rate.
        figure: What is compared.
        asked: Ours divided by theirs.
        more: Whether it shall be at least that; else at most.
    """

    words: str
    share: float
    figure: str
    asked: float
    more: bool = False


_AIMS = (
    _Aim("p99", TAIL_SHARE, _TAIL, 0.5),
    _Aim("p99 of the shortest third", TAIL_SHARE, _SHORT_TAIL, 0.3),
    _Aim(f"answers within {DEADLINE_MS} ms", OVERLOAD_SHARE, _GOOD, 2.0, more=True),
)

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


def page_of(store: Store) -> Page:
    """The page, as far as it has been measured."""
    method = (
        "Texts of 6 to 250 words of real English in even steps, Poisson arrivals, open loop: a latency counts from the"
        f" intended time. Alternating blocks of {store.facts['seconds']:g} s; rates are shares of the texts a second"
        " that ours answers with the same engine to 4 clients in a closed loop. A client waits for 2 s at most. The"
        " generator shares the cores."
    )
    found = ", ".join(f"{engine} {per_s:.0f}/s" for engine, per_s in capacities(store).items())
    blocks, repeated = _blocks(store, "block "), _blocks(store, "zipf ")
    parts: list[Part] = []
    if blocks:
        best, words = groups()[OPENVINO], "p99 of short texts and answers in time, over the offered rate"
        parts += [Picture("", plot(best, blocks), words), _verdict(blocks)]
        parts += [_table(engine, entrants, blocks) for engine, entrants in groups().items()]
    if repeated:
        parts.append(_repeated_table(repeated))
    facts = {"model": f"{store.facts['model']} version {store.facts['version']}", **versions_of(store)}
    title = "Texts that arrive at random, beside other servers"
    return Page(title, method, [*parts, _WHO], facts={**facts, "capacity C": found})


def capacities(store: Store) -> dict[str, float]:
    """What ours carries with each engine, in texts a second."""
    measured: dict[str, list[float]] = {}
    for name, found in store.named("capacity ").items():
        measured.setdefault(name.partition(" ")[2], []).append(found["per_s"])
    return {engine: statistics.median(values) for engine, values in measured.items()}


def plot(entrants: Sequence[Entrant], blocks: Blocks) -> str:
    """p99 of the shortest third, and answers in time, of those who are asked at every rate."""
    ours, *others = [entrant for entrant in entrants if entrant.shares == SHARES]
    shown = {"bertserve": ours} | {_short(entrant): entrant for entrant in others if not entrant.is_ours}
    lines = {name: _curve(entrant, blocks) for name, entrant in shown.items()}
    rates = [rate for curve in lines.values() for rate, _ in curve]
    across = Axis.of("offered texts a second", rates)

    def panel(title: str, figure: str, *, is_log: bool, beside: Sequence[Series] = ()) -> Panel:
        series = []
        for colour, (name, curve) in zip(_COLOURS, lines.items(), strict=False):
            points = [(rate, spread.median) for rate, found in curve if (spread := _spread(found, figure))]
            series.append(Series(name, colour, points, points))
        values = [y for entry in (*series, *beside) for _, y in entry.points]
        return Panel(Axis.of(title, values, is_log=is_log), series, beside)

    top = max(rates, default=1.0)
    offered = [Series("offered", "moment", [(0.0, 0.0), (top, top)])]
    panels = [
        panel("p99 of the shortest third, ms", _SHORT_TAIL, is_log=True),
        panel(f"answered within {DEADLINE_MS} ms, a second (dotted: all of them)", _GOOD, is_log=False, beside=offered),
    ]
    return panels_file("Texts of 6 to 250 words that arrive at random", across, panels)


def _short(entrant: Entrant) -> str:
    """Its name in a legend: the system, and how it batches."""
    system, *rest = entrant.name.split(", ")
    return " ".join([system, *rest[1:]])


def _blocks(store: Store, prefix: str) -> Blocks:
    found: Blocks = {}
    for name, block in store.named(prefix).items():
        number, share, entrant = name.split(" ", 2)
        found.setdefault((entrant, float(share)), {})[int(number)] = block
    return found


def _curve(entrant: Entrant, blocks: Blocks) -> list[tuple[float, dict[int, Block]]]:
    """Rate and blocks, from the lowest rate on."""
    found = [blocks[entrant.name, share] for share in entrant.shares if (entrant.name, share) in blocks]
    return [(next(iter(rounds.values()))["rate"], rounds) for rounds in found]


def _spread(rounds: dict[int, Block], figure: str | Callable[[Block], float]) -> Spread | None:
    read = (lambda block: block.get(figure)) if isinstance(figure, str) else figure
    values = [value for block in rounds.values() if (value := read(block)) is not None]
    return Spread.of(values) if values else None


def _text(rounds: dict[int, Block], figure: str | Callable[[Block], float], decimals: int = 0) -> str:
    spread = _spread(rounds, figure)
    return spread.text(decimals) if spread else "-"


def _unanswered(block: Block) -> float:
    return 100 * (1 - block["answered_per_s"] / block["offered_per_s"])


def _cells(rounds: dict[int, Block]) -> list[str]:
    decimals = {"p50_ms": 1, _TAIL: 0, _SHORT_TAIL: 0, _GOOD: 1}
    return [*(_text(rounds, figure, digits) for figure, digits in decimals.items()), _text(rounds, _unanswered)]


_HEAD = ("p50 ms", "p99 ms", "p99 of short ms", f"in {DEADLINE_MS} ms, a second", "no answer, %")


def _table(engine: str, entrants: Sequence[Entrant], blocks: Blocks) -> Table:
    rows = []
    for share in sorted({share for name, share in blocks if name in {entrant.name for entrant in entrants}}):
        for entrant in entrants:
            if rounds := blocks.get((entrant.name, share)):
                rate = next(iter(rounds.values()))["rate"]
                rows.append([f"{share:g}", f"{rate:.0f}", entrant.name, *_cells(rounds)])
    note = (
        "Medians of the blocks, least to greatest in brackets. `short`: the shortest third of the texts. Percentiles"
        " are of the answers; what was refused or given up has none."
    )
    return Table(f"Beside {engine}", note, ("of C", "offered/s", "server", *_HEAD), rows)


def _repeated_table(blocks: Blocks) -> Table:
    rows = []
    for share in sorted({share for _, share in blocks}):
        for entrant in REPEATING:
            if rounds := blocks.get((entrant.name, share)):
                rate = next(iter(rounds.values()))["rate"]
                rows.append([f"{share:g}", f"{rate:.0f}", entrant.name, *_cells(rounds)])
    note = (
        f"{REPEATED_TEXTS} different texts, the k-th asked for in proportion to 1/k (Zipf's law, s = 1); C is that of"
        f" texts that do not repeat. Caches of {CACHE_MB} MiB hold them all: ours `--response-cache-mb`, Triton's its"
        f" `local` response cache. The {KNOWN_TEXTS} most frequent were asked for once before."
    )
    return Table("Texts that repeat", note, ("of C", "offered/s", "server", *_HEAD), rows)


def _verdict(blocks: Blocks) -> Table:
    rows = []
    for entrants in groups().values():
        ours = [entrant for entrant in entrants if entrant.is_ours]
        theirs = [entrant for entrant in entrants if entrant.server == "triton"]
        for one, other in ((one, other) for one in ours for other in theirs):
            cells = [
                _judged(aim, blocks.get((one.name, aim.share), {}), blocks.get((other.name, aim.share), {}))
                for aim in _AIMS
            ]
            rows.append([one.name, other.name, *cells])
    asked = [f"{aim.words} at {aim.share:g} C, {'at least' if aim.more else 'at most'} {aim.asked:g}" for aim in _AIMS]
    return Table("Beside Triton", "Ours divided by theirs, within a round.", ("ours", "beside", *asked), rows, words=2)


def _judged(aim: _Aim, ours: dict[int, Block], theirs: dict[int, Block]) -> str:
    ratios = [
        ours[number][aim.figure] / theirs[number][aim.figure]
        for number in ours.keys() & theirs.keys()
        if aim.figure in ours[number] and theirs[number].get(aim.figure)
    ]
    if not ratios:
        return "not measured"
    spread = Spread.of(ratios)
    met = spread.median >= aim.asked if aim.more else spread.median <= aim.asked
    return f"{MET[met]}, {spread.text(2)}"
