"""The task `embed`: one vector per text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bertserve.serving.errors import InvalidRequest, quote
from bertserve.serving.tasks import replies
from bertserve.serving.tasks.base import GraphOutput, LoadFormat, Output, Task, TaskOptions, TaskRoute, Vector
from bertserve.serving.tasks.parts import present

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import Array, Row
    from bertserve.serving.tasks.base import Facts


class EmbedOptions(TaskOptions[NDArray[np.float32]], frozen=True):
    """Options whose answer is float32 [inputs, dimensions].

    Attributes:
        normalize: Scale each vector to length 1; None means the model's default.
        dimensions: Keep only the first components, before normalization; None keeps all.
    """

    normalize: bool | None = None
    dimensions: int | None = None


_SMALLEST_NORM = 1e-12
"""Lower bound of the norm by which a vector is divided, as in PyTorch's `normalize`."""


def check(options: EmbedOptions, manifest: Facts) -> None:
    if options.dimensions is None:
        return
    size = _size(manifest)
    matryoshka = manifest.embedding.matryoshka if manifest.embedding else ()
    if options.dimensions == size or options.dimensions in matryoshka:
        return
    if matryoshka:
        allowed = f"one of {', '.join(map(str, sorted({*matryoshka, size})))}"
    elif 1 <= options.dimensions <= size:
        return
    else:
        allowed = f"1 to {size}"
    said = f"`dimensions` is {quote(options.dimensions)}; this model supports {allowed}"
    raise InvalidRequest(said, param="dimensions")


def _size(manifest: Facts) -> int:
    return manifest.outputs[0].shape[-1]


def numbers(options: EmbedOptions, manifest: Facts) -> int:
    return options.dimensions or _size(manifest)


def finish(rows: Sequence[Row], options: EmbedOptions, *, normalize: bool) -> NDArray[np.float32]:
    """The answer from each text's `pooled`, float32 [components].

    Args:
        rows: The outputs of the graph for each text.
        options: The options of the request.
        normalize: The model's default.

    Returns:
        float32 [texts, dimensions], truncated before normalization.
    """
    if len(rows) == 1:
        return _finish(rows[0][0], options, normalize=normalize)[None]
    return np.stack([_finish(row[0], options, normalize=normalize) for row in rows])


def _finish(pooled: Array, options: EmbedOptions, *, normalize: bool) -> NDArray[np.float32]:
    """One vector. A single row takes three times as long with NumPy operations on a whole array."""
    vector = pooled.astype(np.float32, copy=False)
    if options.dimensions is not None:
        vector = vector[: options.dimensions]
    if not (normalize if options.normalize is None else options.normalize):
        return vector
    scaled: NDArray[np.float32] = vector / max(math.sqrt(vector.dot(vector)), _SMALLEST_NORM)
    return scaled


VECTOR = np.array([0.3713, -0.2118, 0.5302, 0.1446, -0.4409, 0.2877, -0.3365, 0.3641], np.float32)
"""A sample vector for examples. A model's own would fill the page."""


def _summary(facts: Facts) -> str:
    embedding = present(facts.embedding)
    length = ", of length 1" if embedding.normalize else ""
    return f"{'+'.join(embedding.pooling)} pooling, {_size(facts)} components{length}"


_WAY: TaskRoute[EmbedOptions, NDArray[np.float32]] = TaskRoute(
    EmbedOptions,
    "embed",
    lambda work: finish(work.rows, work.options, normalize=present(work.manifest.embedding).normalize),
    check,
    text_numbers=numbers,
)

TASK = Task(
    way=_WAY,
    graph=(GraphOutput("pooled", ("hidden_size",)),),  # before a final normalization
    part="embedding",
    path="/embed",
    example={"inputs": "What is a T4?"},
    outputs=(Output("embedding", "FP32", lambda facts: (_size(facts),)),),
    write=lambda answer, _: (answer,),
    recorded=lambda _, __, count: np.stack([VECTOR] * count),
    column=lambda options, facts: ("embedding", Vector(numbers(options, facts))),
    summary=_summary,
    load=LoadFormat(
        answers=replies.listed, row=lambda vector: vector, check=lambda vector: len(replies.finite(vector, 1))
    ),
)
