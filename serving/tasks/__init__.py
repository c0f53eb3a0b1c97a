"""All tasks. One module per task defines everything about it.

To serve a task of your own, call `add` from its module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.serving.tasks import (
    answer,
    chunks,
    classify,
    combined,
    embed,
    embed_sparse,
    embed_tokens,
    fill_mask,
    hybrid,
    maxsim,
    rerank,
    tag,
    tensors,
    zero_shot,
)

if TYPE_CHECKING:
    from bertserve.serving.tasks.base import Task, TaskOptions, TaskRoute

TASKS: dict[str, Task[Any, Any]] = {}
"""All tasks by name."""

TASK_ROUTES: dict[type[TaskOptions[Any]], TaskRoute[Any, Any]] = {
    way.options: way
    for way in (chunks.WAY, chunks.LATE, combined.WAY, hybrid.WAY, maxsim.WAY, zero_shot.WAY, tensors.WAY)
}
"""How a request is answered, by the class of its options."""


def add(task: Task[Any, Any]) -> None:
    TASKS[task.name] = task
    TASK_ROUTES[task.way.options] = task.way


for _module in (embed, embed_tokens, classify, rerank, answer, tag, fill_mask, embed_sparse):
    add(_module.TASK)
