"""How an engine process loads a model that may be in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.engine.cpu import ort
from serving.engine.parts.pipeline import Pipeline
from serving.engine.parts.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.cpu.backend import LaneModel
    from serving.engine.specs import ModelSpec


def load(model: ModelSpec, threads: Sequence[int], nice: int = 0) -> Sequence[LaneModel]:
    """As `ort.load`; a model in parts is loaded once for all lanes, with processes for its parts."""
    if model.split_by is None:
        return ort.load(model, threads)
    if model.split_by == "tensors":
        return [Ranks(model, threads[0], nice)]
    return Pipeline(model, threads[0], len(threads), nice).lanes
