"""The task `rerank`: how well each text answers a query, by a cross-encoder that reads both together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.inference.tasks.base import Task, pairs_of, sigmoid
from serving.records import EncodedText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.inference.tokenizer import TextTokenizer
    from serving.models.manifest import Activation
    from serving.records import RerankOptions, Row, TextInput, Truncate


def encode(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], _: RerankOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    as_tokens = all(isinstance(value, EncodedText) for value in inputs)
    return tokenizer.encode(inputs if as_tokens else pairs_of(inputs), truncate=truncate)


def finish(rows: Sequence[Row], options: RerankOptions, activation: Activation = "sigmoid") -> list[float]:
    """A score for each pair, in their order, from its `logits`, float32 [1]."""
    logits = np.stack([row[0][0] for row in rows]).astype(np.float64)
    raw = activation == "identity" if options.raw_scores is None else options.raw_scores
    scores: list[float] = (logits if raw else sigmoid(logits)).tolist()
    return scores


TASK = Task("rerank", lambda work: finish(work.rows, work.options, work.manifest.activation), encode=encode)
