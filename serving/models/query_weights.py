"""Weights of queries that need no engine: `query_weights.npy` of a bundle, float32 [vocab_size]."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bertserve.serving.errors import BundleError
from bertserve.serving.models.manifest import QUERY_WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def write(path: Path, weights: NDArray[np.float32]) -> None:
    """Writes the file into the directory of a bundle."""
    np.save(path / QUERY_WEIGHTS, weights, allow_pickle=False)


def read(path: Path, vocab_size: int) -> NDArray[np.float32]:
    """Reads the file of a verified bundle.

    Raises:
        BundleError: It does not hold one finite float32 for each token.
    """
    try:
        # Mapped: a header that promises more than the file holds reserves no memory.
        weights = np.load(path / QUERY_WEIGHTS, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, OverflowError, EOFError) as error:
        raise BundleError(f"bundle {path}: {QUERY_WEIGHTS} is not an array of NumPy") from error
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32 or weights.shape != (vocab_size,):
        raise BundleError(f"bundle {path}: {QUERY_WEIGHTS} must hold float32 [{vocab_size}]")
    if not np.isfinite(weights).all():
        raise BundleError(f"bundle {path}: {QUERY_WEIGHTS} has numbers that are not finite")
    return np.array(weights)
