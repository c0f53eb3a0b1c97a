"""Answers as columns of Arrow: the name and type of each task's column."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa

from serving.records import AnswerSpan, Entity, FilledMask, LabelScore, TaggedToken, TagOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.models.manifest import Manifest
    from serving.models.manifest import Task as TaskName
    from serving.records import TaskOptions

_SCALARS = {str: pa.string(), float: pa.float64(), int: pa.int64()}


class AnswerColumn:
    """The column of one task's answers.

    Attributes:
        name: `embedding`, `labels` or whatever the task answers.
        type: Of its values.
        width: Dimensions of a vector; None where no vectors are answered.
    """

    def __init__(self, task: TaskName, options: TaskOptions[Any], manifest: Manifest) -> None:
        self.width: int | None = None
        self._nested = task == "embed_tokens"
        if task in {"embed", "embed_tokens"}:
            self.width = getattr(options, "dimensions", None) or manifest.vector_size
            vector = pa.list_(pa.float32(), self.width)
            self.name, self.type = ("embeddings", pa.list_(vector)) if self._nested else ("embedding", vector)
        elif isinstance(options, TagOptions):
            self.name, self.type = "entities", pa.list_(_struct(_tagged(options)))
        else:
            self.name, self.type = {
                "classify": ("labels", pa.list_(_struct(LabelScore))),
                "rerank": ("score", pa.float64()),
                "answer": ("answers", pa.list_(_struct(AnswerSpan))),
                "fill_mask": ("masks", pa.list_(pa.list_(_struct(FilledMask)))),
            }[task]

    def array(self, answers: Sequence[Any]) -> pa.Array:
        """Answers as Arrow holds them; None becomes null."""
        missing = pa.array([answer is None for answer in answers], pa.bool_())
        if self.width is None:
            return pa.array([None if answer is None else plain(answer) for answer in answers], self.type)
        if not self._nested:
            return self._vectors([_zeros(self.width) if answer is None else answer for answer in answers], missing)
        tokens = [np.empty((0, self.width), np.float32) if answer is None else answer for answer in answers]
        offsets = pa.array(np.cumsum([0, *map(len, tokens)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, self._vectors(tokens), type=self.type, mask=missing)

    def _vectors(self, rows: Sequence[Any], missing: pa.Array | None = None) -> pa.Array:
        flat = np.concatenate([row.reshape(-1) for row in rows]) if rows else np.empty(0, np.float32)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), self.width, mask=missing)


def plain(answer: Any) -> Any:  # noqa: ANN401  any task's answer
    """An answer of lists, dicts, strings and numbers alone; vectors stay NumPy's."""
    return answer if isinstance(answer, np.ndarray) else msgspec.to_builtins(answer)


def _zeros(width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(width, np.float32)


def _tagged(options: TagOptions) -> type[msgspec.Struct]:
    return TaggedToken if options.aggregation == "none" else Entity


def _struct(record: type[msgspec.Struct]) -> pa.DataType:
    """The Arrow type of a record of strings and numbers."""
    hints = get_type_hints(record)
    return pa.struct([(name, _SCALARS[_bare(hints[name])]) for name in record.__struct_fields__])


def _bare(hint: Any) -> Any:  # noqa: ANN401  a type
    """A type without `None`."""
    if get_origin(hint) is types.UnionType:
        return next(part for part in get_args(hint) if part is not type(None))
    return hint
