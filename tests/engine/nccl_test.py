"""Sums and messages between GPUs, against a library made up behind NCCL's own C functions.

Ranks are threads, and GPUs this machine's memory: what is queued on a stream is done when the stream is waited for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from serving.engine.gpu import nccl
from serving.engine.gpu.nccl import Nccl, NcclError
from tests.support.simulated_nccl import Library

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from serving.engine.gpu.nccl import Communicator

RANKS = 3


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
    library = Library(RANKS)

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
    library = Library(RANKS)

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
    library = Library(RANKS)

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
    found = Nccl(Library(RANKS).native)
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
