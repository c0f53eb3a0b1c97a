"""Vector formats: numbers, small integers, packed bits or base64."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

VectorType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
"""The vector formats, as named in Cohere's and Jina's APIs."""

_SCALE = 127
_UNSIGNED = 128
_SMALLEST_NORM = 1e-12


def _int8(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _SMALLEST_NORM)
    numbers: NDArray[np.int8] = np.rint(vectors / lengths * _SCALE).astype(np.int8)
    return numbers


def _ubinary(vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.packbits(vectors > 0, axis=1)


_FORMS: Mapping[VectorType, Callable[[NDArray[np.float32]], Any]] = {
    "float": lambda vectors: vectors,
    "int8": _int8,
    "uint8": lambda vectors: (_int8(vectors).astype(np.int16) + _UNSIGNED).astype(np.uint8),
    "binary": lambda vectors: (_ubinary(vectors).astype(np.int16) - _UNSIGNED).astype(np.int8),
    "ubinary": _ubinary,
    "base64": lambda vectors: [base64.b64encode(row.tobytes()).decode() for row in vectors.astype("<f4", copy=False)],
}


def in_form(vectors: NDArray[np.float32], form: VectorType) -> Any:  # noqa: ANN401  rows that orjson writes
    """Converts vectors, float32 [texts, dimensions], to a format.

    - `int8`: round(127 x / |x|), which needs no calibrated ranges. `uint8`: 128 more.
    - `ubinary`: bit 1 where x > 0, eight to a byte, the first dimension in the highest bit, zero padding at the end.
      `binary`: 128 less, as int8. These are `quantize_embeddings` of Sentence Transformers.
    - `base64`: the float32 in little-endian order.
    """
    return _FORMS[form](vectors)
