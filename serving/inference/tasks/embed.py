"""The task `embed`: one vector a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from serving.errors import InvalidRequest
from serving.inference.tasks.base import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from serving.models.manifest import Manifest
    from serving.records import Array, EmbedOptions, Row

_SMALLEST_NORM = 1e-12
"""A vector shorter than this stays as it is; the bound of PyTorch's `normalize`."""


def check(options: EmbedOptions, manifest: Manifest) -> None:
    if options.dimensions is None or options.dimensions in manifest.matryoshka:
        return
    size = manifest.vector_size
    if options.dimensions == size:
        return
    if manifest.matryoshka:
        sizes = ", ".join(map(str, sorted({*manifest.matryoshka, size})))
        raise InvalidRequest(f"{options.dimensions} dimensions are asked for; this model has one of {sizes}")
    if not 1 <= options.dimensions <= size:
        raise InvalidRequest(f"{options.dimensions} dimensions are asked for; this model has between 1 and {size}")


def finish(rows: Sequence[Row], options: EmbedOptions, *, normalize: bool) -> NDArray[np.float32]:
    """The answer from each text's `pooled`, float32 [vector_size].

    Args:
        rows: The graph's answers.
        options: What the request asks for.
        normalize: What the model does where the request does not say.

    Returns:
        float32 [texts, dimensions], cut before they are scaled.
    """
    if len(rows) == 1:
        return _finished(rows[0][0], options, normalize=normalize)[None]
    return np.stack([_finished(row[0], options, normalize=normalize) for row in rows])


def _finished(pooled: Array, options: EmbedOptions, *, normalize: bool) -> NDArray[np.float32]:
    """One vector; row by row, as NumPy's way over a whole array takes three times as long for a single one."""
    vector = pooled.astype(np.float32, copy=False)
    if options.dimensions is not None:
        vector = vector[: options.dimensions]
    if not (normalize if options.normalize is None else options.normalize):
        return vector
    scaled: NDArray[np.float32] = vector / max(math.sqrt(vector.dot(vector)), _SMALLEST_NORM)
    return scaled


TASK: Task[EmbedOptions, NDArray[np.float32]] = Task(
    "embed", lambda work: finish(work.rows, work.options, normalize=work.manifest.normalize), check
)
