"""Looks through an ONNX file for what a served model must not contain, before any engine parses it.

An ONNX file is a protocol buffer, `ModelProto` of the public `onnx.proto3`. This walks its wire format
field by field, jumping over tensor data by its length, so that a file of 2 GiB costs kilobytes of memory
and no library that builds objects from it sees a hostile byte. What is refused: data outside the file,
operator domains that are not on the list, EPContext nodes (compiled code), sparse initialisers, model-local
functions, and anything whose lengths do not add up.
"""

from __future__ import annotations

import mmap
from pathlib import Path  # noqa: TC003  part of the public signature

MAX_BYTES = 2**31
"""A protocol buffer holds less than 2 GiB."""

DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
"""Operator sets that our engines implement themselves."""

FORBIDDEN_OPERATORS = frozenset({"EPContext"})

_MAX_NESTING = 16
_SMALLEST_KEY = 8  # field number 1
_LONGEST_KEY = 5  # bytes of a 32-bit number
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5

# Field numbers of onnx.proto3 that lead to something we judge: message -> field -> what it holds.
_MESSAGES: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {4: "op_type", 5: "attribute", 7: "domain"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "tensor": {13: "external", 14: "location"},
    "opset": {1: "domain"},
}
_REFUSED = {
    "training": "training information",
    "function": "a model-local function",
    "sparse": "a sparse initialiser",
    "external": "external tensor data",
}


class UnsafeModelError(ValueError):
    """The file is not an ONNX model that may be served; the message says what was found."""


class _Scanner:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.nodes = 0

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:  # noqa: PLR2004  ten bytes of seven bits are the format's limit
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  the continuation bit
                return value, at
            shift += 7
        raise UnsafeModelError("is damaged: a number does not end")

    def key(self, at: int, end: int) -> tuple[int, int, int]:
        """A field's number and wire type, and where its value starts.

        Parsers cut a key to 32 bits: a larger one would be another field to them than to us.
        """
        key, after = self.varint(at, end)
        if not _SMALLEST_KEY <= key < 1 << 32 or after - at > _LONGEST_KEY:
            raise UnsafeModelError("is damaged: a field number is out of range")
        return key >> 3, key & 7, after

    def message(self, kind: str, at: int, end: int, depth: int = 0) -> None:
        if depth > _MAX_NESTING:
            raise UnsafeModelError(f"nests its graphs deeper than {_MAX_NESTING} levels")
        fields = _MESSAGES[kind]
        while at < end:
            number, wire_type, at = self.key(at, end)
            meaning = fields.get(number)
            if wire_type == _LENGTH:
                size, at = self.varint(at, end)
                if size > end - at:
                    raise UnsafeModelError("is truncated")
                if meaning is not None:
                    self.judge(meaning, at, at + size, depth)
                at += size
            elif wire_type == _VARINT:
                value, at = self.varint(at, end)
                if meaning == "location" and value != 0:
                    raise UnsafeModelError("keeps external tensor data; one file must hold everything")
            elif wire_type in (_FIXED64, _FIXED32):
                at += 8 if wire_type == _FIXED64 else 4
            else:
                raise UnsafeModelError("is damaged: unknown wire type")
        if at != end:
            raise UnsafeModelError("is truncated")

    def judge(self, meaning: str, at: int, end: int, depth: int) -> None:
        if meaning in _REFUSED:
            raise UnsafeModelError(f"contains {_REFUSED[meaning]}")
        if meaning in _MESSAGES:
            self.nodes += meaning == "node"
            self.message(meaning, at, end, depth + 1)
        elif meaning == "domain" and self.text(at, end) not in DOMAINS:
            raise UnsafeModelError("uses an operator domain that is not on the list of domains served")
        elif meaning == "op_type" and self.text(at, end) in FORBIDDEN_OPERATORS:
            raise UnsafeModelError("contains an EPContext node (compiled code)")

    def text(self, at: int, end: int) -> str:
        return self.data[at : min(end, at + 128)].decode("utf-8", "replace")


def check_model_file(path: Path) -> None:
    """Refuses an ONNX file that holds anything but a plain graph of known operators.

    Args:
        path: The file; it is mapped, not read.

    Raises:
        UnsafeModelError: With the first thing found, worded to follow the file's name.
    """
    size = path.stat().st_size
    if size == 0 or size >= MAX_BYTES:
        raise UnsafeModelError(f"has {size} bytes; between 1 byte and 2 GiB are allowed")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        scanner = _Scanner(data)
        scanner.message("model", 0, size)
    if scanner.nodes == 0:
        raise UnsafeModelError("contains no graph")
