"""The task `embed_tokens`: a vector for each token of a text, from the model's last layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from serving.tasks import replies
from serving.tasks.base import GraphOutput, LoadFormat, Output, Task, TaskOptions, Vector, Way, padded
from serving.tasks.embed import VECTOR

if TYPE_CHECKING:
    from typing import Any

    from serving.tasks.base import Work


class EmbedTokensOptions(TaskOptions[list[NDArray[np.float32]]], frozen=True):
    """Options whose answer is, for each input, float32 [tokens, hidden size], with special tokens, not normalized."""


def _finish(work: Work[EmbedTokensOptions]) -> list[NDArray[np.float32]]:
    """The rows of the graph's `token_embeddings` without padding."""
    return [
        np.ascontiguousarray(row[0][: len(text.ids)], np.float32)
        for text, row in zip(work.texts, work.rows, strict=True)
    ]


def _row(vectors: NDArray[Any], count: int) -> NDArray[Any]:
    if not 0 < count <= len(vectors):
        raise replies.WrongError("another number of tokens than of vectors")
    return vectors[:count]


TASK = Task(
    way=Way(EmbedTokensOptions, "embed_tokens", _finish, token_outputs=True),
    graph=(GraphOutput("token_embeddings", (-1, "hidden_size")),),  # includes special tokens
    facts=frozenset({"default_prompt"}),
    path="/embed_all",
    example={"inputs": "What is a T4?"},
    parameters=False,
    outputs=(Output("embeddings", "FP32", lambda facts: (-1, facts.hidden_size)), Output("tokens", "INT64")),
    write=lambda answer, _: (padded(answer), np.array([len(row) for row in answer], np.int64)),
    recorded=lambda _, __, count: [np.stack([VECTOR, VECTOR[::-1]])] * count,
    column=lambda _, facts: ("embeddings", [Vector(facts.vector_size)]),
    summary=lambda facts: f"{facts.hidden_size} components for each token",
    load=LoadFormat(answers=replies.listed, row=_row, check=lambda vectors: replies.finite(vectors, 2).shape[1]),
)
