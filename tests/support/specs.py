"""Descriptions of models for engines under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertserve.serving.engine.specs import ModelSpec
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.parts import Embedding, Labels, Sparse

if TYPE_CHECKING:
    from collections.abc import Sequence


def parts(task: str, labels: Sequence[str] = ("calm", "glad"), **embedding: Any) -> dict[str, Any]:
    """The parts of the manifest of a task, present or not."""
    made = {
        "embedding": Embedding(("mean",), **embedding),
        "labels": Labels(tuple(labels)),
        "sparse": Sparse(),
        "activation": "sigmoid",
    }
    return {part: each if part == TASKS[task].part else None for part, each in made.items()}


def model_spec(
    name: str = "model", *, size: int = 8, task: str = "embed", segments: bool = True, **changes: Any
) -> ModelSpec:
    """An embedding model of `size` components, or a model of another task; `changes` go to `ModelSpec`."""
    fields: dict[str, Any] = {
        "path": "",
        "sha256": "",
        "batch_invariant": True,
        "vocab_size": 1000,
        "max_length": 32,
        "special_ids": {},
        "inputs": tuple(tensor.name for tensor in TASKS[task].graph_inputs(segments=segments)),
        "outputs": TASKS[task].graph_outputs(hidden_size=size, labels=size, candidates=size, active=size),
    }
    return ModelSpec(name=name, **{**fields, **changes})
