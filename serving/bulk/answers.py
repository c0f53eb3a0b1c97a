"""Answers as Arrow columns: the name and type of each task's column."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pyarrow as pa

from bertserve.serving.tasks.base import Vector
from bertserve.serving.tasks.embed_sparse import SparseVector

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.tasks.base import Task, TaskOptions

_SCALARS = {str: pa.string(), float: pa.float64(), int: pa.int64()}


class AnswerColumn:
    """The column of one task's answers.

    Attributes:
        name: `embedding`, `labels` and so on.
        type: The type of its values.
        nested: Whether an answer is a list.
        width: Size of a vector; None if answers are not vectors.
    """

    def __init__(self, task: Task[Any, Any], options: TaskOptions[Any], manifest: Manifest) -> None:
        self.name, kind = task.column(options, manifest)
        self.nested = isinstance(kind, list)
        inner = kind[0] if isinstance(kind, list) else kind
        self.width: int | None = inner.size if isinstance(inner, Vector) else None
        self.type = _type(kind)

    def array(self, answers: Sequence[Any]) -> pa.Array:
        """Answers as an Arrow array; None becomes null."""
        missing = pa.array([answer is None for answer in answers], pa.bool_())
        if self.width is None:
            return pa.array([None if answer is None else _plain(answer) for answer in answers], self.type)
        if not self.nested:
            return self._vectors([_zeros(self.width) if answer is None else answer for answer in answers], missing)
        tokens = [np.empty((0, self.width), np.float32) if answer is None else answer for answer in answers]
        offsets = pa.array(np.cumsum([0, *map(len, tokens)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, self._vectors(tokens), type=self.type, mask=missing)

    def _vectors(self, rows: Sequence[Any], missing: pa.Array | None = None) -> pa.Array:
        flat = np.concatenate([row.reshape(-1) for row in rows]) if rows else np.empty(0, np.float32)
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, pa.float32()), self.width, mask=missing)


def _plain(answer: Any) -> Any:  # noqa: ANN401  any task's answer
    """An answer of lists, dicts, strings and numbers; vectors stay NumPy arrays."""
    if isinstance(answer, SparseVector):
        return msgspec.structs.asdict(answer)
    return answer if isinstance(answer, np.ndarray) else msgspec.to_builtins(answer)


def _zeros(width: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(width, np.float32)


def _type(kind: Any) -> pa.DataType:  # noqa: ANN401  see `Task.column`
    if isinstance(kind, list):
        return pa.list_(_type(kind[0]))
    if isinstance(kind, Vector):
        return pa.list_(pa.float32(), kind.size)
    return _SCALARS[kind] if kind in _SCALARS else _struct(kind)


def _struct(record: type[msgspec.Struct]) -> pa.DataType:
    """The Arrow type of a record of strings, numbers, and lists of them."""
    hints = get_type_hints(record)
    return pa.struct([(name, _field(_bare(hints[name]))) for name in record.__struct_fields__])


def _field(hint: Any) -> pa.DataType:  # noqa: ANN401  a type
    if get_origin(hint) is np.ndarray:
        (number,) = get_args(get_args(hint)[1])
        return pa.list_(pa.from_numpy_dtype(number))
    return pa.list_(_SCALARS[get_args(hint)[0]]) if get_origin(hint) is list else _SCALARS[hint]


def _bare(hint: Any) -> Any:  # noqa: ANN401  a type
    """A type without `None`."""
    if get_origin(hint) is types.UnionType:
        return next(part for part in get_args(hint) if part is not type(None))
    return hint
