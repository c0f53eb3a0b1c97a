"""NCCL between threads, whose GPUs are this machine's memory: what is queued is done when its stream comes to it."""

from __future__ import annotations

import ctypes
import threading
from ctypes import CFUNCTYPE, POINTER, addressof, c_int, c_size_t, c_void_p, create_string_buffer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.engine.gpu import nccl
from serving.engine.gpu.nccl import UniqueId

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

REMOTE_ERROR, INVALID_ARGUMENT = 6, 4
TEXTS = {REMOTE_ERROR: create_string_buffer(b"remote"), INVALID_ARGUMENT: create_string_buffer(b"invalid")}
GONE = create_string_buffer(b"rank 1 is gone")
KINDS = {6: np.float16, 7: np.float32}


class Library:
    """NCCL without GPUs: C functions, so that arguments are passed as to the real one."""

    def __init__(self, ranks: int, give: Callable[[int, Callable[[], None]], None] | None = None) -> None:
        """`give` queues work on a stream, in place of `queued`."""
        self.calls: list[str] = []
        self.queued: dict[int, list[Callable[[], None]]] = {}
        self.lost = False
        self.meeting = threading.Barrier(ranks, timeout=60)
        self._ranks = ranks
        self._queue = give or (lambda stream, work: self.queued.setdefault(stream, []).append(work))
        self._sums: dict[int, NDArray[Any]] = {}
        self._sent: dict[tuple[int, int], NDArray[Any]] = {}
        self._arrived = {pair: threading.Event() for pair in np.ndindex(ranks, ranks)}
        comm, stream, address = c_void_p, c_void_p, c_void_p
        reduce = CFUNCTYPE(c_int, address, address, c_size_t, c_int, c_int, comm, stream)(self._reduce)
        send, receive = (
            CFUNCTYPE(c_int, address, c_size_t, c_int, c_int, comm, stream)(one) for one in (self._send, self._receive)
        )
        self.native = SimpleNamespace(
            ncclGetVersion=CFUNCTYPE(c_int, POINTER(c_int))(self._version),
            ncclGetUniqueId=CFUNCTYPE(c_int, POINTER(UniqueId))(self._id),
            ncclCommInitRank=CFUNCTYPE(c_int, POINTER(comm), c_int, UniqueId, c_int)(self._join),
            ncclCommDestroy=CFUNCTYPE(c_int, comm)(lambda _comm: self._called("destroy")),
            ncclCommAbort=CFUNCTYPE(c_int, comm)(lambda _comm: self._called("abort")),
            ncclCommGetAsyncError=CFUNCTYPE(c_int, comm, POINTER(c_int))(self._state),
            ncclAllReduce=reduce,
            ncclSend=send,
            ncclRecv=receive,
            ncclGetErrorString=CFUNCTYPE(c_void_p, c_int)(lambda code: addressof(TEXTS[code])),
            ncclGetLastError=CFUNCTYPE(c_void_p, comm)(lambda _comm: addressof(GONE) if self.lost else None),
        )

    def wait(self, stream: int) -> None:
        for work in self.queued.pop(stream, []):
            work()

    def _called(self, name: str) -> int:
        self.calls.append(name)
        return 0

    def _version(self, number: Any) -> int:
        number[0] = 23203
        return 0

    def _id(self, made: Any) -> int:
        ctypes.memmove(made, bytes(range(nccl.ID_BYTES)), nccl.ID_BYTES)
        return 0

    def _join(self, comm: Any, ranks: int, unique_id: UniqueId, rank: int) -> int:
        if bytes(unique_id) != bytes(range(nccl.ID_BYTES)) or not 0 <= rank < ranks == self._ranks:
            return INVALID_ARGUMENT
        try:
            self.meeting.wait()
        except threading.BrokenBarrierError:
            return REMOTE_ERROR
        comm[0] = 1 + rank
        return 0

    def _state(self, _comm: int, state: Any) -> int:
        state[0] = REMOTE_ERROR if self.lost else 0
        return 0

    def _give(self, stream: int, work: Callable[[], None]) -> int:
        self._queue(stream, work)
        return 0

    def _reduce(self, ours: int, total: int, count: int, kind: int, operation: int, comm: int, stream: int) -> int:
        assert operation == 0

        def work() -> None:
            self._sums[comm] = at(ours, count, kind).copy()
            self.meeting.wait()
            at(total, count, kind)[:] = sum(self._sums[1 + rank] for rank in range(self._ranks))
            self.meeting.wait()

        return self._give(stream, work)

    def _send(self, address: int, count: int, kind: int, peer: int, comm: int, stream: int) -> int:
        def work() -> None:
            self._sent[comm - 1, peer] = at(address, count, kind).copy()
            self._arrived[comm - 1, peer].set()

        return self._give(stream, work)

    def _receive(self, address: int, count: int, kind: int, peer: int, comm: int, stream: int) -> int:
        def work() -> None:
            assert self._arrived[peer, comm - 1].wait(10)
            at(address, count, kind)[:] = self._sent[peer, comm - 1]

        return self._give(stream, work)


def at(address: int, count: int, kind: int) -> NDArray[Any]:
    size = count * np.dtype(KINDS[kind]).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), KINDS[kind])
