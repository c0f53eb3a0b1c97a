"""Reads the variables of a TensorFlow checkpoint without TensorFlow.

The index is a table in LevelDB's format (tensorflow/core/lib/io/format.cc): blocks of sorted keys with prefix
compression. A value is the position of a variable in a data file (tensorflow/core/util/tensor_bundle/tensor_bundle.cc).
Every checksum is verified, and every length is bounded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from bertserve.export.checkpoint.layouts.tensor_bundle_pb2 import BundleEntry, BundleHeader
from bertserve.export.checkpoint.safetensors_file import Tensor, unsigned
from bertserve.export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.safetensors_file import Bits

INDEX = ".index"

_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER = 48
_TRAILER = 5
"""Bytes behind a block: compression type and checksum."""
_UNCOMPRESSED = 0
_LONGEST_VARINT = 10
_LARGEST_INDEX = 1 << 24
_LONGEST_NAME = 1 << 10
_MAX_VARIABLES = 1 << 16
_MAX_FILES = 1 << 10
_VERSION = 1
_FLOATS = {1: "F32", 2: "F64", 14: "BF16", 19: "F16"}
"""Numbers of DataType (tensorflow/core/framework/types.proto), by safetensors' names."""
_OTHERS = {3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "strings", 8: "complex64", 9: "int64", 10: "booleans"}


class _DamagedError(Exception):
    """The reason as half a sentence about a file."""


@dataclass(slots=True, frozen=True)
class Bundle:
    """A checkpoint's variables.

    Attributes:
        files: The data files, by their numbers in entries.
    """

    index: Path
    files: Sequence[Path]
    entries: Mapping[str, BundleEntry]

    def tensor(self, name: str) -> Tensor:
        """A variable, which is read on demand.

        Raises:
            ExportError: No BERT has it, or its entry contradicts itself or the file.
        """
        entry = self.entries[name]
        where = f"checkpoint {self.index.parent}: {self.index.name}"
        if entry.slices:
            raise ExportError(f"{where} has {name} as a partitioned variable, which is not supported")
        if entry.dtype not in _FLOATS:
            kind = _OTHERS.get(entry.dtype, f"TensorFlow type {entry.dtype}")
            raise ExportError(f"{where} has {name} as {kind}; only floating-point weights are supported")
        shape = tuple(dim.size for dim in entry.shape.dim)
        tensor = Tensor(_FLOATS[entry.dtype], shape, partial(self._read, name))
        if entry.shape.unknown_rank or min(shape, default=0) < 0 or tensor.size != entry.size:
            raise ExportError(f"{where} is damaged: {name} has {entry.size} bytes and the shape {list(shape)}")
        if not 0 <= entry.shard_id < len(self.files) or entry.offset < 0:
            raise ExportError(f"{where} is damaged: {name} is in none of its {len(self.files)} files")
        if entry.offset + entry.size > self.files[entry.shard_id].stat().st_size:
            raise ExportError(f"checkpoint {self.index.parent}: {self.files[entry.shard_id].name} ends before {name}")
        return tensor

    def _read(self, name: str) -> Bits:
        entry = self.entries[name]
        with self.files[entry.shard_id].open("rb") as stream:
            stream.seek(entry.offset)
            content = stream.read(entry.size)
        if _masked_crc(content) != entry.crc32c:
            raise ExportError(
                f"checkpoint {self.index.parent}: {self.files[entry.shard_id].name} is damaged: the checksum of {name} "
                f"differs from {self.index.name}"
            )
        shape = tuple(dim.size for dim in entry.shape.dim)
        return np.frombuffer(content, unsigned(_FLOATS[entry.dtype])).reshape(shape)


