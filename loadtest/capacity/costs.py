"""What batches of an encoder cost on a device: from published tables where there are any, else by the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from loadtest.capacity.candidates import read_candidates
from loadtest.capacity.encoder import KNOWN, encoder_of
from loadtest.capacity.roofline import Known, Shares, batch_us, error_on, fit
from loadtest.capacity.tables import find_table
from serving.scheduling.cost import CostPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.capacity.candidates import Candidate
    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.tables import Table

Basis = Literal["measured", "extrapolated", "published", "computed"]
"""`measured` on this machine whole, `extrapolated` from few layers measured on it."""

LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
"""Tokens of the texts that a table of costs is made for; longer ones go on doubling."""

_MOST_TOKENS = 1 << 14
"""Of a batch in a table that is computed."""

_OWN = Path(str(files("loadtest.capacity") / "data" / "published"))
_TABLES = {
    "t4": {(size, form): f"t4-{size}-{form}" for size in ("bert-base", "bert-large") for form in ("fp16", "int8")},
    **{
        card: {
            (size, form): str(_OWN / f"{card}-{size}-{form}.json")
            for size in ("bert-base", "bert-large")
            for form in ("fp16", "int8")
        }
        for card in ("l4", "a100")
    },
}
"""Published times by candidate, encoder and precision."""

_BANDWIDTH_THERE = {"a100": 1555.0}
"""Of the card that the times were published for, where it is another one than the candidate: an A100 of 40 GB."""

_LIKE_OTHERS = ("l4", "a100")
"""Cards newer than a T4 are computed with what these two reach, and each of them says how far off the other is."""

_CPU_SHARES = {"fp32": Shares(0.9, 0.9, 20.0, 0.5), "int8": Shares(0.65, 0.9, 20.0, 0.5)}
"""Of a CPU with ONNX Runtime: about what two cores of an AMD EPYC 9005 reach of their rates at the base clock, by
docs/benchmarks/sizing.json and 20 to 30 GB/s of bandwidth. How far another CPU is from that, nobody has measured."""


@dataclass(slots=True, frozen=True)
class Costs:
    """What batches cost.

    Attributes:
        basis: Where that is from.
        points: Times of batches.
        error: Relative, as one standard deviation; 0 where it is not known.
        facts: What it rests on, line by line.
        narrow_lanes: Lanes beside the wide one.
        threads: Cores that the engine shares with the server; 0 where it has its own.
        batched: Whether texts are computed together.
    """

    basis: Basis
    points: tuple[CostPoint, ...]
    error: float
    facts: tuple[str, ...]
    narrow_lanes: int = 0
    threads: int = 0
    batched: bool = True


def costs_of(name: str, device: Candidate, encoder: Encoder, precision: str) -> Costs:
    """The costs of an encoder on a candidate that is not at hand."""
    shares, origin = _shares(name, device, precision)
    published = _published(name, encoder, precision)
    points = _grid(device, encoder, precision, shares)
    if published is None:
        fact = f"computed: {origin}, error {100 * shares.error:.0f}%"
        return Costs("computed", points, shares.error, (fact,), threads=device.cores)
    least = min(point.tokens for point in published.points)
    shorter = tuple(point for point in points if point.tokens < least)
    facts = [f"published: {source}" for source in published.sources]
    if shorter:
        facts.append(f"below {least} tokens computed: {origin}, error {100 * shares.error:.0f}%")
    return Costs("published", (*shorter, *published.points), 0.0, tuple(facts))


def _published(name: str, encoder: Encoder, precision: str) -> Table | None:
    for known in KNOWN:
        if (table := _TABLES.get(name, {}).get((known, precision))) and _same(encoder, encoder_of(known)):
            return find_table(table)
    return None


def _same(one: Encoder, other: Encoder) -> bool:
    return (one.layers, one.hidden, one.intermediate) == (other.layers, other.hidden, other.intermediate)


def _grid(device: Candidate, encoder: Encoder, precision: str, shares: Shares) -> tuple[CostPoint, ...]:
    lengths = [tokens for tokens in LENGTHS if tokens < encoder.positions]
    return tuple(
        CostPoint("wide", tokens, 1 << power, batch_us(device, encoder, precision, shares, tokens, 1 << power))
        for tokens in (*lengths, encoder.positions)
        for power in range(max(1, (_MOST_TOKENS // tokens).bit_length()))
    )


def _shares(name: str, device: Candidate, precision: str) -> tuple[Shares, str]:
    """What the device reaches, and where that is from."""
    if device.kind == "cpu":
        return _CPU_SHARES[precision], "with about what two cores of an AMD EPYC 9005 reach; another CPU is a guess"
    form = "int8" if precision == "int8" else "fp16"
    if name in _TABLES:
        return _fitted((name,), form), f"with what this card reaches in published tables in {form}"
    joint = _fitted(_LIKE_OTHERS, form)
    return joint._replace(error=transfer_error(form)), "with what an L4 and an A100 reach in published tables"


@cache
def _fitted(names: tuple[str, ...], precision: str) -> Shares:
    return fit([one for name in names for one in known(name, precision)])


@cache
def transfer_error(precision: str) -> float:
    """How far off a card is computed whose own times were not looked at: each of two by the other, the worse one."""
    one, other = _LIKE_OTHERS
    return max(
        error_on(known(one, precision), _fitted((other,), precision)),
        error_on(known(other, precision), _fitted((one,), precision)),
    )


def known(name: str, precision: str) -> Sequence[Known]:
    """The published times of a card."""
    device = read_candidates(None)[name]
    device = msgspec.structs.replace(device, bandwidth_gb_s=_BANDWIDTH_THERE.get(name, device.bandwidth_gb_s))
    return [
        Known(device, encoder_of(size), precision, point.tokens, point.batch, point.us)
        for (size, form), table in _TABLES[name].items()
        if form == precision
        for point in find_table(table).points
    ]
