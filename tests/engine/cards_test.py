"""A model split between simulated GPUs: real graphs that ONNX Runtime's CPU provider runs, and sums of a made-up NCCL.

Ranks are threads here. That a process that ends takes all others with it tests/export/split_test.py shows on CPUs.
"""

from __future__ import annotations

import os
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from export.graph import optimize, task_model
from export.split import ranks as split_ranks
from serving.engine.base import LaneKind, Load
from serving.engine.cpu.ort import OrtCpuBackend
from serving.engine.gpu.cuda_driver import Driver
from serving.engine.gpu.nccl import Nccl, NcclError
from serving.engine.parts import cards, chain, processes
from serving.engine.parts.exchange import Arena, pair, receive, send
from serving.engine.parts.processes import Card, Loaded, Order
from serving.engine.process.warm_up import warm_up
from serving.engine.process.worker import open_backend
from serving.errors import BundleError
from serving.records import Batch, EncodedText, ModelIndex
from tests.support.checkpoints import write_task_checkpoint
from tests.support.exports import opened
from tests.support.gpus import without_gpu
from tests.support.short_form import in_short
from tests.support.simulated.cuda.bindings import driver as simulated
from tests.support.simulated_gpus import Bench
from tests.support.simulated_nccl import Library
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from socket import socket

    from numpy.typing import NDArray

    from serving.engine.base import Backend
    from serving.records import ModelSpec

MODEL = ModelIndex(0)
MASK_ID = 4
LARGEST_BATCH_TOKENS = 128
TASKS = ("embed", "fill_mask")
SMALL = {"vocab_size": 4_000}