def read(index: Path) -> Bundle:
    """Reads a checkpoint's index.

    Raises:
        ExportError: The index is damaged or has another format, or a file is missing.
    """
    try:
        header, entries = _entries_of(index)
    except _DamagedError as damage:
        raise ExportError(f"checkpoint {index.parent}: {index.name} {damage}") from None
    except DecodeError as error:
        raise ExportError(f"checkpoint {index.parent}: {index.name} is damaged: {error}") from error
    prefix, count = index.name.removesuffix(INDEX), header.num_shards
    files = [index.with_name(f"{prefix}.data-{number:05d}-of-{count:05d}") for number in range(count)]
    if absent := [file.name for file in files if not file.is_file()]:
        raise ExportError(f"checkpoint {index.parent}: {index.name} names {absent[0]}, which is missing")
    return Bundle(index, files, entries)


def _entries_of(index: Path) -> tuple[BundleHeader, dict[str, BundleEntry]]:
    if index.stat().st_size > _LARGEST_INDEX:
        raise _DamagedError(f"has more than {_LARGEST_INDEX} bytes, the limit for an index")
    raw: dict[bytes, bytes] = {}
    last = b""
    for key, value in _table(index.read_bytes()):
        if raw and key <= last:
            raise _DamagedError("is damaged: its names are not in order")
        if len(raw) > _MAX_VARIABLES:
            raise _DamagedError(f"names more than {_MAX_VARIABLES} variables, the limit")
        raw[key] = value
        last = key
    if b"" not in raw:
        raise _DamagedError("is damaged: it has no header")
    header = BundleHeader.FromString(raw.pop(b""))
    if header.endianness != 0:
        raise _DamagedError("is big-endian, which is not supported")
    if header.version.min_consumer > _VERSION:
        raise _DamagedError(f"has format version {header.version.min_consumer}; supported: {_VERSION}")
    if not 1 <= header.num_shards <= _MAX_FILES:
        raise _DamagedError(f"is damaged: it names {header.num_shards} data files")
    # Keys that begin with a zero byte are slices, which the entries of their variables name.
    named = {key.decode(errors="backslashreplace"): value for key, value in raw.items() if key[0] != 0}
    return header, {name: BundleEntry.FromString(value) for name, value in named.items()}


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    footer = content[-_FOOTER:]
    if len(footer) < _FOOTER or not footer.endswith(_MAGIC):
        raise _DamagedError("is truncated, or not the index of a TensorFlow checkpoint")
    # Before it is the handle of a block of properties, which TensorFlow leaves empty.
    _, at = _handle(footer, 0)
    end = 0
    for _, value in _pairs(_block(content, *_handle(footer, at)[0])):
        (offset, size), _ = _handle(value, 0)
        if offset < end:
            raise _DamagedError("is damaged: its blocks are not in order")
        end = offset + size
        yield from _pairs(_block(content, offset, size))


def _block(content: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _TRAILER > len(content) - _FOOTER:
        raise _DamagedError("is damaged or truncated: a block lies beyond its end")
    kind, crc = struct.unpack_from("<BI", content, end)
    if _masked_crc(content[offset : end + 1]) != crc:
        raise _DamagedError("is damaged: a block does not match its checksum")
    if kind != _UNCOMPRESSED:
        raise _DamagedError("has compressed blocks, which are not supported; TensorFlow does not write them")
    return content[offset:end]


def _pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values; the restart points behind them are only for lookups."""
    restarts = struct.unpack_from("<I", block, len(block) - 4)[0] if len(block) >= 4 else 0  # noqa: PLR2004
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise _DamagedError("is damaged: a block has more restart points than bytes")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        size, at = _varint(block, at)
        if shared > len(key) or shared + own > _LONGEST_NAME or at + own + size > end:
            raise _DamagedError("is damaged: a name or a value is longer than its block allows")
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + size]
        at += own + size


def _handle(content: bytes, at: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and the position behind them."""
    offset, at = _varint(content, at)
    size, at = _varint(content, at)
    return (offset, size), at


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place, byte in enumerate(content[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:  # noqa: PLR2004  the bit that says that more follow
            return value, at + place + 1
    raise _DamagedError("is damaged or truncated: a number does not end")


def _masked_crc(content: bytes) -> int:
    """CRC-32C as LevelDB stores it: rotated by 15 bits plus a constant."""
    import google_crc32c  # noqa: PLC0415  of the extra `export`, which other verbs do without

    crc: int = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
