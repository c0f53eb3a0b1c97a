"""Descriptions of models for engines under test."""

from __future__ import annotations

from typing import Any

from bertserve.serving.engine.specs import ModelSpec
from bertserve.serving.tasks import TASKS


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
