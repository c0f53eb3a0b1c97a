"""The wire protocol between the server and an engine process: fixed binary frames over Unix sockets.

    frame   := length u32 | kind u8 | pad u8 | model u16 | batch u64 | payload[length]
    RUN     := texts u32 | typed u32 | lengths u32[texts] | ids i32[sum] | type_ids i32[sum] if typed
    RESULT  := compute_us f64 | texts u32 | arrays u32 | finite u8[texts], padded to 8
               | for each array: dtype u32 (0 f32, 1 i32), ndim u32, dims u32[ndim], data[product]
    FAULT   := message, UTF-8, for the log
    STARTED := no payload, the first frame on the control socket
    LOAD, READY, REFUSED := JSON, once each, on the control socket

Both ends are on one machine and from one build, so numbers are in native byte order. Each RUN is answered by exactly
one RESULT or FAULT with the same batch number. Frames are packed by hand because ids and arrays are sent as they lie in
memory: a short text is packed in two steps, and a result is a view of the received bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from array import array
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
import numpy as np

from bertserve.serving.engine.base import (
    Batch,
    BatchOutput,
    LaneKind,
)
from bertserve.serving.records import EncodedText, ModelIndex
from bertserve.serving.scheduling.cost import CostPoint  # noqa: TC001  read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.records import Array

HEADER = struct.Struct("=IBxHQ")
FRAME_LIMIT_BYTES = 1 << 30

_MATRIX = 2
_RUN_HEAD = struct.Struct("=II")
_TEXTS_ONE = struct.Struct("=III")
_RESULT_HEAD = struct.Struct("=dII")
_RESULT_ONE = struct.Struct(f"{HEADER.format}dIIB7xIIII")
_ARRAY_HEAD = struct.Struct("=II")
_DIMS = tuple(struct.Struct(f"={ndim}I") for ndim in range(8))
_DTYPES = _FLOAT, _INT = np.dtype(np.float32), np.dtype(np.int32)


class Kind(IntEnum):
    RUN = 1
    RESULT = 2
    FAULT = 3
    LOAD = 4
    READY = 5
    REFUSED = 6
    STARTED = 7


KINDS = {int(kind): kind for kind in Kind}


class Ready(msgspec.Struct, frozen=True):
    """The engine's reply once every model is loaded and warm; `costs` has a list for each model."""

    engine: str
    lanes: list[LaneKind]
    threads: int
    version: str
    costs: list[list[CostPoint]]
    padded_to: list[int] = []


class Refused(msgspec.Struct, frozen=True):
    """The engine's reply if it cannot load: a message for the operator; `passing` if only memory was short."""

    message: str
    passing: bool = False


class WireError(Exception):
    """The other end broke the protocol, or the stream ended inside a frame."""


def pack(kind: int, payload: bytes, *, model: int = 0, batch: int = 0) -> bytes:
    return HEADER.pack(len(payload), kind, model, batch) + payload


def pack_run(number: int, batch: Batch) -> bytes:
    return pack(Kind.RUN, pack_texts(batch.texts), model=batch.model, batch=number)


def pack_texts(texts: Sequence[EncodedText]) -> bytes:
    """The payload of RUN."""
    if len(texts) == 1 and texts[0].type_ids is None:  # most short texts: the same bytes in one step
        ids = texts[0].ids
        return _TEXTS_ONE.pack(1, 0, len(ids)) + ids
    typed = any(text.type_ids is not None for text in texts)
    lengths = array("I", [len(text.ids) for text in texts])
    parts: list[bytes | array[int]] = [_RUN_HEAD.pack(len(texts), typed), lengths, *[text.ids for text in texts]]
    if typed:
        parts += [text.type_ids or bytes(4 * len(text.ids)) for text in texts]
    return b"".join(parts)


def unpack_run(model: int, payload: memoryview) -> Batch:
    return Batch(ModelIndex(model), unpack_texts(payload))


def unpack_texts(payload: memoryview) -> list[EncodedText]:
    """The texts of `pack_texts`."""
    texts, typed = _RUN_HEAD.unpack_from(payload)
    at = _RUN_HEAD.size + 4 * texts
    if texts == 1 and not typed:  # as in `pack_texts`
        return [EncodedText(array("i", bytes(payload[at:])))]
    lengths = payload[_RUN_HEAD.size : at].cast("I").tolist()
    ids = _split(payload[at:], lengths)
    if not typed:
        return [EncodedText(row) for row in ids]
    types = _split(payload[at + 4 * sum(lengths) :], lengths)
    return [EncodedText(row, kinds) for row, kinds in zip(ids, types, strict=True)]


def _split(numbers: memoryview, lengths: Sequence[int]) -> list[array[int]]:
    rows = []
    at = 0
    for length in lengths:
        row = array("i")
        row.frombytes(numbers[at : at + 4 * length])
        rows.append(row)
        at += 4 * length
    return rows


