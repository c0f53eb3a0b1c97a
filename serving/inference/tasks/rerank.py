"""The task `rerank`: how well each text answers a query, by a cross-encoder that reads both together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.inference.tasks import windows
from serving.inference.tasks.base import Task, pairs_of, sigmoid
from serving.records import EncodedText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.inference.tokenizer import TextTokenizer
    from serving.models.manifest import Activation
    from serving.records import RerankOptions, Row, TextInput, Truncate


def encode(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], options: RerankOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    as_tokens = all(isinstance(value, EncodedText) for value in inputs)
    return windows.encode(tokenizer, inputs if as_tokens else pairs_of(inputs), options, truncate=truncate)


def finish(
    rows: Sequence[Row],
    options: RerankOptions,
    activation: Activation = "sigmoid",
    texts: Sequence[EncodedText] = (),
) -> list[float]:
    """A score for each pair, in their order, from the `logits`, float32 [1], of each of the `texts`."""
    logits = np.stack([row[0][0] for row in rows]).astype(np.float64)
    raw = activation == "identity" if options.raw_scores is None else options.raw_scores
    scores: list[float] = windows.pooled(logits if raw else sigmoid(logits), texts, options).tolist()
    return scores


TASK = Task(
    "rerank",
    lambda work: finish(work.rows, work.options, work.manifest.activation, work.texts),
    windows.check,
    windows.sizes_bytes,
    encode=encode,
    windows=windows.asked,
)
