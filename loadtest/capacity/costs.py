"""Batch costs of an encoder on a device: from published tables if available, else from the roofline model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from loadtest.capacity.candidates import read_candidates
from loadtest.capacity.encoder import encoder_of
from loadtest.capacity.roofline import Known, Shares, batch_us, error_on, fit
from loadtest.capacity.tables import BatchCosts, find_table
from serving.scheduling.cost import CostPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadtest.capacity.candidates import Candidate
    from loadtest.capacity.encoder import Encoder

LENGTHS = (8, 16, 32, 64, 128, 256, 384, 512)
"""Text lengths, in tokens, for which a table of costs is made; longer ones continue by doubling."""

_MAX_TOKENS = 1 << 14
"""Maximum tokens of a batch in a computed table."""

_CARDS = ("t4", "l4", "a100")
_SIZES = ("bert-base", "bert-large")
"""Cards and encoders with published times in fp16 and INT8."""

_BANDWIDTH_THERE = {"a100": 1555.0}
"""Bandwidth of the card with the published times, if it differs from the candidate: an A100 with 40 GB."""

_LIKE_OTHERS = ("l4", "a100")
"""Cards newer than a T4 are computed with the shares that these two reach. Each serves to estimate the error of the
other."""

_CPU_SHARES = {"fp32": Shares(0.9, 0.9, 20.0, 0.5), "int8": Shares(0.65, 0.9, 20.0, 0.5)}
"""Shares of a CPU with ONNX Runtime.

About what two cores of an AMD EPYC 9005 reach of their rates at the base clock, by docs/benchmarks/sizing.json and 20
to 30 GB/s of bandwidth. The error on other CPUs has not been measured.
"""


def costs_of(name: str, device: Candidate, encoder: Encoder, precision: str) -> BatchCosts:
    """The costs of an encoder on a candidate other than the local machine."""
    shares, origin = _shares(name, device, precision)
    published = _published(name, encoder, precision)
    points = _grid(device, encoder, precision, shares)
    if published is None:
        fact = f"computed: {origin}, error {100 * shares.error:.0f}%"
        return BatchCosts("computed", points, error=shares.error, facts=(fact,), threads=device.cores)
    least = min(point.tokens for point in published.points)
    shorter = tuple(point for point in points if point.tokens < least)
    facts = [f"published: {source}" for source in published.facts]
    if shorter:
        facts.append(f"below {least} tokens computed: {origin}, error {100 * shares.error:.0f}%")
    return replace(published, points=(*shorter, *published.points), facts=tuple(facts))


def _published(name: str, encoder: Encoder, precision: str) -> BatchCosts | None:
    if name in _CARDS and precision in {"fp16", "int8"}:
        for size in _SIZES:
            if _same(encoder, encoder_of(size)):
                return find_table(f"{name}-{size}-{precision}")
    return None


def _same(one: Encoder, other: Encoder) -> bool:
    return (one.layers, one.hidden, one.intermediate) == (other.layers, other.hidden, other.intermediate)


def _grid(device: Candidate, encoder: Encoder, precision: str, shares: Shares) -> tuple[CostPoint, ...]:
    lengths = [tokens for tokens in LENGTHS if tokens < encoder.positions]
    return tuple(
        CostPoint("wide", tokens, 1 << power, batch_us(device, encoder, precision, shares, tokens, 1 << power))
        for tokens in (*lengths, encoder.positions)
        for power in range(max(1, (_MAX_TOKENS // tokens).bit_length()))
    )


def _shares(name: str, device: Candidate, precision: str) -> tuple[Shares, str]:
    """The shares that the device reaches, and their origin."""
    if device.kind == "cpu":
        return _CPU_SHARES[precision], "from the efficiency of two AMD EPYC 9005 cores; other CPUs may differ"
    form = "int8" if precision == "int8" else "fp16"
    if name in _CARDS:
        return _fitted((name,), form), f"from the efficiency of this GPU in published {form} tables"
    joint = _fitted(_LIKE_OTHERS, form)
    return joint._replace(error=transfer_error(form)), "from the efficiency of an L4 and an A100 in published tables"


@cache
def _fitted(names: tuple[str, ...], precision: str) -> Shares:
    return fit([one for name in names for one in known(name, precision)])


@cache
def transfer_error(precision: str) -> float:
    """The error of a card without published times: the larger one of predicting two cards from each other."""
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
        for size in _SIZES
        for point in find_table(f"{name}-{size}-{precision}").points
    ]
