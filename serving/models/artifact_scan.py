"""Scans an artifact before an engine loads it: an ONNX file for unsafe content, a TensorRT plan by its header.

An ONNX file is a protocol buffer, `ModelProto` of the public `onnx.proto3`. The scanner walks the wire format field by
field and jumps over tensor data by its length. A file of 2 GiB therefore costs kilobytes of memory, and no library that
builds objects from it sees a hostile byte. The scanner refuses:

- external data outside the one file that the manifest lists for the graph, and overlapping data of two tensors,
- operator domains outside the allowlist, and operators that hold compiled or foreign code,
- subgraphs, sparse initializers, model-local functions and training information,
- tensors whose dimensions do not match their data, and lengths that do not add up.

It returns the graph's inputs, outputs and vocabulary size, which are compared with the manifest.

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
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path  # noqa: TC003  part of the public signature
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from serving.engine.specs import EngineBuild

MAX_BYTES = 2**31
"""Protocol buffers must be smaller than 2 GiB."""

DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})
"""Operator domains that the engines implement themselves."""

FORBIDDEN_OPERATORS = frozenset({"EPContext", "PythonOp", "PythonOpGrad", "ATen", "Snpe"})
"""Operators of these domains that run compiled or foreign code."""

_MAX_FIELDS = 1 << 18
"""The INT8 graph of BERT-large has about 6,000."""
_SMALLEST_KEY = 8  # field number 1
_LONGEST_KEY = 5  # bytes of a 32-bit number
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}

_BITS = {1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 16: 16, 21: 4, 22: 4}
"""Bits per element, by type of tensor. Strings are not served."""
_TYPES = {1: "float32", 6: "int32", 7: "int64", 10: "float16"}
_FLOATS, _INTEGERS, _LONGS, _RAW, _DOUBLES, _UNSIGNED = 4, 5, 7, 9, 10, 11
_ENTRY, _LIES_OUTSIDE = _OUTSIDE = (13, 14)
_PLACE = ("length", "location", "offset")
"""Keys that say where a tensor's external data lies."""
_NUMBER = re.compile("[0-9]{1,15}")
_FIXED_DATA = {_FLOATS: 4, _DOUBLES: 8}
_VARINT_DATA = (_INTEGERS, _LONGS, _UNSIGNED)

_IDS = "input_ids"
_TABLES = {"Gather": (1, 0), "EmbedLayerNormalization": (0, 2), "QEmbedLayerNormalization": (0, 2)}
"""Operators that look up embeddings: the index of the input with the ids, and of the one with the table."""
_SAME_ROWS = frozenset({"DequantizeLinear", "Cast"})

_PLAN_HEAD = struct.Struct("<4s12xQ3B")
_PLAN_MAGIC = b"trt"

Shape = tuple[int, ...]


class UnsafeArtifactError(ValueError):
    """The file must not be served. The message gives the reason and follows the file's name."""


class Tensor(NamedTuple):
    """An input or output of the graph. A dimension of -1 varies."""

    name: str
    dtype: str
    shape: Shape


