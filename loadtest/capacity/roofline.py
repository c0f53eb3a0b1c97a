"""What a batch costs where nobody measured it: a roofline with launch costs, fitted to what was published.

Each kernel of the encoder takes the larger of its operations over a share of the device's rate and its bytes over a
share of its bandwidth, and then what a launch costs. The two shares and the launch are fitted to published times; the
kernels are those of `encoder_kernels`.
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
"""Bytes of a number, as `encoder_kernels.kernels` counts them."""

_START = (0.4, 0.7, 5.0)
_STEPS = (0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
_MOST = (1.0, 1.0, math.inf)
_LEAST = (0.01, 0.01, 0.01)


class Shares(NamedTuple):
    """What a device reaches of its published figures.

    Attributes:
        operations: Share of the rate of operations.
        bandwidth: Share of the bandwidth.
        launch_us: Of every kernel.
        error: The root mean square of the logarithms of computed over known times.
    """

    operations: float
    bandwidth: float
    launch_us: float
    error: float


class Known(NamedTuple):
    """A time that is known.

    Attributes:
        device: What computed.
        encoder: What it computed.
        precision: In what.
        tokens: Of each text.
        texts: Of the batch.
        us: The time.
    """

    device: Candidate
    encoder: Encoder
    precision: str
    tokens: int
    texts: int
    us: float


def batch_us(
    device: Candidate, encoder: Encoder, precision: str, shares: Sequence[float], tokens: int, texts: int
) -> float:
    """The time of a batch by the roofline, in microseconds.

    Args:
        device: What computes.
        encoder: What it computes.
        precision: In what.
        shares: The first three of `Shares`.
        tokens: Of each text.
        texts: Of the batch.
    """
    operations, bandwidth, launch_us = shares[:3]
    number = {"fp32": 4, "fp16": 2, "int8": 1}[precision]
    rate = operations * device.tera_per_s[precision] * 1e6  # type: ignore[index]  # a precision that it has
    bytes_per_us = bandwidth * device.bandwidth_gb_s * 1e3 * _OF_KERNELS / number
    return sum(
        count * (max(kernel.operations / rate, kernel.bytes / bytes_per_us) + launch_us)
        for count, kernel in _kernels(encoder.layers, encoder.hidden, encoder.intermediate, texts, tokens)
    )


@cache
def _kernels(
    layers: int, hidden: int, intermediate: int, texts: int, tokens: int
) -> tuple[tuple[int, encoder_kernels.Kernel], ...]:
    """Each kernel of a batch once, with how often it runs."""
    before, *layer, after = encoder_kernels.kernels(encoder_kernels.Encoder(1, hidden, intermediate), texts, tokens)
    return ((1, before), *((layers, kernel) for kernel in layer), (1, after))


def fit(known: Sequence[Known]) -> Shares:
    """The shares that come nearest to known times: each in turn a step up or down, as long as that helps."""

    def loss(shares: Sequence[float]) -> float:
        return sum(_error(one, shares) ** 2 for one in known)

    best = _descend(loss, _START)
    operations, bandwidth, launch_us = best
    return Shares(operations, bandwidth, launch_us, math.sqrt(loss(best) / len(known)))


def error_on(known: Sequence[Known], shares: Shares) -> float:
    """The same error of shares that were fitted to other times."""
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
