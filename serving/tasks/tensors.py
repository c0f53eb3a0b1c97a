"""Token ids in, the graph's own outputs out: available for every model, whatever its task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertserve.serving.records import POSITIONS, Row
from bertserve.serving.tasks.base import TaskOptions, TaskRoute

if TYPE_CHECKING:
    from bertserve.serving.records import EncodedText
    from bertserve.serving.tasks.base import Facts


class TensorOptions(TaskOptions[Sequence[Row]], frozen=True):
    """Options whose answer is each input's row of every output of the model's graph."""


def finish(texts: Sequence[EncodedText], rows: Sequence[Row], manifest: Facts) -> list[Row]:
    """The rows without padding.

    A row of an output per token or per mask has the padded length of its batch.
    """
    ragged = [spec.shape[1:2] == (-1,) for spec in manifest.outputs]
    if not any(ragged):
        return list(rows)
    masked = any(spec.name == POSITIONS for spec in manifest.inputs)
    mask = manifest.special_ids.get("mask", -1)
    sizes = [text.ids.count(mask) if masked else len(text.ids) for text in texts]
    return [
        tuple(array[:size] if cut else array for array, cut in zip(row, ragged, strict=True))
        for row, size in zip(rows, sizes, strict=True)
    ]


WAY: TaskRoute[TensorOptions, Sequence[Row]] = TaskRoute(
    TensorOptions, None, lambda work: finish(work.texts, work.rows, work.manifest)
)