@dataclass(slots=True, frozen=True)
class Interface:
    """The inputs and outputs of a graph.

    Attributes:
        inputs: In the graph's order, without those that have a default value.
        vocabularies: Number of rows of each table in which `input_ids` are looked up.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    vocabularies: frozenset[int]


class _Field(NamedTuple):
    number: int
    wire_type: int
    value: int
    at: int
    end: int


@dataclass(slots=True)
class _Node:
    operator: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


class _Scanner:
    def __init__(self, data: mmap.mmap, beside: str | None, beside_bytes: int) -> None:
        self.data = data
        self.beside, self.beside_bytes = beside, beside_bytes
        self.places: list[tuple[int, int]] = []
        """Start and end of each tensor's data in the external file."""
        self.fields_left = _MAX_FIELDS
        self.nodes: list[_Node] = []
        self.tensors: dict[str, Shape] = {}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

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

    def key(self, at: int, end: int) -> tuple[int, int, int]:
        """The number and wire type of a field, and the offset of its value.

        Parsers truncate a key to 32 bits, so they would read a larger one as another field.
        """
        key, after = self.varint(at, end)
        if not _SMALLEST_KEY <= key < 1 << 32 or after - at > _LONGEST_KEY:
            raise UnsafeArtifactError("is corrupt: field number out of range")
        return key >> 3, key & 7, after

    def spend(self) -> None:
        """Counts each field and packed number that is read, so that no file keeps the server from starting."""
        self.fields_left -= 1
        if self.fields_left < 0:
            raise UnsafeArtifactError(f"has more than {_MAX_FIELDS} fields")

    def fields(self, at: int, end: int) -> Iterator[_Field]:
        """The fields of a message. Each is checked to end inside it."""
        while at < end:
            self.spend()
            number, wire_type, at = self.key(at, end)
            value, start = 0, at
            if wire_type == _VARINT:
                value, at = self.varint(at, end)
            elif wire_type == _LENGTH:
                size, start = self.varint(at, end)
                at = start + size
            elif wire_type in _FIXED_SIZES:
                at += _FIXED_SIZES[wire_type]
            else:
                raise UnsafeArtifactError("is corrupt: unknown wire type")
            if at > end:
                raise UnsafeArtifactError("is truncated")
            yield _Field(number, wire_type, value, start, at)

    def parts(self, at: int, end: int, readers: Mapping[int, Callable[[int, int], object]]) -> None:
        """Passes the content of each field to its reader, if it has one."""
        for part in self.fields(at, end):
            if part.wire_type == _LENGTH and part.number in readers:
                readers[part.number](part.at, part.end)

    def text(self, at: int, end: int) -> str:
        return self.data[at : min(end, at + 512)].decode("utf-8", "replace")

    def model(self, at: int, end: int) -> None:
        self.parts(
            at,
            end,
            {
                7: self.graph,
                8: lambda at, end: self.parts(at, end, {1: self.domain}),
                20: _refusal("training information"),
                25: _refusal("a model-local function"),
            },
        )

    def graph(self, at: int, end: int) -> None:
        self.parts(
            at,
            end,
            {
                1: self.node,
                5: self.initialiser,
                11: lambda at, end: self.inputs.append(self.described(at, end)),
                12: lambda at, end: self.outputs.append(self.described(at, end)),
                15: _refusal("a sparse initializer"),
            },
        )

    def node(self, at: int, end: int) -> None:
        node = _Node()
        self.nodes.append(node)

        def operator(at: int, end: int) -> None:
            node.operator = self.text(at, end)
            if node.operator in FORBIDDEN_OPERATORS:
                raise UnsafeArtifactError(f"contains a node {node.operator} (compiled or foreign code)")

        self.parts(
            at,
            end,
            {
                1: lambda at, end: node.inputs.append(self.text(at, end)),
                2: lambda at, end: node.outputs.append(self.text(at, end)),
                4: operator,
                5: self.attribute,
                7: self.domain,
            },
        )

    def domain(self, at: int, end: int) -> None:
        if self.text(at, end) not in DOMAINS:
            raise UnsafeArtifactError("uses an unsupported operator domain")

    def attribute(self, at: int, end: int) -> None:
        # An encoder has no control flow. Branches could hide code, and loops might never end.
        subgraph, sparse = _refusal("a subgraph"), _refusal("a sparse initializer")
        self.parts(at, end, {5: self.inside, 6: subgraph, 10: self.inside, 11: subgraph, 22: sparse, 23: sparse})

    def inside(self, at: int, end: int) -> None:
        """Reads a tensor of an attribute. Its data must lie in the graph."""
        if self.tensor(at, end)[2]:
            raise UnsafeArtifactError("has external tensor data for an attribute")

    def initialiser(self, at: int, end: int) -> None:
        name, shape, _ = self.tensor(at, end)
        self.tensors[name] = shape

    def tensor(self, at: int, end: int) -> tuple[str, Shape, bool]:
        """The name and dimensions of a tensor, and whether its data is external. Checks that the data fills them."""
        name, kind, raw = "", 0, None
        shape: list[int] = []
        data: dict[int, int] = {}
        outside: list[_Field] = []
        for part in self.fields(at, end):
            if part.number in _OUTSIDE:
                outside.append(part)
            elif part.number == 1:
                shape += self.numbers(part)
            elif (part.number, part.wire_type) == (2, _VARINT):
                kind = part.value
            elif (part.number, part.wire_type) == (8, _LENGTH):
                name = self.text(part.at, part.end)
            elif part.number == _RAW:
                raw = part.end - part.at
            elif part.number in _FIXED_DATA:
                data[part.number] = data.get(part.number, 0) + (part.end - part.at) // _FIXED_DATA[part.number]
            elif part.number in _VARINT_DATA:
                data[part.number] = data.get(part.number, 0) + self.count(part)
        length = self.placed(outside)
        if length is not None and (raw is not None or data):
            raise UnsafeArtifactError("has both external and inline data for a tensor")
        _check_filled(kind, shape, raw if length is None else length, data)
        return name, tuple(shape), length is not None

    def placed(self, parts: list[_Field]) -> int | None:
        """Bytes of a tensor's external data; None if the data lies in the graph."""
        if not any(part.value or part.wire_type != _VARINT for part in parts):
            return None
        if self.beside is None:
            raise UnsafeArtifactError("has external tensor data, but the manifest lists no file for it")
        place = self.place(parts)
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

    def place(self, parts: list[_Field]) -> dict[str, str]:
        """The location of a tensor's external data. Each key of `_PLACE` must occur once, beside the external flag."""
        place: dict[str, str] = {}
        for part in parts:
            if (part.number, part.wire_type, part.value) == (_LIES_OUTSIDE, _VARINT, 1):
                continue
            words: list[tuple[int, str]] = []
            if (part.number, part.wire_type) == (_ENTRY, _LENGTH):
                words = [(word.number, self.text(word.at, word.end)) for word in self.fields(part.at, part.end)]
            if [number for number, _ in words] != [1, 2] or words[0][1] not in _PLACE or words[0][1] in place:
                raise UnsafeArtifactError(f"has external tensor data that must give {', '.join(_PLACE)} once each")
            place[words[0][1]] = words[1][1]
        if all(part.number == _ENTRY for part in parts):
            raise UnsafeArtifactError("has external tensor data that is not marked as external")
        return place

    def check_places(self) -> None:
        """Rejects an unused data file, and overlapping data, with which a small file could fill any memory."""
        if self.beside is not None and not self.places:
            raise UnsafeArtifactError(f"does not use {self.beside}, which the manifest lists for it")
        if any(end > start for (_, end), (start, _) in pairwise(sorted(self.places))):
            raise UnsafeArtifactError("has overlapping external data of two tensors")

    def numbers(self, part: _Field) -> list[int]:
        """The integers of a repeated field: a single one, or several packed."""
        if part.wire_type != _LENGTH:
            return [part.value]
        values, at = [], part.at
        while at < part.end:
            self.spend()
            value, at = self.varint(at, part.end)
            values.append(value)
        return values

    def count(self, part: _Field) -> int:
        if part.wire_type != _LENGTH:
            return 1
        packed = np.frombuffer(self.data, np.uint8, part.end - part.at, part.at)
        return int(np.count_nonzero(packed < 0x80))  # noqa: PLR2004  each ends with a byte without the continuation bit

    def described(self, at: int, end: int) -> Tensor:
        """An input or output, as the graph declares it."""
        name, kind = "", 0
        shape: list[int] = []

        def dimension(at: int, end: int) -> None:
            shape.append(-1)
            for part in self.fields(at, end):
                shape[-1] = part.value if (part.number, part.wire_type) == (1, _VARINT) else -1

        def tensor(at: int, end: int) -> None:
            nonlocal kind
            for part in self.fields(at, end):
                if (part.number, part.wire_type) == (1, _VARINT):
                    kind = part.value
                elif (part.number, part.wire_type) == (2, _LENGTH):
                    self.parts(part.at, part.end, {1: dimension})

        def called(at: int, end: int) -> None:
            nonlocal name
            name = self.text(at, end)

        forms = {1: tensor, **dict.fromkeys((4, 5, 7, 8, 9), _refusal("an input or output that is not a tensor"))}
        self.parts(at, end, {1: called, 2: lambda at, end: self.parts(at, end, forms)})
        return Tensor(name, _TYPES.get(kind, f"type {kind}"), tuple(shape))

    def interface(self) -> Interface:
        inputs = tuple(tensor for tensor in self.inputs if tensor.name not in self.tensors)
        return Interface(inputs, tuple(self.outputs), frozenset(self.tables()))

    def tables(self) -> Iterator[int]:
        """Number of rows of each embedding table, also of one behind a DequantizeLinear or Cast."""
        makers = {name: node for node in self.nodes for name in node.outputs}
        for node in self.nodes:
            ids, table = _TABLES.get(node.operator, (0, 0))
            if ids == table or len(node.inputs) <= max(ids, table) or node.inputs[ids] != _IDS:
                continue
            name = node.inputs[table]
            maker = makers.get(name)
            if maker is not None and maker.operator in _SAME_ROWS and maker.inputs:
                name = maker.inputs[0]
            if shape := self.tensors.get(name):
                yield shape[0]


def _refusal(what: str) -> Callable[[int, int], None]:
    def refuse(_at: int, _end: int) -> None:
        raise UnsafeArtifactError(f"contains {what}")

    return refuse


def _check_filled(kind: int, shape: list[int], raw: int | None, data: dict[int, int]) -> None:
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
    filled = (not any(data.values()) and raw == size_bytes) if raw is not None else sum(data.values()) == numbers
    if not filled:
        raise UnsafeArtifactError("has a tensor whose dimensions do not match its data")


def check_model_file(path: Path, beside: str | None = None) -> Interface:
    """Checks an ONNX file and returns its inputs and outputs. The file is mapped, not read.

    Raises:
        UnsafeArtifactError: It holds anything but a plain graph of known operators.
    """
    size = path.stat().st_size
    if size == 0 or size >= MAX_BYTES:
        raise UnsafeArtifactError(f"has {size} bytes; between 1 byte and 2 GiB are allowed")
    beside_bytes = 0 if beside is None else path.with_name(beside).stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        scanner = _Scanner(data, beside, beside_bytes)
        scanner.model(0, size)
    scanner.check_places()
    if not scanner.nodes:
        raise UnsafeArtifactError("contains no graph")
    return scanner.interface()


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
