"""The task `rerank`: how well each text answers a query, scored by a cross-encoder that reads both together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bertserve.serving.records import EncodedText
from bertserve.serving.tasks import replies, windows
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Task,
    TaskOptions,
    TaskRoute,
    floats,
    pairs_of,
    sigmoid,
)
from bertserve.serving.tasks.parts import present
from bertserve.serving.tasks.windows import Windows  # noqa: TC001  msgspec reads the annotations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import Row, TextInput, Truncate
    from bertserve.serving.tasks.base import Tokenizer
    from bertserve.serving.tasks.parts import Activation


class RerankOptions(TaskOptions[list[float]], frozen=True):
    """Options whose answer is one score for each pair of query and text.

    Attributes:
        raw_scores: Return the logit instead of its sigmoid; None means the model's default.
        windows: None truncates pairs that are too long. Otherwise each window repeats the query.
    """

    raw_scores: bool | None = None
    windows: Windows | None = None


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: RerankOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    as_tokens = all(isinstance(value, EncodedText) for value in inputs)
    return windows.encode(tokenizer, inputs if as_tokens else pairs_of(inputs), options, truncate=truncate)


def finish(
    rows: Sequence[Row],
    options: RerankOptions,
    activation: Activation = "sigmoid",
    texts: Sequence[EncodedText] = (),
) -> list[float]:
    """One score for each pair, in order, from the `logits`, float32 [1], of each of the `texts`."""
    logits = np.stack([row[0][0] for row in rows]).astype(np.float64)
    raw = activation == "identity" if options.raw_scores is None else options.raw_scores
    scores: list[float] = windows.pool(logits if raw else sigmoid(logits), texts, options).tolist()
    return scores


_WAY: TaskRoute[RerankOptions, list[float]] = TaskRoute(
    RerankOptions,
    "rerank",
    lambda work: finish(work.rows, work.options, present(work.manifest.activation), work.texts),
    windows.check,
    windows.sizes_bytes,
    encode=encode,
    windows=windows.asked,
)

TASK = Task(
    way=_WAY,
    graph=(GraphOutput("logits", (1,)),),
    part="activation",
    head="ForSequenceClassification",
    texts=(2,),
    path="/rerank",
    example={"query": "What is a T4?", "texts": ["A teapot.", "A graphics card."]},
    parameters=False,
    outputs=(Output("score", "FP32"),),  # between 0 and 1
    write=lambda answer, _: (floats(answer),),
    recorded=lambda _, __, count: [*[0.0214] * (count - 1), 0.9637],  # the last text is the relevant one
    column=lambda _, __: ("score", float),
    load=LoadFormat(
        fields=("query", "texts"),
        item=lambda text: {"query": "What is this about?", "texts": [text]},
        body=lambda item: {"query": item["query"], "texts": item["texts"]},
        tensors=lambda item: {"text": [item["query"]] * len(item["texts"]), "text_pair": item["texts"]},
        inputs=lambda item: len(item["texts"]),
        answers=lambda found: replies.ordered([(one["index"], one["score"]) for one in found]),
        row=np.squeeze,
        check=replies.number,
    ),
)
