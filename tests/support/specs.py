"""Descriptions of models for engines under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.models.manifest import graph_inputs, graph_outputs
from serving.records import ModelSpec

if TYPE_CHECKING:
    from serving.models.manifest import Task


def model_spec(
    name: str = "model", *, size: int = 8, task: Task = "embed", segments: bool = True, **changes: Any
) -> ModelSpec:
    """An embedding model of `size` components, or a model of another task; `changes` go to `ModelSpec`."""
    fields: dict[str, Any] = {
        "path": "",
        "sha256": "",
        "batch_invariant": True,
        "vocab_size": 1000,
        "max_length": 32,
        "special_ids": {},
        "inputs": tuple(tensor.name for tensor in graph_inputs(task, segments=segments)),
        "outputs": graph_outputs(task, hidden_size=size, labels=size, candidates=size),
    }
    return ModelSpec(name=name, **{**fields, **changes})
