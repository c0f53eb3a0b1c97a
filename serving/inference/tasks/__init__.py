"""One file a task: what goes into the graph and what its outputs mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.inference.tasks import (
    answer,
    chunks,
    classify,
    embed,
    embed_tokens,
    fill_mask,
    rerank,
    tag,
    tensors,
    zero_shot,
)
from serving.records import (
    AnswerOptions,
    ChunkOptions,
    ClassifyOptions,
    EmbedOptions,
    EmbedTokensOptions,
    FillMaskOptions,
    LateChunkOptions,
    RerankOptions,
    TagOptions,
    TensorOptions,
    ZeroShotOptions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.inference.tasks.base import Task
    from serving.records import TaskOptions

TASKS: Mapping[type[TaskOptions[Any]], Task[Any, Any]] = {
    EmbedOptions: embed.TASK,
    EmbedTokensOptions: embed_tokens.TASK,
    ChunkOptions: chunks.TASK,
    LateChunkOptions: chunks.LATE,
    ClassifyOptions: classify.TASK,
    ZeroShotOptions: zero_shot.TASK,
    RerankOptions: rerank.TASK,
    AnswerOptions: answer.TASK,
    TagOptions: tag.TASK,
    FillMaskOptions: fill_mask.TASK,
    TensorOptions: tensors.TASK,
}
"""The task that a request's options ask for."""
