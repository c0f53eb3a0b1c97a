"""The task `embed_tokens`: a vector for each token of a text, as the model's last layer has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.inference.tasks.base import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from serving.inference.tasks.base import Work
    from serving.records import EmbedTokensOptions


def _finish(work: Work[EmbedTokensOptions]) -> list[NDArray[np.float32]]:
    """The rows of the graph's `token_embeddings` without what padding added."""
    return [
        np.ascontiguousarray(row[0][: len(text.ids)], np.float32)
        for text, row in zip(work.texts, work.rows, strict=True)
    ]


TASK = Task("embed_tokens", _finish, token_outputs=True)
