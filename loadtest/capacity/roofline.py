"""Roofline model with launch costs, fitted to published times, for batches that were not measured.

Each kernel of the encoder takes the maximum of its operations over a share of the device's rate and its bytes over a
share of its bandwidth, plus a launch cost. The two shares and the launch cost are fitted to published times. The
kernels come from `encoder_kernels`.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from loadtest.capacity import encoder_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.capacity.candidates import Candidate
    from loadtest.capacity.encoder import Encoder

_OF_KERNELS = 2
"""Bytes per number in `encoder_kernels.kernels`."""

_START = (0.4, 0.7, 5.0)
_STEPS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
_MOST = (1.0, 1.0, math.inf)
_LEAST = (0.01, 0.01, 0.01)


class Shares(NamedTuple):
    """The shares of its published figures that a device reaches.

    Attributes:
        operations: Share of the operation rate.
        bandwidth: Share of the bandwidth.
        launch_us: Launch cost of every kernel.
        error: Root mean square of the logarithms of computed over known times.
    """

    operations: float
    bandwidth: float
    launch_us: float
    error: float


class Known(NamedTuple):
    """A known time of a batch, with `tokens` in each text."""

    device: Candidate
    encoder: Encoder
    precision: str
    tokens: int
    texts: int
    us: float


def batch_us(
    device: Candidate, encoder: Encoder, precision: str, shares: Sequence[float], tokens: int, texts: int
) -> float:
    """The time of a batch by the roofline, in microseconds; uses the first three values of `Shares`."""
    operations, bandwidth, launch_us = shares[:3]
    number = {"fp32": 4, "fp16": 2, "int8": 1}[precision]
    rate = operations * device.tera_per_s[precision] * 1e6  # type: ignore[index]  # a supported precision
    bytes_per_us = bandwidth * device.bandwidth_gb_s * 1e3 * _OF_KERNELS / number
    return sum(
        count * (max(kernel.operations / rate, kernel.bytes / bytes_per_us) + launch_us)
        for count, kernel in _kernels(encoder.layers, encoder.hidden, encoder.intermediate, texts, tokens)
    )


@cache
def _kernels(
    layers: int, hidden: int, intermediate: int, texts: int, tokens: int
) -> tuple[tuple[int, encoder_kernels.Kernel], ...]:
    """The distinct kernels of a batch, each with its number of runs."""
    before, *layer, after = encoder_kernels.kernels(encoder_kernels.Encoder(1, hidden, intermediate), texts, tokens)
    return ((1, before), *((layers, kernel) for kernel in layer), (1, after))


def fit(known: Sequence[Known]) -> Shares:
    """Fits the shares to known times by coordinate descent: moves each in turn by a step while the error decreases."""

    def loss(shares: Sequence[float]) -> float:
        return sum(_error(one, shares) ** 2 for one in known)

    best = _descend(loss, _START)
    operations, bandwidth, launch_us = best
    return Shares(operations, bandwidth, launch_us, math.sqrt(loss(best) / len(known)))


def error_on(known: Sequence[Known], shares: Shares) -> float:
    """The error of shares that were fitted to other times."""
    return math.sqrt(sum(_error(one, shares) ** 2 for one in known) / len(known))


def _error(one: Known, shares: Sequence[float]) -> float:
    return math.log(batch_us(one.device, one.encoder, one.precision, shares, one.tokens, one.texts) / one.us)


def _descend(loss: Callable[[Sequence[float]], float], start: tuple[float, ...]) -> tuple[float, ...]:
    best, least = start, loss(start)
    for step in _STEPS:
        moved = True
        while moved:
            moved = False
            for index in range(len(best)):
                for factor in (1 + step, 1 / (1 + step)):
                    value = min(max(best[index] * factor, _LEAST[index]), _MOST[index])
                    tried = (*best[:index], value, *best[index + 1 :])
                    if (found := loss(tried)) < least * (1 - 1e-6):
                        best, least, moved = tried, found, True
    return best