# Watching threads of ranks go on for as long as their process, here beyond their test, whose library goes before them.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(scope="module", params=in_short(TASKS, "embed"))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, ModelSpec]:
    """A tiny model: whole, and by the number of its ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = opened(write_task_checkpoint(folder / "checkpoint", "bert", request.param, **SMALL))
    task_model.write(task_model.load(checkpoint), folder / "raw.onnx")
    optimize.fuse(folder / "raw.onnx", folder / "fused.onnx", optimize.shape_of(checkpoint))
    found = {1: task_model.spec_of(checkpoint, folder / "fused.onnx")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_ranks, "SLACK", 10)  # so small a model is hardly anything but what every rank has
        for count in (2, 4):
            files = split_ranks.split(
                folder / "fused.onnx", count, lambda rank, step, of=count: folder / f"{rank}of{of}.{step}.onnx"
            )
            found[count] = task_model.spec_of(checkpoint, *files, split=count, split_by="tensors")
    return found


class Cards:
    """GPUs, the library between them, and ranks that are threads.

    Attributes:
        ended: Why all ranks would have been ended.
        lose: Which rank does nothing with its batches.
    """

    def __init__(self, patch: pytest.MonkeyPatch, count: int) -> None:
        gpu = {"name": "Simulated T4", "capability": [7, 5], "memory": 1 << 30}
        self.bench = Bench(patch, {"gpus": [gpu] * (1 + count)})
        self.count = count
        self.library = Library(count, simulated.give)
        self.ended: list[str] = []
        self.lose = -1
        self._sockets: list[socket] = []
        self._threads: list[threading.Thread] = []
        patch.setattr(cards, "_CHECK_S", 0.01)
        patch.setattr(cards, "pair", self._pair)
        patch.setattr(cards, "start", self._start)
        patch.setattr(cards, "end", self._end)
        patch.setattr(cards.nccl, "load", lambda: Nccl(self.library.native))
        patch.setattr(cards.cuda_driver, "load", lambda: Driver(simulated))

    def open(self, model: ModelSpec) -> Backend:
        """The engine, by the engine process's own way; the first GPU is somebody else's."""
        gpus = list(range(1, 1 + self.count))
        backend, _ = open_backend(
            Load("ort-cuda", [model], threads=1, max_batch_tokens=LARGEST_BATCH_TOKENS, gpus=gpus)
        )
        return backend

    def close(self) -> None:
        """Ends the ranks: the next test has other GPUs at the same place."""
        self.library.meeting.abort()
        for each in self._sockets:
            each.close()
        for thread in self._threads:
            thread.join()

    def _pair(self) -> tuple[socket, socket]:
        ends = pair()
        self._sockets += ends
        return ends

    def _end(self, why: str) -> None:
        self.ended.append(why)
        raise SystemExit

    def _start(self, name: str, kind: str, ways: Sequence[Sequence[socket]], arenas: Sequence[int]) -> socket:
        assert (name.split(" of ")[1], kind) == (str(self.count), "rank")
        control, theirs = self._pair()
        ((inbox,),), (arena,) = ways, arenas
        self._threads.append(threading.Thread(target=self._rank, args=(theirs, inbox.dup(), arena), daemon=True))
        self._threads[-1].start()
        return control

    def _rank(self, control: socket, inbox: socket, arena: int) -> None:
        """What the process of a rank does."""
        with control, inbox:
            order = receive(control, Order)
            assert order.card is not None
            assert order.card.gpu == 1 + order.rank
            rank = cards.open_rank(order, order.card)
            send(control, Loaded(rank.interfaces))
            if order.rank == self.lose:
                rank.join(Nccl(self.library.native), order.card, order.rank)
                inbox.recv(1 << 17)
                return
            with suppress(EOFError, OSError, NcclError, threading.BrokenBarrierError):
                cards.serve(rank, order, order.card, inbox, Arena(arena))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Cards]]:
    """Makes a machine with so many GPUs for ranks."""
    made: list[Cards] = []

    def make(count: int) -> Cards:
        made.append(Cards(monkeypatch, count))
        return made[-1]

    yield make
    for each in made:
        each.close()


def texts(*lengths: int) -> list[EncodedText]:
    """Texts of these lengths, each with a mask token where there is room."""
    rng = np.random.default_rng(7)
    made = [rng.integers(5, 900, length) for length in lengths]
    for ids in made:
        ids[1:2] = MASK_ID
    return [EncodedText(array("i", ids.tolist())) for ids in made]


def cosine(left: NDArray[Any], right: NDArray[Any]) -> float:
    """Of all of an output's numbers; 1 where both are zero."""
    one, other = (each.astype(np.float64).ravel() for each in (left, right))
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else float(np.array_equal(one, other))


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_answers_are_those_of_the_whole(
    machine: Callable[[int], Cards], models: dict[int, ModelSpec], count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone, padded in both directions and in several runs; the log says that nobody has tried it on a card."""
    whole = OrtCpuBackend([models[1]], 1)
    gpus = machine(count)
    split = gpus.open(models[count])
    assert list(split.lanes()) == [LaneKind.WIDE]
    for lengths in ((9,), (3, 20, 17), (32,), (5,) * 5, (32,) * 9, (9,)):
        batch = Batch(MODEL, texts(*lengths))
        found, expected = split.runner(0).run(batch), whole.runner(0).run(batch)
        assert found.finite == [True] * len(lengths)
        assert [each.shape for each in found.arrays] == [each.shape for each in expected.arrays]
        assert min(map(cosine, found.arrays, expected.arrays)) >= 0.99999, lengths
    assert f"run by {count} GPUs together, which has never been tried on a card" in caplog.text
    assert not gpus.ended


def test_it_is_warmed_up_as_every_engine(machine: Callable[[int], Cards], models: dict[int, ModelSpec]) -> None:
    """Its costs are measured by the shapes that batches are padded to."""
    split = machine(2).open(models[2])
    (points,) = warm_up(split, [models[2]], [], LARGEST_BATCH_TOKENS)
    assert {point.kind for point in points} == {"wide"}
    assert all(point.us > 0 for point in points)


def test_a_rank_that_is_lost_ends_all(machine: Callable[[int], Cards], models: dict[int, ModelSpec]) -> None:
    """Its sum never comes: NCCL tells of the loss, and whoever waits for the stream is not waited for."""
    gpus = machine(2)
    gpus.lose = 1
    split = gpus.open(models[2])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(split.runner(0).run, Batch(MODEL, texts(9)))
        wait_for(lambda: gpus.library.meeting.n_waiting, "the first rank's sum")
        assert not gpus.ended
        gpus.library.lost = True
        wait_for(lambda: gpus.ended, "the end")
        gpus.library.meeting.abort()
        assert isinstance(answer.exception(), threading.BrokenBarrierError)
    assert "is lost: ncclCommGetAsyncError: remote: rank 1 is gone (NCCL error 6)" in gpus.ended[0]


def test_a_batch_that_fails_in_the_first_rank_ends_all(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], Cards], models: dict[int, ModelSpec]
) -> None:
    """The others may have begun it, and their sums would be added to the next one's."""
    gpus = machine(2)
    split = gpus.open(models[2])

    def refuse(*_: object) -> None:
        raise NcclError("ncclAllReduce", 1, "unhandled cuda error")

    monkeypatch.setattr(cards.nccl.Communicator, "add_up", refuse)
    with pytest.raises(SystemExit):
        split.runner(0).run(Batch(MODEL, texts(9)))
    assert gpus.ended == ["a batch failed in a rank: ncclAllReduce: unhandled cuda error (NCCL error 1)"]


def test_what_cannot_be_run_by_several_cards_is_refused(
    monkeypatch: pytest.MonkeyPatch, machine: Callable[[int], Cards], models: dict[int, ModelSpec]
) -> None:
    """Too few GPUs, and a machine without NCCL: before any process is started."""
    gpus = machine(1)
    monkeypatch.setattr(cards, "start", None)
    with pytest.raises(BundleError, match=r"is split between 2 GPUs, and has 1"):
        gpus.open(models[2])
    gpus.count = 2

    def missing() -> Nccl:
        raise NcclError("dlopen", -1, "no such file; pip install nvidia-nccl-cu13")

    monkeypatch.setattr(cards.nccl, "load", missing)
    with pytest.raises(BundleError, match="cannot be run by several GPUs: dlopen: no such file; pip install"):
        gpus.open(models[2])


@without_gpu
def test_a_rank_whose_card_is_not_there_refuses_by_its_name(models: dict[int, ModelSpec]) -> None:
    """The very process of a rank, on this machine."""
    ours, inbox = pair()
    arena = os.memfd_create("arena")
    control = processes.start("rank 2 of 2", "rank", [[inbox]], [arena])
    send(control, Order(chain.ranks(models[2])[1], 1, 0, 1, Card(1, 2, bytes(128), LARGEST_BATCH_TOKENS)))
    with pytest.raises(BundleError, match=r"^rank 2 of .* cannot run on GPU 1: no NVIDIA driver is in use here"):
        processes.loaded("rank 2 of 2", control)
    for each in (ours, inbox, control):
        each.close()
    os.close(arena)
