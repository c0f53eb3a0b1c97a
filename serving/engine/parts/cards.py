"""A model whose layers are split by tensors, on several GPUs of one machine. It has never been run on a card.

As in `ranks`, the first rank is in the engine process and each other one in a process of its own, here with a GPU for
each. A rank queues its segments into one stream, and behind each segment NCCL's sum of what it answers in part; the
host waits for all of it at once. So that no rank waits for a lost one, any failure ends all of them.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from serving.engine.cpu.ort import RUN_ERRORS, GraphPart
from serving.engine.gpu import cuda_driver, nccl, ort_cuda
from serving.engine.gpu.cuda import Device
from serving.engine.gpu.cuda_driver import CudaError
from serving.engine.gpu.model import GpuModel, ModelBuffers, Shape, lengths_for, shapes_for
from serving.engine.gpu.nccl import NcclError
from serving.engine.parts import chain
from serving.engine.parts.exchange import Arena, Step, pair, receive, send
from serving.engine.parts.processes import Card, Order, end, loaded, start
from serving.errors import BundleError
from serving.records import IDS, PARTIAL, POSITIONS

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from serving.engine.gpu.model import GraphBudget
    from serving.engine.gpu.nccl import Communicator
    from serving.records import ModelSpec

log = logging.getLogger("bertserve.engine")

_CHECK_S = 0.2
"""Between two questions whether a rank is lost: its sums would be waited for without end."""


class Rank:
    """One rank's work on a batch, queued into the stream of its GPU.

    Attributes:
        shapes: All that a batch may be padded to.
        buffers: The batch's tensors and, of the first rank, the answers.
        interfaces: Of its segments.
    """

    def __init__(self, graphs: Sequence[ModelSpec], device: Device, max_batch_tokens: int, *, first: bool) -> None:
        """Loads the segments; raises BundleError where one cannot be, and CudaError."""
        # Only the first rank answers; the others end with the last sum.
        model = graphs[0] if first else msgspec.structs.replace(graphs[0], outputs=())
        self.device = device
        self.shapes = shapes_for(model, lengths_for(model.max_length), max_batch_tokens)
        self.buffers = ModelBuffers(device, model, self.shapes)
        sessions = [ort_cuda.open_session(graph, device, graphs=False) for graph in graphs]
        self.interfaces = [chain.interface(GraphPart(session)) for session in sessions]
        self._segments = list(zip(sessions, self.interfaces, strict=True))[: None if first else -1]
        self._answers = {spec.name: spec for spec in model.outputs}
        self._options = ort_cuda.run_options(ort_cuda.NO_GRAPH)
        self._communicator: Communicator

    def join(self, library: nccl.Nccl, card: Card, number: int) -> Communicator:
        """Waits until every rank has joined; raises NcclError."""
        self._communicator = library.join(card.unique_id, card.ranks, number)
        return self._communicator

    def enqueue(self, shape: Shape) -> None:
        """Queues everything between the buffers; raises NcclError, or what ONNX Runtime raises."""
        # What is let go at the end may still be in use on the GPU: who gets its memory comes later in the same stream.
        held: dict[str, Any] = {}
        ordinal, stream = self.device.gpu.ordinal, self.device.stream
        for session, segment in self._segments:
            binding = session.io_binding()
            for name, _ in segment.inputs:
                if name in held:
                    binding.bind_ortvalue_input(name, held[name])
                else:
                    address = self.buffers.inputs[name].address
                    binding.bind_input(name, "cuda", ordinal, np.int32, shape.input(name), address)
            for name, *_ in segment.outputs:
                if name in self._answers:
                    spec, address = self._answers[name], self.buffers.outputs[name].address
                    kind = np.dtype(spec.dtype).type
                    binding.bind_output(name, "cuda", ordinal, kind, shape.output(spec), address)
                else:
                    binding.bind_output(name, "cuda", ordinal)
            session.run_with_iobinding(binding, self._options)
            for (name, *_), value in zip(segment.outputs, binding.get_outputs(), strict=True):
                if name.endswith(PARTIAL):
                    self._communicator.add_up(value.data_ptr(), math.prod(value.shape()), "float32", stream)
                held[name.removesuffix(PARTIAL)] = value


class _AllRanks:
    """The `Program` of the first rank: what it queues, all others queue too."""

    records_itself = True

    def __init__(self, rank: Rank, outboxes: Sequence[socket.socket], arena: Arena) -> None:
        self._rank, self._outboxes, self._arena = rank, outboxes, arena

    def prepare(self, shape: Shape, *, graph: bool) -> None:
        """Nothing: segments are bound anew for each batch."""

    def enqueue(self, shape: Shape) -> None:
        tensors = {name: buffer.view(shape.input(name)) for name, buffer in self._rank.buffers.inputs.items()}
        # Every rank has read the last batch: its sums would not be done otherwise.
        placed, at = self._arena.put(tensors.items(), 0)
        try:
            for outbox in self._outboxes:
                send(outbox, Step(0, at, placed))
            self._rank.enqueue(shape)
        except (OSError, NcclError, *RUN_ERRORS) as error:
            end(f"a batch failed in a rank: {error}")


class _SplitModel(GpuModel):
    def capture(self, budget: GraphBudget) -> None:
        """Nothing: no graph reaches over several GPUs here."""


def load(model: ModelSpec, device: Device, max_batch_tokens: int, gpus: Sequence[int]) -> GpuModel:
    """As `ort_cuda.load`; of a model in ranks each has one of the GPUs, the first one the device.

    Raises:
        BundleError: A rank cannot be served, or NCCL is not here.
        CudaError: The GPU has no room, or failed.
    """
    if model.split_by is None:
        return ort_cuda.load(model, device, max_batch_tokens)
    if len(gpus) < model.ranks:
        raise BundleError(f"{model.name} is split between {model.ranks} GPUs, and has {len(gpus)}")
    log.warning("%s is run by %d GPUs together, which has never been tried on a card", model.name, model.ranks)
    try:
        library = nccl.load()
        unique_id = library.unique_id()
        cards = [Card(gpu, model.ranks, unique_id, max_batch_tokens) for gpu in gpus[: model.ranks]]
        return _start(model, device, library, cards)
    except NcclError as error:
        raise BundleError(f"{model.name} cannot be run by several GPUs: {error}") from error


def _start(model: ModelSpec, device: Device, library: nccl.Nccl, cards: Sequence[Card]) -> GpuModel:
    graphs = chain.ranks(model)
    descriptor = os.memfd_create(model.name)
    controls, outboxes = [], []
    for number in range(1, model.ranks):
        outbox, inbox = pair()
        name = f"rank {number + 1} of {model.ranks} of {model.name}"
        with inbox:
            control = start(name, "rank", [[inbox]], [descriptor])
        send(control, Order(graphs[number], threads=1, nice=0, rank=number, card=cards[number]))
        controls.append((name, control))
        outboxes.append(outbox)
    rank = Rank(graphs[0], device, cards[0].max_batch_tokens, first=True)
    chain.check(model, rank.interfaces)
    for name, control in controls:
        chain.check(model, loaded(name, control))
    # Only now: who joins waits for all, and a rank that was refused would not come.
    communicator = rank.join(library, cards[0], 0)
    threading.Thread(target=_watch, args=(model.name, communicator), daemon=True).start()
    program = _AllRanks(rank, outboxes, Arena(descriptor))
    return _SplitModel(device, model, rank.buffers, program, rank.shapes)


def _watch(name: str, communicator: Communicator) -> None:
    """Ends all ranks when one is lost; a process that ends does so by itself, see `processes`."""
    while True:
        time.sleep(_CHECK_S)
        try:
            communicator.check()
        except NcclError as error:
            end(f"a rank of {name} is lost: {error}")


def open_rank(order: Order, card: Card) -> Rank:
    """The rank of this process; raises BundleError where it cannot be served."""
    try:
        device = Device(cuda_driver.load(), card.gpu)
        ort_cuda.preload()
        return Rank(order.graphs, device, card.max_batch_tokens, first=False)
    except CudaError as error:
        where = f"rank {order.rank + 1} of {order.graphs[0].name} cannot run on GPU {card.gpu}"
        raise BundleError(f"{where}: {cuda_driver.explained(error)}") from error


def serve(rank: Rank, order: Order, card: Card, inbox: socket.socket, arena: Arena) -> NoReturn:
    """Joins the others and works on every batch; raises EOFError or OSError when the first rank has ended.

    Whatever else it raises must end the process, and so all others.
    """
    rank.join(nccl.load(), card, order.rank)
    while True:
        tensors = arena.get(receive(inbox, Step).tensors)
        rows, length = tensors[IDS].shape
        shape = Shape(rows, length, tensors[POSITIONS].shape[1] if POSITIONS in tensors else 0)
        for name, values in tensors.items():
            buffer = rank.buffers.inputs[name]
            buffer.view(values.shape)[...] = values
            buffer.send(values.shape)
        rank.enqueue(shape)
        rank.device.wait()
