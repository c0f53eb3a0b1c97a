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
    from serving.records import EmbedOptions, Row

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
    pooled = rows[0][0][None] if len(rows) == 1 else np.stack([row[0] for row in rows])
    vectors = pooled.astype(np.float32, copy=False)
    if options.dimensions is not None:
        # What is cut must be whole again in memory: encoders write rows as they lie.
        vectors = np.ascontiguousarray(vectors[:, : options.dimensions])
    if not (normalize if options.normalize is None else options.normalize):
        return vectors
    # Row by row: for the one row of most requests, NumPy's way over a whole array takes three times as long.
    lengths = [max(math.sqrt(row.dot(row)), _SMALLEST_NORM) for row in vectors]
    scaled: NDArray[np.float32] = vectors / (np.array(lengths, np.float32)[:, None] if len(rows) > 1 else lengths[0])
    return scaled


TASK: Task[EmbedOptions, NDArray[np.float32]] = Task(
    "embed", lambda work: finish(work.rows, work.options, normalize=work.manifest.normalize), check
)
