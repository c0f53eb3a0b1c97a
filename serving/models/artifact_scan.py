"""Scans an artifact before an engine loads it: an ONNX file for unsafe content, a TensorRT plan by its header.

An ONNX file is a protocol buffer, `ModelProto` of the public `onnx.proto3`; the numbers below are its field numbers.
The scanner walks the wire format and jumps over tensor data by its length. A file of 2 GiB therefore costs kilobytes of
memory, and no library that builds objects from it sees a hostile byte. The scanner refuses:

- external data outside the one file that the manifest lists for the graph, and overlapping data of two tensors,
- operator domains outside the allowlist, and operators that hold compiled or foreign code,
- subgraphs, sparse initializers, model-local functions and training information,
- tensors whose dimensions do not match their data, and lengths that do not add up.

Engines compare a graph's inputs and outputs with the manifest when they have loaded it (`engine.base`).

A TensorRT engine (a plan) is native code. Its digest keeps foreign ones out. Its header only gives an early and clear
error if a file is no plan, is truncated, or is of another version. The layout was observed in files of TensorRT for RTX
1.7. For the enterprise library, NVIDIA states the same magic and version (NVIDIA/TensorRT issue 3073):

    bytes 0-3    a letter and `trt`
    bytes 16-23  size of the whole file, little-endian (RTX)
    bytes 24-27  version: major, minor, patch, build
"""

from __future__ import annotations

import mmap
import re
import struct
from itertools import pairwise
from pathlib import Path  # noqa: TC003  part of the public signature
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bertserve.serving.engine.specs import EngineBuild

MAX_BYTES = 2**31
"""Protocol buffers must be smaller than 2 GiB."""

DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
"""Operator domains that the engines implement themselves."""

FORBIDDEN_OPERATORS = frozenset({"EPContext", "PythonOp", "PythonOpGrad", "ATen", "Snpe"})
"""Operators of these domains that run compiled or foreign code."""

_MAX_FIELDS = 1 << 18
"""The INT8 graph of BERT-large has about 6,000."""
_VARINT, _LENGTH, _FIXED_SIZES = 0, 2, {1: 8, 5: 4}
_TEXT_BYTES = 512

_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16, 21: 4, 22: 4}
"""Bits per element, by type of tensor. Strings are not served."""
_FIXED_DATA, _VARINT_DATA = {4: 4, 10: 8}, (5, 7, 11)
_PLACE = ("length", "location", "offset")
"""Keys that say where a tensor's external data lies."""
_NUMBER = re.compile("[0-9]{1,15}")

_FOREIGN = {
    "model": {20: "training information", 25: "a model-local function"},
    "graph": {15: "a sparse initializer"},
    # An encoder has no control flow. Branches could hide code, and loops might never end.
    "attribute": {6: "a subgraph", 11: "a subgraph", 22: "a sparse initializer", 23: "a sparse initializer"},
}
"""Fields of a message that no file may have, with what they hold."""

_PLAN_HEAD = struct.Struct("<4s12xQ3B")
_PLAN_MAGIC = b"trt"

Message = dict[int, "list[int | range]"]
"""The values of each field in their order: a number, or where its bytes lie."""


class UnsafeArtifactError(ValueError):
    """The file must not be served. The message gives the reason and follows the file's name."""


