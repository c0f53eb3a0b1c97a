"""The minimum time of a BERT on a GPU, by a launch-aware roofline.

Each kernel takes the maximum of its bytes over the GPU's bandwidth, its operations over its matrix rate, and the launch
cost. The minimum time is the sum over all kernels. The kernels are those of an encoder with the usual fusions: one
product for queries, keys and values, one kernel for attention, bias and activation inside the products, and the
residual addition together with the normalization after it. Weights are read once per batch; fp16 has two bytes per
number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

LAUNCH_US = 2.0
"""Minimum time of a kernel, inside a CUDA graph too: start, end, and the wait of the next kernel."""

_BYTES = 2
_PER_MULTIPLY_ADD = 2


class Encoder(NamedTuple):
    """Dimensions of a BERT."""

    layers: int
    hidden: int
    intermediate: int


BASE = Encoder(12, 768, 3072)
LARGE = Encoder(24, 1024, 4096)


class Kernel(NamedTuple):
    """Arithmetic and memory traffic of one kernel.

    Attributes:
        operations: Multiplications and additions.
        bytes: Bytes read and written.
    """

    operations: float
    bytes: float

    def us(self, operations_per_s: float, bytes_per_s: float) -> float:
        """The minimum time, in microseconds."""
        return max(1e6 * self.operations / operations_per_s, 1e6 * self.bytes / bytes_per_s, LAUNCH_US)


def kernels(encoder: Encoder, texts: int, tokens: int) -> list[Kernel]:
    """The kernels of a batch, in order.

    >>> round(sum(kernel.operations for kernel in kernels(BASE, 1, 128)) / 1e9, 1)
    22.4
    """
    rows, hidden = texts * tokens, encoder.hidden
    normalise = Kernel(10.0 * rows * hidden, 3.0 * _BYTES * rows * hidden)
    attention = Kernel(2.0 * _PER_MULTIPLY_ADD * texts * tokens * tokens * hidden, 4.0 * _BYTES * rows * hidden)
    layer = [
        _product(rows, hidden, 3 * hidden),
        attention,
        _product(rows, hidden, hidden),
        normalise,
        _product(rows, hidden, encoder.intermediate),
        _product(rows, encoder.intermediate, hidden),
        normalise,
    ]
    pooling = Kernel(float(rows * hidden), float(_BYTES * rows * hidden))
    return [normalise, *layer * encoder.layers, pooling]


def floor_us(kernels: Sequence[Kernel], operations_per_s: float, bytes_per_s: float) -> float:
    """The minimum time of the kernels one after another, in microseconds."""
    return sum(kernel.us(operations_per_s, bytes_per_s) for kernel in kernels)


def products(encoder: Encoder, rows: int) -> list[tuple[int, int, int]]:
    """The shapes (rows, in, out) of a layer's products, on which a GPU's matrix rate is measured."""
    hidden, wide = encoder.hidden, encoder.intermediate
    return [(rows, hidden, 3 * hidden), (rows, hidden, hidden), (rows, hidden, wide), (rows, wide, hidden)]


def _product(rows: int, width: int, out: int) -> Kernel:
    moved = _BYTES * (rows * width + width * out + rows * out)
    return Kernel(float(_PER_MULTIPLY_ADD * rows * width * out), float(moved))
