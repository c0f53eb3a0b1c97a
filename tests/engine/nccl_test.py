"""Sums and messages between GPUs, against a library made here behind NCCL's own C functions.

Ranks are threads, and GPUs this machine's memory: what is queued on a stream is done when the stream is waited for.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from ctypes import CFUNCTYPE, POINTER, addressof, c_int, c_size_t, c_void_p, create_string_buffer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from serving.engine.gpu import nccl
from serving.engine.gpu.nccl import Nccl, NcclError, UniqueId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from serving.engine.gpu.nccl import Communicator

RANKS = 3
REMOTE_ERROR, INVALID_ARGUMENT = 6, 4
TEXTS = {REMOTE_ERROR: create_string_buffer(b"remote"), INVALID_ARGUMENT: create_string_buffer(b"invalid")}
GONE = create_string_buffer(b"rank 1 is gone")
KINDS = {6: np.float16, 7: np.float32}


class Library:
    """NCCL without GPUs: C functions, so that arguments are passed as to the real one.

    Attributes:
        native: The functions.
        calls: Their names, in the order of the calls.
        queued: Work by stream.
        lost: Whether a rank is gone.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.queued: dict[int, list[Callable[[], None]]] = {}
        self.lost = False
        self._meeting = threading.Barrier(RANKS, timeout=10)
        self._sums: dict[int, NDArray[Any]] = {}
        self._sent: dict[tuple[int, int], NDArray[Any]] = {}
        self._arrived = {pair: threading.Event() for pair in np.ndindex(RANKS, RANKS)}
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
        """Does what a stream was given."""
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
        if bytes(unique_id) != bytes(range(nccl.ID_BYTES)) or not 0 <= rank < ranks == RANKS:
            return INVALID_ARGUMENT
        self._meeting.wait()
        comm[0] = 1 + rank
        return 0

    def _state(self, _comm: int, state: Any) -> int:
        state[0] = REMOTE_ERROR if self.lost else 0
        return 0

    def _give(self, stream: int, work: Callable[[], None]) -> int:
        self.queued.setdefault(stream, []).append(work)
        return 0

    def _reduce(self, ours: int, total: int, count: int, kind: int, operation: int, comm: int, stream: int) -> int:
        assert operation == 0

        def work() -> None:
            self._sums[comm] = at(ours, count, kind).copy()
            self._meeting.wait()
            at(total, count, kind)[:] = sum(self._sums[1 + rank] for rank in range(RANKS))
            self._meeting.wait()

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
    """Numbers where they lie."""
    size = count * np.dtype(KINDS[kind]).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), KINDS[kind])


def on_every_rank(library: Library, work: Callable[[int, Communicator], Any]) -> list[Any]:
    """What each rank answers that has joined by the id of the first, which goes to the others as bytes."""
    unique_id = Nccl(library.native).unique_id()
    assert len(unique_id) == nccl.ID_BYTES

    def joined(rank: int) -> Any:
        return work(rank, Nccl(library.native).join(unique_id, RANKS, rank))

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(joined, range(RANKS)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_partial_sums_are_added_up_in_the_stream(dtype: str) -> None:
    """Nothing is done before the stream comes to it; then each rank has the sum of all, in its own memory."""
    library = Library()

    def work(rank: int, communicator: Communicator) -> list[list[float]]:
        partial = np.arange(4, dtype=dtype) + 10 * rank
        before = partial.tolist()
        communicator.add_up(partial.ctypes.data, partial.size, dtype, 100 + rank)
        assert partial.tolist() == before
        library.wait(100 + rank)
        return list(partial.tolist())

    assert on_every_rank(library, work) == [[30, 33, 36, 39]] * RANKS


def test_a_stage_sends_to_the_next() -> None:
    """A hidden state arrives at the rank that it was sent to, and a ring of all ranks does not block."""
    library = Library()

    def work(rank: int, communicator: Communicator) -> list[float]:
        own, found = np.full(2, rank, np.float32), np.empty(2, np.float32)
        communicator.send(own.ctypes.data, 2, "float32", (rank + 1) % RANKS, 100 + rank)
        communicator.receive(found.ctypes.data, 2, "float32", (rank - 1) % RANKS, 100 + rank)
        library.wait(100 + rank)
        communicator.close()
        return list(found.tolist())

    assert on_every_rank(library, work) == [[2, 2], [0, 0], [1, 1]]
    assert library.calls == ["destroy"] * RANKS


def test_a_rank_that_is_gone_is_reported_with_its_reason() -> None:
    """Queued work fails later: who asks is told, and the communicator can still be aborted."""
    library = Library()

    def work(rank: int, communicator: Communicator) -> None:
        if rank == 0:
            communicator.check()
            library.lost = True
            with pytest.raises(NcclError, match=r"remote: rank 1 is gone \(NCCL error 6\)"):
                communicator.check()
            communicator.abort()

    on_every_rank(library, work)
    assert library.calls == ["abort"]


def test_a_call_that_is_refused_raises() -> None:
    """With the call, the library's words and its number; an id of another length is not sent at all."""
    found = Nccl(Library().native)
    assert found.version() == (2, 32, 3)
    with pytest.raises(NcclError, match=r"^ncclCommInitRank: invalid \(NCCL error 4\)$"):
        found.join(bytes(nccl.ID_BYTES), RANKS, 0)
    with pytest.raises(ValueError, match="128"):
        found.join(b"short", RANKS, 0)


def test_a_library_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what to install; the package is looked at before the system's library."""
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(nccl, "_LIBRARY", "libnothing.so.2")
    with pytest.raises(NcclError, match=r"libnothing\.so\.2.*pip install nvidia-nccl-cu13"):
        nccl.load()
    (folder / "libnothing.so.2").write_bytes(b"no library")
    with pytest.raises(NcclError, match=str(folder)):
        nccl.load()