class _Scanner:
    def __init__(self, data: mmap.mmap, beside: str | None, beside_bytes: int) -> None:
        self.data = data
        self.beside, self.beside_bytes = beside, beside_bytes
        self.places: list[tuple[int, int]] = []
        """Start and end of each tensor's data in the external file."""
        self.fields_left = _MAX_FIELDS
        self.has_nodes = False

    # The wire format.

    def varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:  # noqa: PLR2004  the format allows ten bytes of seven bits
            byte = self.data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  the continuation bit
                return value, at
            shift += 7
        raise UnsafeArtifactError("is corrupt: unterminated number")

    def spend(self) -> None:
        """Counts each field and packed number that is read, so that no file keeps the server from starting."""
        self.fields_left -= 1
        if self.fields_left < 0:
            raise UnsafeArtifactError(f"has more than {_MAX_FIELDS} fields")

    def message(self, where: range, kind: str = "") -> Message:
        """The fields of a message, none of which is foreign to its kind. Each is checked to end inside it."""
        found: Message = {}
        at, end = where.start, where.stop
        while at < end:
            self.spend()
            key, after = self.varint(at, end)
            # Parsers truncate a key to 32 bits, so they would read a larger one as another field.
            if not 1 << 3 <= key < 1 << 32 or after - at > 5:  # noqa: PLR2004  bytes of a 32-bit number
                raise UnsafeArtifactError("is corrupt: field number out of range")
            number, wire_type, at = key >> 3, key & 7, after
            value: int | range
            if wire_type == _VARINT:
                value, at = self.varint(at, end)
            elif wire_type == _LENGTH or wire_type in _FIXED_SIZES:
                size, at = self.varint(at, end) if wire_type == _LENGTH else (_FIXED_SIZES[wire_type], at)
                value = range(at, at + size)
                at += size
            else:
                raise UnsafeArtifactError("is corrupt: unknown wire type")
            if at > end:
                raise UnsafeArtifactError("is truncated")
            if kind and number in _FOREIGN[kind] and isinstance(value, range):
                raise UnsafeArtifactError(f"contains {_FOREIGN[kind][number]}")
            found.setdefault(number, []).append(value)
        return found

    def texts(self, message: Message, number: int) -> list[str]:
        places = [(where.start, min(where.stop, where.start + _TEXT_BYTES)) for where in _parts(message, number)]
        return [self.data[at:end].decode("utf-8", "replace") for at, end in places]

    # What a graph may hold.

    def model(self) -> None:
        model = self.message(range(len(self.data)), "model")
        for opset in _parts(model, 8):
            self.check_domain(self.message(opset), 1)
        for where in _parts(model, 7):
            graph = self.message(where, "graph")
            for node in _parts(graph, 1):
                self.node(self.message(node))
            for initializer in _parts(graph, 5):
                self.tensor(self.message(initializer))

    def check_domain(self, message: Message, number: int) -> None:
        if not DOMAINS.issuperset(self.texts(message, number)):
            raise UnsafeArtifactError("uses an unsupported operator domain")

    def node(self, node: Message) -> None:
        self.has_nodes = True
        self.check_domain(node, 7)
        for operator in FORBIDDEN_OPERATORS.intersection(self.texts(node, 4)):
            raise UnsafeArtifactError(f"contains a node {operator} (compiled or foreign code)")
        for where in _parts(node, 5):
            attribute = self.message(where, "attribute")
            for value in (*_parts(attribute, 5), *_parts(attribute, 10)):
                if self.tensor(self.message(value)):
                    raise UnsafeArtifactError("has external tensor data for an attribute")

    def tensor(self, tensor: Message) -> bool:
        """Checks that a tensor's data fills its dimensions. Returns whether the data is external."""
        shape = [size for value in tensor.get(1, ()) for size in self.numbers(value)]
        raw = [len(where) for where in _parts(tensor, 9)]
        count = sum(len(where) // size for number, size in _FIXED_DATA.items() for where in _parts(tensor, number))
        count += sum(self.count(value) for number in _VARINT_DATA for value in tensor.get(number, ()))
        length = self.placed(tensor)
        if length is not None and (raw or count):
            raise UnsafeArtifactError("has both external and inline data for a tensor")
        _check_filled(_number(tensor, 2), shape, [length] if length is not None else raw, count)
        return length is not None

    def placed(self, tensor: Message) -> int | None:
        """Bytes of a tensor's external data; None if the data lies in the graph."""
        entries, flags = tensor.get(13, []), tensor.get(14, [])
        if not entries and not any(flag != 0 for flag in flags):
            return None
        if self.beside is None:
            raise UnsafeArtifactError("has external tensor data, but the manifest lists no file for it")
        place: dict[str, str] = {}
        for entry in entries:
            words = self.message(entry) if isinstance(entry, range) else {}
            key, value = self.texts(words, 1), self.texts(words, 2)
            if (len(words), len(key), len(value)) != (2, 1, 1) or key[0] not in _PLACE or key[0] in place:
                raise UnsafeArtifactError(f"has external tensor data that must give {', '.join(_PLACE)} once each")
            place[key[0]] = value[0]
        if set(flags) != {1}:
            raise UnsafeArtifactError("has external tensor data that is not marked as external")
        if place.get("location") != self.beside:
            raise UnsafeArtifactError(f"has external tensor data in a file other than {self.beside}")
        numbers = [place.get(key, "") for key in ("offset", "length")]
        if not all(_NUMBER.fullmatch(number) for number in numbers):
            raise UnsafeArtifactError("has external tensor data with an invalid offset or length")
        offset, length = map(int, numbers)
        if offset + length > self.beside_bytes:
            raise UnsafeArtifactError(f"has external tensor data past the end of {self.beside}")
        self.places.append((offset, offset + length))
        return length

    def check_places(self) -> None:
        """Rejects an unused data file, and overlapping data, with which a small file could fill any memory."""
        if self.beside is not None and not self.places:
            raise UnsafeArtifactError(f"does not use {self.beside}, which the manifest lists for it")
        if any(end > start for (_, end), (start, _) in pairwise(sorted(self.places))):
            raise UnsafeArtifactError("has overlapping external data of two tensors")

    def numbers(self, value: int | range) -> Iterator[int]:
        """The integers of a repeated field: a single one, or several packed."""
        if isinstance(value, int):
            yield value
            return
        at = value.start
        while at < value.stop:
            self.spend()
            number, at = self.varint(at, value.stop)
            yield number

    def count(self, value: int | range) -> int:
        if isinstance(value, int):
            return 1
        packed = np.frombuffer(self.data, np.uint8, len(value), value.start)
        return int(np.count_nonzero(packed < 0x80))  # noqa: PLR2004  each ends with a byte without the continuation bit


def _parts(message: Message, number: int) -> list[range]:
    """The values of a field that are bytes. Parsers ignore other ones there."""
    return [value for value in message.get(number, ()) if isinstance(value, range)]


def _number(message: Message, number: int) -> int:
    """A number that occurs once; of several, parsers take the last."""
    return next((value for value in reversed(message.get(number, [])) if isinstance(value, int)), 0)


def _check_filled(kind: int, shape: Sequence[int], raw: Sequence[int], count: int) -> None:
    bits = _BITS.get(kind)
    if bits is None:
        raise UnsafeArtifactError(f"has a tensor of an unsupported type ({kind})")
    elements = 1
    for size in shape:
        elements *= size
        if size >= MAX_BYTES or elements > MAX_BYTES:
            raise UnsafeArtifactError("has a tensor with dimensions out of range")
    size_bytes = -(-elements * bits // 8)
    # Two 4-bit elements share a number.
    numbers = elements if bits >= 8 else size_bytes  # noqa: PLR2004
    if (count, raw[-1]) != (0, size_bytes) if raw else count != numbers:
        raise UnsafeArtifactError("has a tensor whose dimensions do not match its data")


def check_model_file(path: Path, beside: str | None = None) -> None:
    """Checks an ONNX file. The file is mapped, not read.

    Raises:
        UnsafeArtifactError: It holds anything but a plain graph of known operators.
    """
    size = path.stat().st_size
    if size == 0 or size >= MAX_BYTES:
        raise UnsafeArtifactError(f"has {size} bytes; between 1 byte and 2 GiB are allowed")
    beside_bytes = 0 if beside is None else path.with_name(beside).stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        scanner = _Scanner(data, beside, beside_bytes)
        scanner.model()
    scanner.check_places()
    if not scanner.has_nodes:
        raise UnsafeArtifactError("contains no graph")


def check_plan_file(path: Path, build: EngineBuild) -> None:
    """Refuses a file that is no plan, is truncated, or is of another version; raises UnsafeArtifactError."""
    with path.open("rb") as file:
        head = file.read(_PLAN_HEAD.size)
    if len(head) < _PLAN_HEAD.size or head[1:4] != _PLAN_MAGIC:
        raise UnsafeArtifactError("is not a TensorRT engine")
    _, size, *version = _PLAN_HEAD.unpack(head)
    if build.flavour == "rtx" and size != path.stat().st_size:
        raise UnsafeArtifactError(f"is truncated: {path.stat().st_size} bytes of {size}")
    built_by = ".".join(map(str, version))
    if built_by != ".".join(build.version.split(".")[:3]):
        raise UnsafeArtifactError(f"was built with TensorRT {built_by}, but the manifest says {build.version}")
