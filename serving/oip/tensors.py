"""Tensors of the Open Inference Protocol v2: decodes those of requests, and encodes those of replies.

In a blob, a BYTES element is a little-endian u32 length and that many bytes (Triton's binary data extension).
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence  # noqa: TC003  msgspec reads the annotations
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest, MalformedRequest, too_many_inputs
from bertserve.serving.records import IDS, MASK, TYPES, EncodedText

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from bertserve.serving.records import TextInput

TEXT, PAIR = "text", "text_pair"
LITELLM_TEXT = "input_text"
"""LiteLLM's name for the texts, whatever the model's metadata say."""

BYTES, FP32, INT32, INT64 = "BYTES", "FP32", "INT32", "INT64"

_LENGTH = struct.Struct("<I")
_LARGEST_DIMENSION = 2**31
_NUMBERS = {INT32: "<i4", INT64: "<i8", FP32: "<f4"}
_MATRIX = 2
_MAX_NUMBERS = 1 << 20
"""Maximum numbers that are sent one by one. Checking them takes tens of milliseconds."""


class Tensor(msgspec.Struct):
    """A tensor of a request.

    Attributes:
        data: The elements in row-major order, flat or row by row; None if there is a `blob`.
        blob: The elements as bytes; None if there is `data`.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any] | None = None
    blob: memoryview | None = None


