"""Quantization of activations: equalized channels with one range for the whole tensor.

A few channels of a transformer's activations are ten times as large as the others, and would leave them a handful of
steps. So each channel is divided by a factor and its row of the matrix multiplied by it, which changes no product
(SmoothQuant, arXiv 2211.10438). This enlarges rows of the matrix, whose columns share their steps. If the activations
are made for this product alone, the channel is repeated and its row divided among the repetitions (outlier channel
splitting, arXiv 1901.09504). Factors and clipping are chosen for each product by the error of its 8-bit result on real
text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Counts = NDArray[np.int64]

_SHARES = (0.65, 0.8, 1.0)
"""Exponents of a channel's size in its factor."""
_USUAL = (50, 80, 95)
"""Percentiles of the channels' sizes; only larger channels are scaled down."""
_KEPT = (0.85, 0.7, 0.55)
"""Shares of the range to keep, beside all of it; values outside are clipped."""
_QUIETEST = np.float32(0.25)
"""Minimum size of a channel, in shares of the median."""
_LEVELS = 255
_LARGEST = 127
_LEAST = np.float32(1e-6)
_MAX_ADDED = 16
"""Maximum number of added channels: the feed-forward part grows by at most a hundredth."""
_HALVINGS = 30


@dataclass(slots=True, frozen=True)
class Seen:
    """Statistics of a product's activations.

    Attributes:
        low: Minimum of each channel, float32 [channels].
        high: Maximum of each channel.
        rows: Activations of some tokens, float32 [tokens, channels].
    """

    low: Floats
    high: Floats
    rows: Floats


@dataclass(slots=True, frozen=True)
class Cut:
    """Quantization parameters of activations: a factor per channel, and equal steps in a range.

    Attributes:
        factors: float32 [channels].
        low: At most 0, so that 0 stays exactly 0.
        high: More than 0.
        repeats: Repetitions of each channel, int64 [channels]; None: once.
    """

    factors: Floats
    low: float
    high: float
    repeats: Counts | None = None

    @property
    def divisors(self) -> Floats:
        """The factors of the channels with their repetitions."""
        return self.factors if self.repeats is None else np.repeat(self.factors, self.repeats)

    def rows(self, matrix: Floats) -> Floats:
        """The matrix for scaled activations: its rows times the factors, divided among their repetitions."""
        rows: Floats = matrix * self.factors[:, None]
        if self.repeats is not None:
            rows = np.repeat(rows / self.repeats.astype(np.float32)[:, None], self.repeats, axis=0)
        return rows

    @property
    def scale(self) -> np.float32:
        """The size of a step."""
        return np.float32((self.high - self.low) / _LEVELS)

    @property
    def zero(self) -> np.uint8:
        """The zero point."""
        return np.uint8(np.clip(np.rint(-self.low / self.scale), 0, _LEVELS))

    @property
    def is_even(self) -> bool:
        """Whether the channels are unchanged."""
        return bool((self.factors == 1).all())

    def rounded(self, rows: Floats) -> Floats:
        """Activations after scaling and rounding to 8 bits."""
        steps = np.clip(np.rint(rows / self.factors / self.scale) + self.zero, 0, _LEVELS)
        result: Floats = (steps - np.float32(self.zero)) * self.scale
        return result


def choose(seen: Seen, matrix: Floats, *, may_repeat: bool = False) -> Cut:
    """The parameters with the smallest error of the product.

    Args:
        seen: Its activations on real text.
        matrix: float32 [channels, columns].
        may_repeat: Whether channels may be repeated.
    """
    exact = seen.rows @ matrix

    def distance(cut: Cut, weights: Floats) -> float:
        return float(np.square(cut.rounded(seen.rows) @ weights - exact).sum())

    def whole(factors: Floats) -> tuple[float, Cut, Floats]:
        rows = matrix * factors[:, None]
        repeats = _repeats(rows) if may_repeat else np.ones(len(rows), np.int64)
        shares = repeats.astype(np.float32)[:, None]
        values, scale = eight_bits(rows / shares)
        cut, weights = _whole(seen, factors, repeats if may_repeat else None), values * scale * shares
        return distance(cut, weights), cut, weights

    nearest, best, weights = min(map(whole, _factors(seen, matrix)), key=itemgetter(0))
    narrower = [replace(best, low=best.low * kept, high=best.high * kept) for kept in _KEPT]
    closer, narrow = min(((distance(cut, weights), cut) for cut in narrower), key=itemgetter(0))
    return narrow if closer < nearest else best


def _repeats(rows: Floats) -> Counts:
    """Repetitions of each row of a matrix that minimize its largest number."""
    sizes = np.maximum(np.abs(rows).max(axis=1), _LEAST)
    low, high = float(np.median(sizes)), float(sizes.max())
    for _ in range(_HALVINGS):
        level = (low + high) / 2
        if int(_times(sizes, level).sum()) - len(sizes) <= _MAX_ADDED:
            high = level
        else:
            low = level
    return _times(sizes, high)


def _times(sizes: Floats, level: float) -> Counts:
    times: Counts = np.maximum(np.ceil(sizes / np.float32(level)), 1).astype(np.int64)
    return times


def _factors(seen: Seen, matrix: Floats) -> Iterator[Floats]:
    """Candidates for the factors; the first changes nothing."""
    sizes = np.maximum(np.maximum(np.abs(seen.low), np.abs(seen.high)), _LEAST)
    # A channel that is quiet on this text may be loud on another, and must not be clipped there.
    sizes = np.maximum(sizes, np.median(sizes) * _QUIETEST)
    weights = np.maximum(np.abs(matrix).max(axis=1), _LEAST)
    yield np.ones_like(sizes)
    for share in _SHARES:
        factors = sizes**share / weights ** (1 - share)
        # Only their ratios matter; around 1 they avoid overflow.
        yield (factors / np.exp(np.log(factors).mean())).astype(np.float32)
    for percentile in _USUAL:
        yield np.maximum(sizes / np.float32(np.percentile(sizes, percentile)), 1)


def _whole(seen: Seen, factors: Floats, repeats: Counts | None) -> Cut:
    low, high = float((seen.low / factors).min()), float((seen.high / factors).max())
    return Cut(factors, min(low, 0.0), max(high, float(_LEAST)), repeats)


def eight_bits(matrix: Floats) -> tuple[NDArray[np.int8], Floats]:
    """A matrix as 8-bit values [rows, columns] and a scale for each column: `matrix ≈ values * scale`."""
    scale = np.maximum(np.abs(matrix).max(axis=0), _LEAST) / np.float32(_LARGEST)
    return np.rint(matrix / scale).astype(np.int8), scale.astype(np.float32)
