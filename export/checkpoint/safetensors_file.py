"""Safetensors files, written tensor by tensor and mapped, for every number type, without PyTorch."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from numpy.typing import NDArray

    Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Bytes of a number of each type, by the names of safetensors."""


@dataclass(slots=True, frozen=True)
class Tensor:
    """A tensor that is read on demand.

    Attributes:
        dtype: A key of `BYTES`.
        bits: Reads it: an array of its shape, of unsigned integers as wide as its numbers. Reordering does not need to
            know bfloat16, which NumPy lacks.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: Callable[[], Bits]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * BYTES[self.dtype]


def unsigned(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """The little-endian unsigned integer type of a number type."""
    return np.dtype(f"<u{BYTES[dtype]}")


def write(tensors: Mapping[str, Tensor], out: BinaryIO) -> None:
    """Writes a file tensor by tensor, without a second copy of all tensors in memory."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.size
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors.values():
        out.write(np.ascontiguousarray(tensor.bits()).reshape(-1).view(np.uint8).data)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `write` wrote, mapped."""
    with path.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return {
        name: Tensor(
            entry["dtype"],
            tuple(entry["shape"]),
            partial(_map, path, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0]),
        )
        for name, entry in header.items()
    }


def _map(path: Path, dtype: str, shape: tuple[int, ...], offset: int) -> Bits:
    if 0 in shape:
        return np.zeros(shape, unsigned(dtype))
    return np.memmap(path, unsigned(dtype), "r", offset, shape)