class Output(msgspec.Struct):
    """A tensor of a reply.

    Attributes:
        values: Numbers in the tensor's shape, or texts in row-major order.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    values: NDArray[Any] | Sequence[str]

    def flat(self) -> NDArray[Any] | Sequence[str]:
        """The elements in row-major order."""
        return np.ravel(self.values) if isinstance(self.values, np.ndarray) else self.values

    def blob(self) -> bytes:
        """The elements as bytes."""
        if isinstance(self.values, np.ndarray):
            return self.values.astype(_NUMBERS[self.datatype], copy=False).tobytes()
        encoded = [value.encode() for value in self.values]
        return b"".join([part for value in encoded for part in (_LENGTH.pack(len(value)), value)])


def inputs_of(tensors: Sequence[Tensor]) -> Sequence[TextInput]:
    """Decodes a request's tensors to texts, text pairs or tokens.

    Raises:
        InvalidRequest: They are none of these, or do not match each other.
        MalformedRequest: A text is not UTF-8.
    """
    if len(tensors) == 1 and tensors[0].name in {TEXT, LITELLM_TEXT}:
        return texts_of(tensors[0])
    named = {tensor.name: tensor for tensor in tensors}
    if len(named) != len(tensors):
        raise InvalidRequest("an input occurs twice")
    if named.keys() == {TEXT, PAIR}:
        first, second = texts_of(named[TEXT]), texts_of(named[PAIR])
        if len(first) != len(second):
            raise InvalidRequest(f"{TEXT!r} has {len(first)} elements, but {PAIR!r} has {len(second)}")
        return list(zip(first, second, strict=True))
    if IDS in named and named.keys() <= {IDS, MASK, TYPES}:
        return _tokens_of(named)
    raise InvalidRequest(
        f"unexpected inputs; the model takes {TEXT!r}, or {TEXT!r} and {PAIR!r}, or {IDS!r} with {MASK!r} and"
        f" {TYPES!r} optional"
    )


def raw_tensor(name: str, datatype: str, body: memoryview) -> Tensor:
    """The tensor in a raw request body: one text without its length, or one row of token ids.

    Raises:
        InvalidRequest: The body is not a whole number of ids.
        MalformedRequest: The text is not UTF-8.
    """
    if datatype == BYTES:
        return Tensor(name, datatype, [1], [decode_text(bytes(body), name)])
    size = np.dtype(_NUMBERS[datatype]).itemsize
    if not body or len(body) % size:
        raise InvalidRequest(f"input {name!r}: {len(body)} bytes are not a row of {datatype}, {size} bytes each")
    return Tensor(name, datatype, [1, len(body) // size], blob=body)


def check_sizes(tensors: Sequence[Tensor], max_inputs: int) -> None:
    """Rejects tensors with too many rows or dimensions, before anything iterates over them."""
    for index, tensor in enumerate(tensors):
        if len(tensor.shape) > _MATRIX:
            raise InvalidRequest(f"input {index} has {len(tensor.shape)} dimensions; the maximum is {_MATRIX}")
        if tensor.shape and tensor.shape[0] > max_inputs:
            raise too_many_inputs(tensor.shape[0], max_inputs)


def texts_of(tensor: Tensor) -> list[str]:
    """The elements of a BYTES tensor with shape [n] or [n, 1].

    Raises:
        InvalidRequest: The datatype or shape is another, or the data do not match it.
        MalformedRequest: An element is not UTF-8.
    """
    name = tensor.name
    if tensor.datatype != BYTES:
        raise InvalidRequest(f"input {name!r} must have the datatype {BYTES}")
    shape = list(tensor.shape)
    if shape[1:] not in ([], [1]) or not shape or not 0 <= shape[0] < _LARGEST_DIMENSION:
        raise InvalidRequest(f"unexpected shape for input {name!r}: expected [n] or [n, 1]")
    if tensor.blob is not None:
        return split_bytes(tensor.blob, shape[0], name)
    texts = list(_flat(tensor))
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"input {name!r} must contain texts")
    _check_count(name, shape[0], len(texts))
    return texts


def split_bytes(blob: memoryview, expected: int, name: str = TEXT) -> list[str]:
    """The elements of a BYTES blob.

    Raises:
        InvalidRequest: The lengths in it do not add up.
        MalformedRequest: An element is not UTF-8.
    """
    texts: list[str] = []
    at = 0
    while at < len(blob) and len(texts) <= expected:
        if len(blob) - at < _LENGTH.size:
            raise InvalidRequest(f"input {name!r}: its data ends inside a length")
        (size,) = _LENGTH.unpack_from(blob, at)
        at += _LENGTH.size
        if size > len(blob) - at:
            raise InvalidRequest(f"input {name!r}: its data ends inside an element")
        texts.append(decode_text(bytes(blob[at : at + size]), name))
        at += size
    if expected != len(texts):
        _check_count(name, expected, len(texts))
    return texts


def decode_text(value: bytes, name: str = TEXT) -> str:
    """Decodes one BYTES element.

    Raises:
        MalformedRequest: It is not UTF-8.
    """
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedRequest(f"input {name!r} contains bytes that are not UTF-8") from None


def _tokens_of(named: dict[str, Tensor]) -> list[TextInput]:
    ids = _matrix(named[IDS])
    others = {name: _matrix(named[name]) for name in (MASK, TYPES) if name in named}
    for name, values in others.items():
        if values.shape != ids.shape:
            raise InvalidRequest(f"the shapes of {IDS!r} and {name!r} differ")
        if ((values < 0) | (values > 1)).any():
            raise InvalidRequest(f"{name!r} must contain only 0 and 1")
    lengths = np.full(len(ids), ids.shape[1])
    if MASK in others:
        lengths = others[MASK].sum(axis=1)
        if not lengths.all():
            raise InvalidRequest(f"a row of {MASK!r} must contain a 1")
        if (others[MASK] != (np.arange(ids.shape[1]) < lengths[:, None])).any():
            raise InvalidRequest(f"a row of {MASK!r} must be ones, then zeros")
    types = others.get(TYPES)
    return [
        EncodedText(
            array("i", ids[row, :length].tolist()),
            None if types is None else array("i", types[row, :length].tolist()),
        )
        for row, length in enumerate(lengths.tolist())
    ]


def _matrix(tensor: Tensor) -> NDArray[np.int64]:
    """The numbers of an INT32 or INT64 tensor with shape [n, m]. All must fit into 32 bits."""
    name = tensor.name
    if tensor.datatype not in {INT32, INT64}:
        raise InvalidRequest(f"input {name!r} must have the datatype {INT64} or {INT32}")
    shape = list(tensor.shape)
    if len(shape) != _MATRIX or not all(0 <= size < _LARGEST_DIMENSION for size in shape) or not shape[1]:
        raise InvalidRequest(f"unexpected shape for input {name!r}: expected [texts, tokens]")
    count = math.prod(shape)
    if tensor.blob is not None:
        dtype = np.dtype(_NUMBERS[tensor.datatype])
        _check_count(name, count * dtype.itemsize, len(tensor.blob), "bytes")
        values = np.frombuffer(tensor.blob, dtype).astype(np.int64)
    else:
        numbers = _flat(tensor)
        _check_count(name, count, len(numbers))
        if count > _MAX_NUMBERS:
            raise InvalidRequest(f"input {name!r} has {count} numbers; the maximum is {_MAX_NUMBERS}")
        if not set(map(type, numbers)) <= {int, bool}:
            raise InvalidRequest(f"input {name!r} must contain integers")
        try:
            values = np.fromiter(numbers, np.int64, count)
        except OverflowError:
            raise InvalidRequest(f"input {name!r} has a number outside the range of {INT64}") from None
    if values.size and (values.min() < -_LARGEST_DIMENSION or values.max() >= _LARGEST_DIMENSION):
        raise InvalidRequest(f"input {name!r} has a number outside the range of {INT32}")
    return values.reshape(shape)


def _flat(tensor: Tensor) -> Sequence[Any]:
    data = tensor.data or ()
    if not data or not isinstance(data[0], list):
        return data
    return [value for row in data for value in (row if isinstance(row, list) else (row,))]


def _check_count(name: str, expected: int, count: int, what: str = "elements") -> None:
    if expected != count:
        raise InvalidRequest(f"input {name!r}: its shape has {expected} {what}, but its data has {count}")
