"""What HTTP and gRPC share of the Open Inference Protocol v2: names, BYTES tensors, model descriptions.

A model offers one input, `text` BYTES [-1, 1], and one output, `embedding` FP32 [-1, H], of length 1.
BYTES elements lie in a blob as a little-endian u32 length and so many bytes (Triton's binary data extension).
"""

from __future__ import annotations

import struct
from importlib.metadata import version
from typing import TYPE_CHECKING

from serving.errors import InvalidRequest, MalformedRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.repository import ServedModel

SERVER_NAME = "bertserve"
SERVER_VERSION = version("bertserve")
EXTENSIONS = ("binary_tensor_data",)
PLATFORM = "onnxruntime_onnx"

INPUT = "text"
OUTPUT = "embedding"
BYTES = "BYTES"
FP32 = "FP32"

_LENGTH = struct.Struct("<I")
_LARGEST_DIMENSION = 2**31


def input_shape() -> list[int]:
    """Shape of `text`."""
    return [-1, 1]


def output_shape(model: ServedModel) -> list[int]:
    """Shape of `embedding`."""
    return [-1, model.manifest.hidden_size]


def check_input(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Checks what a request says of its input and returns the number of texts.

    Raises:
        InvalidRequest: Another name, datatype or shape than this server takes.
    """
    if name != INPUT:
        raise InvalidRequest(f"unexpected input; the model takes one input, {INPUT!r}")
    if datatype != BYTES:
        raise InvalidRequest(f"input {INPUT!r} must have the datatype {BYTES}")
    sizes = list(shape)
    if sizes[1:] not in ([], [1]) or not sizes or not 0 <= sizes[0] < _LARGEST_DIMENSION:
        raise InvalidRequest(f"unexpected shape for input {INPUT!r}: expected [n] or [n, 1]")
    return sizes[0]


def check_outputs(names: Sequence[str]) -> None:
    """Checks the outputs that a request asks for; none means all.

    Raises:
        InvalidRequest: An output that the model does not have, or one twice.
    """
    if any(name != OUTPUT for name in names) or len(names) > 1:
        raise InvalidRequest(f"unexpected output; the model has one output, {OUTPUT!r}")


def check_count(expected: int, found: int) -> None:
    """Checks that a shape and the data agree.

    Raises:
        InvalidRequest: They do not.
    """
    if expected != found:
        raise InvalidRequest(f"input {INPUT!r}: its shape has {expected} elements, its data {found}")


def decode_text(value: bytes) -> str:
    """One BYTES element.

    Raises:
        MalformedRequest: Not UTF-8.
    """
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedRequest(f"input {INPUT!r} holds bytes that are not UTF-8") from None


def split_bytes(blob: memoryview, expected: int) -> list[str]:
    """The elements of a BYTES blob.

    Raises:
        InvalidRequest: The lengths in it do not add up.
        MalformedRequest: An element is not UTF-8.
    """
    texts: list[str] = []
    at = 0
    while at < len(blob) and len(texts) <= expected:
        if len(blob) - at < _LENGTH.size:
            raise InvalidRequest(f"input {INPUT!r}: its data ends inside a length")
        (size,) = _LENGTH.unpack_from(blob, at)
        at += _LENGTH.size
        if size > len(blob) - at:
            raise InvalidRequest(f"input {INPUT!r}: its data ends inside an element")
        texts.append(decode_text(bytes(blob[at : at + size])))
        at += size
    check_count(expected, len(texts))
    return texts
