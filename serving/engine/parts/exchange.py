"""Exchange between the processes of a split model: tensors in shared memory, and messages that locate them.

Each lane has an arena, an anonymous file that all processes map. A lane has one batch at a time, so an arena has one
writer at a time: the receiver of the batch's last message. Messages are MessagePack over sequenced-packet sockets
(unix(7)), a few hundred bytes each. A socket that closes ends the process at its other end.
"""

from __future__ import annotations

import mmap
import os
import socket
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from numpy.typing import NDArray

ALIGNED = 64
"""Alignment of tensors: the bytes of a cache line."""

_PIECE = 1 << 21
"""Arenas grow by multiples of this many bytes."""

_MESSAGE_BYTES = 1 << 17

M = TypeVar("M")


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in an arena."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A batch in flight, with the tensors that the next part may read.

    Attributes:
        lane: Lane whose arena holds the tensors.
        end: Offset in the arena at which the next tensor may begin.
        fault: Why the batch cannot be computed; empty if it can.
    """

    lane: int
    end: int
    tensors: list[Placed]
    fault: str = ""


class Arena:
    """Shared memory for the tensors of one batch."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    def put(self, tensors: Iterable[tuple[str, NDArray[Any]]], at: int) -> tuple[list[Placed], int]:
        """Copies tensors to the arena from the offset `at` on; returns their places and the next free offset."""
        placed = []
        for name, array in tensors:
            self._reach(at + array.nbytes, grow=True)
            target = np.ndarray(array.shape, array.dtype, self._map, at)
            target[...] = array
            placed.append(Placed(name, array.dtype.str, array.shape, at))
            at += -(-array.nbytes // ALIGNED) * ALIGNED
        return placed, at

    def get(self, tensors: Iterable[Placed]) -> Mapping[str, NDArray[Any]]:
        """Returns views of tensors in the arena, which are valid until the lane's next batch."""
        views = {}
        for tensor in tensors:
            kind = np.dtype(tensor.dtype)
            self._reach(tensor.offset + int(np.prod(tensor.shape)) * kind.itemsize, grow=False)
            views[tensor.name] = np.ndarray(tensor.shape, kind, self._map, tensor.offset)
        return views

    def reserve(self, end: int) -> None:
        """Makes room for `end` bytes before several processes write at once, so none of them changes the size."""
        self._reach(end, grow=True)

    def _reach(self, end: int, *, grow: bool) -> None:
        """Maps at least `end` bytes; tensors of an earlier map keep that map alive."""
        end = max(end, 1)
        if self._map is not None and len(self._map) >= end:
            return
        size = os.fstat(self._descriptor).st_size
        if grow and size < end:
            size = max(2 * size, -(-end // _PIECE) * _PIECE)
            os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)


def pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a message socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: msgspec.Struct) -> None:
    end.sendall(msgspec.msgpack.encode(message))


def receive(end: socket.socket, kind: type[M]) -> M:
    """Waits for a message; raises EOFError if the other end has closed."""
    data = end.recv(_MESSAGE_BYTES)
    if not data:
        raise EOFError
    return msgspec.msgpack.decode(data, type=kind)
