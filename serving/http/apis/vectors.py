"""Vector formats: numbers, small integers, packed bits or base64; and those of sparse vectors."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import orjson

from bertserve.serving.tasks.base import go_on, with_checks
from bertserve.serving.tasks.embed_sparse import NamedSparseVector

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.tasks.base import Check
    from bertserve.serving.tasks.combined import Embedded
    from bertserve.serving.tasks.embed_sparse import SparseVector

VectorType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
"""The vector formats, as named in Cohere's and Jina's APIs."""

SparseFormat = Literal["list", "arrays", "tokens"]
"""The formats of sparse vectors: of text-embeddings-inference, of vector databases, and of search engines."""

_SCALE = 127
_UNSIGNED = 128
_SMALLEST_NORM = 1e-12
_NUMBERS_AT_ONCE = 8192
NUMBERS_OF_A_WEIGHT = 16
"""Numbers that take as long to encode as a weight of a sparse vector."""


def _int8(vectors: NDArray[np.float32]) -> NDArray[np.int8]:
    lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _SMALLEST_NORM)
    numbers: NDArray[np.int8] = np.rint(vectors / lengths * _SCALE).astype(np.int8)
    return numbers


def _ubinary(vectors: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.packbits(vectors > 0, axis=1)


_FORMS: Mapping[VectorType, Callable[[NDArray[np.float32]], Any]] = {
    "float": lambda vectors: vectors,
    "int8": _int8,
    "uint8": lambda vectors: (_int8(vectors).astype(np.int16) + _UNSIGNED).astype(np.uint8),
    "binary": lambda vectors: (_ubinary(vectors).astype(np.int16) - _UNSIGNED).astype(np.int8),
    "ubinary": _ubinary,
    "base64": lambda vectors: [base64.b64encode(row.tobytes()).decode() for row in vectors.astype("<f4", copy=False)],
}


def in_form(vectors: NDArray[np.float32], form: VectorType) -> Any:  # noqa: ANN401  rows that orjson writes
    """Converts vectors, float32 [texts, dimensions], to a format.

    - `int8`: round(127 x / |x|), which needs no calibrated ranges. `uint8`: 128 more.
    - `ubinary`: bit 1 where x > 0, eight to a byte, the first dimension in the highest bit, zero padding at the end.
      `binary`: 128 less, as int8. These are `quantize_embeddings` of Sentence Transformers.
    - `base64`: the float32 in little-endian order.
    """
    return _FORMS[form](vectors)


def rows_json(rows: Sequence[Any] | NDArray[Any], check: Check = go_on) -> bytes:
    """Vectors, numbers or texts as JSON, encoded in pieces, because encoding holds the GIL."""
    if len(rows) <= 1:
        return orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)
    step = max(1, _NUMBERS_AT_ONCE // max(1, np.size(rows[0])))
    pieces = [rows[at : at + step] for at in range(0, len(rows), step)]
    encoded = [orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for piece in with_checks(pieces, check, 1)]
    return b"[%b]" % b",".join(encoded)


def embedded_json(one: Embedded, check: Check) -> bytes:
    """Several embeddings of a text as JSON: `{"dense": [...], "sparse": [...], "tokens": [[...]]}`."""
    check()
    parts = []
    if one.dense is not None:
        parts.append(b'"dense":%b' % orjson.dumps(one.dense, option=orjson.OPT_SERIALIZE_NUMPY))
    if one.sparse is not None:
        parts.append(b'"sparse":%b' % sparse_json(one.sparse, "list"))
    if one.tokens is not None:
        parts.append(b'"tokens":%b' % rows_json(one.tokens, check))
    return b"{%b}" % b",".join(parts)


def size_of(one: Embedded) -> int:
    """How long several embeddings take to encode, in numbers of a vector."""
    sizes = [part.size for part in (one.dense, one.tokens) if part is not None]
    return sum(sizes) + (0 if one.sparse is None else NUMBERS_OF_A_WEIGHT * len(one.sparse))


def sparse_json(vector: SparseVector, form: SparseFormat) -> bytes:
    """A sparse vector as JSON.

    - `list`: `[{"index": 2549, "value": 1.87}]`, with `"token"` if the vector has names
    - `arrays`: `{"indices": [2549], "values": [1.87]}`, with `"tokens"` if the vector has names
    - `tokens`: `{"card": 1.87}`
    """
    if form == "arrays":
        return orjson.dumps(msgspec.structs.asdict(vector), option=orjson.OPT_SERIALIZE_NUMPY)
    indices, values = _elements(vector.indices), _elements(vector.values)
    names = list(map(orjson.dumps, vector.tokens)) if isinstance(vector, NamedSparseVector) else []
    if form == "tokens":
        return b"{%b}" % _fill(b"%b:%b", names, values)
    if names:
        return b"[%b]" % _fill(b'{"index":%b,"value":%b,"token":%b}', indices, values, names)
    return b"[%b]" % _fill(b'{"index":%b,"value":%b}', indices, values)


def _fill(template: bytes, *columns: Sequence[bytes]) -> bytes:
    """The template for each row of the columns, separated by commas; formatted at once, which is faster."""
    cells = [b""] * (len(columns) * len(columns[0]))
    for place, column in enumerate(columns):
        cells[place :: len(columns)] = column
    return b",".join([template] * len(columns[0])) % tuple(cells)


def _elements(numbers: NDArray[Any]) -> list[bytes]:
    """Each number as JSON, with as many digits as its type needs."""
    joined = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    return joined.split(b",") if joined else []
