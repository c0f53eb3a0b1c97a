"""Extrapolates the costs of all layers from runs of a few layers, with the expected error.

A batch takes `fixed + layers x layer`. The fixed part (the embedding, pooling, padding, the call) grows with the
batch's tokens. The cost of a layer is a free parameter for each measured shape. Both are fitted together, by robust
least squares of relative errors. Shapes that were not measured follow a smooth cost of a layer, `a + b n + c n t` for n
tokens in texts of t; the last term is attention.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_FIXED = 2
_SYSTEMATIC = 0.07
"""Relative error that the residuals do not show: another memory layout, and caches that hold few layers but not all.
About what docs/benchmarks/sizing.md found."""

_ROUNDS = 8
_USUAL = 1.5
"""Residuals beyond this many times their median get less weight (Huber): other processes were running."""


class Shape(NamedTuple):
    """The shape of a batch: tokens of each text, and number of texts."""

    tokens: int
    texts: int


class Sample(NamedTuple):
    """One measured time.

    Attributes:
        layers: Layers of the graph.
        shape: Shape of the batch.
        us: Median time in microseconds.
        spread_us: Interquartile range.
    """

    layers: int
    shape: Shape
    us: float
    spread_us: float = 0.0


class Estimate(NamedTuple):
    """An extrapolated time.

    Attributes:
        us: Time in microseconds.
        error: Relative error, one standard deviation.
    """

    us: float
    error: float


class Fit:
    """The fitted costs of an encoder."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Fits samples of at least two layer counts for each shape, and of at least two shapes."""
        self.shapes = sorted({sample.shape for sample in samples})
        self._columns = {shape: _FIXED + index for index, shape in enumerate(self.shapes)}
        us = np.array([sample.us for sample in samples])
        rows = np.array([self._row(sample.layers, sample.shape) for sample in samples]) / us[:, None]
        trust = np.ones(len(us))
        for _ in range(_ROUNDS):
            self._weights, *_ = np.linalg.lstsq(rows * trust[:, None], trust, rcond=None)
            residuals = rows @ self._weights - 1
            usual = _USUAL * max(float(np.median(np.abs(residuals))), 1e-9)
            trust = np.sqrt(np.minimum(1.0, usual / np.maximum(np.abs(residuals), 1e-12)))
        freedom = max(1, len(us) - rows.shape[1])
        self.residual = math.sqrt(float((trust * residuals) @ residuals) / freedom)
        self._covariance = self.residual**2 * np.linalg.pinv(rows.T @ rows)
        layer = self._weights[_FIXED:]
        terms = np.array([_terms(shape) for shape in self.shapes]) / np.maximum(layer, 1e-9)[:, None]
        self._smooth, *_ = np.linalg.lstsq(terms, np.ones(len(layer)), rcond=None)
        self.roughness = math.sqrt(float(np.mean((terms @ self._smooth - 1) ** 2)))
        spreads = [sample.spread_us / sample.us for sample in samples if sample.us]
        self.spread = float(np.median(spreads))

    def at(self, layers: int, shape: Shape) -> Estimate:
        """The time of a batch with that many layers, for a measured or another shape."""
        if shape in self._columns:
            row = self._row(layers, shape)
            us = float(row @ self._weights)
            error = math.sqrt(max(0.0, float(row @ self._covariance @ row))) / max(us, 1e-9)
            return Estimate(us, math.hypot(error, _SYSTEMATIC))
        fixed = self._weights[:_FIXED] @ [1.0, shape.tokens * shape.texts]
        us = float(fixed + layers * (self._smooth @ _terms(shape)))
        return Estimate(us, math.hypot(self.roughness, self.residual, _SYSTEMATIC))

    def _row(self, layers: int, shape: Shape) -> NDArray[np.float64]:
        row = np.zeros(_FIXED + len(self.shapes))
        row[:_FIXED] = 1.0, shape.tokens * shape.texts
        row[self._columns[shape]] = layers
        return row


def _terms(shape: Shape) -> tuple[float, float, float]:
    tokens = shape.tokens * shape.texts
    return 1.0, float(tokens), float(tokens * shape.tokens)