def pack_result(number: int, output: BatchOutput) -> bytes:
    texts, arrays = len(output.finite), output.arrays
    if texts == 1 and len(arrays) == 1 and arrays[0].ndim == _MATRIX and arrays[0].dtype == _FLOAT:  # as `pack_texts`
        values = arrays[0]
        size = _RESULT_ONE.size - HEADER.size + values.nbytes
        head = (size, Kind.RESULT, 0, number, output.compute_us, 1, 1, output.finite[0], 0, _MATRIX, *values.shape)
        return _RESULT_ONE.pack(*head) + values.tobytes()
    parts = [_RESULT_HEAD.pack(output.compute_us, texts, len(arrays)), bytes(output.finite), bytes(-texts % 8)]
    for values in arrays:
        dtype = int(values.dtype == _INT)
        parts += (_ARRAY_HEAD.pack(dtype, values.ndim), _DIMS[values.ndim].pack(*values.shape))
        parts.append(values.astype(_DTYPES[dtype], copy=False).tobytes())
    return pack(Kind.RESULT, b"".join(parts), batch=number)


def unpack_result(payload: bytes) -> BatchOutput:
    """Returns the output in a RESULT frame; its arrays are read-only views of the payload."""
    compute_us, texts, count = _RESULT_HEAD.unpack_from(payload)
    at = _RESULT_HEAD.size
    finite = list(map(bool, payload[at : at + texts]))
    at += texts + (-texts % 8)
    arrays = []
    for _ in range(count):
        dtype, ndim = _ARRAY_HEAD.unpack_from(payload, at)
        dims = _DIMS[ndim]
        at += _ARRAY_HEAD.size
        array: Array = np.ndarray(dims.unpack_from(payload, at), _DTYPES[dtype], payload, at + dims.size)
        arrays.append(array)
        at += dims.size + array.nbytes
    return BatchOutput(arrays, finite, compute_us)


class Channel:
    """The blocking end of a socket, for the engine process.

    Attributes:
        spin_s: Seconds to poll for the next frame without sleeping, if the previous one came within that time. To wake
            a thread, and the core that slept with it, takes longer than a single request costs otherwise.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.spin_s = 0.0
        self._spins = False
        self._buffer = memoryview(bytearray(1 << 16))
        self._filled = 0
        self._start = 0

    def receive(self) -> tuple[Kind, int, int, memoryview]:
        """Waits for a frame: (kind, model, batch, payload). The payload is valid until the next call.

        Raises:
            EOFError: The other end closed the socket between frames.
            WireError: The other end closed the socket inside a frame, or sent an invalid frame.
        """
        left = self._filled - self._start
        if left:
            self._buffer[:left] = bytes(self._buffer[self._start : self._filled])
        self._start, self._filled = 0, left
        self._fill(HEADER.size)
        length, kind, model, batch = HEADER.unpack_from(self._buffer)
        if length > FRAME_LIMIT_BYTES:
            raise WireError("a frame is longer than frames may be")
        self._start = HEADER.size + length
        self._fill(self._start)
        return KINDS[kind], model, batch, self._buffer[HEADER.size : self._start]

    def send(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def _fill(self, wanted: int) -> None:
        if len(self._buffer) < wanted:
            grown = memoryview(bytearray(max(wanted, 2 * len(self._buffer))))
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown
        while self._filled < wanted:
            received = self._receive(self._buffer[self._filled :])
            if received == 0:
                if self._filled:
                    raise WireError("the socket closed inside a frame")
                raise EOFError
            self._filled += received

    def _receive(self, room: memoryview) -> int:
        if not self.spin_s:
            return self._socket.recv_into(room)
        end = time.perf_counter() + self.spin_s
        while self._spins and time.perf_counter() < end:
            try:
                return self._socket.recv_into(room, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        received = self._socket.recv_into(room)
        self._spins = time.perf_counter() < end
        return received


K = TypeVar("K")


class FrameReader(Generic[K]):
    """Splits the byte stream of a non-blocking socket into frames, for the server process.

    Pieces of a frame are joined once the last one has arrived, so a large frame costs time linear in its size.
    """

    def __init__(self, kinds: Mapping[int, K]) -> None:
        """Reads frames of these kinds, by their numbers."""
        self._kinds = kinds
        self._pieces: list[bytes] = []
        self._held = 0
        self._wanted = 0

    def feed(self, data: bytes) -> list[tuple[K, int, int, bytes]]:
        """Returns the frames (kind, model, batch, payload) that are complete now."""
        if self._pieces:
            self._pieces.append(data)
            self._held += len(data)
            if self._held < self._wanted:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
        frames = []
        size = len(data)
        at, start, end = 0, HEADER.size, HEADER.size
        while start <= size:
            length, kind, model, batch = HEADER.unpack_from(data, at)
            end = start + length
            if end > size:
                break
            frames.append((self._kinds[kind], model, batch, data[start:end]))
            at = end
            start = end = at + HEADER.size
        if at < size:
            self._pieces.append(data[at:])
            self._held, self._wanted = size - at, end - at
        return frames
