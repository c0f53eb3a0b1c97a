"""A model on a GPU: batches are padded to a small set of shapes, copied, run and copied back.

A shape is a batch size (1, 2, 4, ... texts) in a sequence bucket. Every shape within the batch's token budget gets a
graph while the model loads, smallest first, until the memory for graphs is used. The others queue the same work call by
call. A batch's cost depends on its shape alone.
"""

from __future__ import annotations

import itertools
import logging
import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from bertserve.serving.engine.base import Batch, BatchOutput, LaneKind
from bertserve.serving.engine.batches import Padder, finite_rows
from bertserve.serving.engine.gpu.cuda import Buffer
from bertserve.serving.engine.gpu.cuda_driver import CudaError
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.records import IDS, MASK, POSITIONS
from bertserve.serving.scheduling.cost import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.serving.engine.base import Runner
    from bertserve.serving.engine.batches import Tensors
    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array, TensorSpec

log = logging.getLogger("bertserve.engine")

SIZES = (1, 2, 4, 8, 16, 32)
"""Batch sizes in texts. Others are padded up; larger batches run in several executions."""

MASK_SIZES = (1, 2, 4, 8, 16)
"""Mask counts per text, padded up likewise; the optimization profiles of engines end at the largest."""

GRAPH_BYTES = 1 << 30

_MIB = 1 << 20

_FULL = re.compile(r"out ?of ?memory|failed to allocate memory|not enough memory", re.IGNORECASE)
"""Out-of-memory messages of libraries; the driver itself has a code for it."""


class Shape(NamedTuple):
    """The shape that a batch is padded to; `masks` is 0 if the model takes no mask positions."""

    rows: int
    length: int
    masks: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def input(self, name: str) -> tuple[int, int]:
        return self.rows, self.masks if name == POSITIONS else self.length

    def output(self, spec: TensorSpec) -> tuple[int, ...]:
        """Returns an output's shape: its dynamic dimension after the rows is the masks, or else the tokens."""
        return self.rows, *(size if size >= 0 else self.masks or self.length for size in spec.shape[1:])


class ProgramError(Exception):
    """The library failed to queue a model's work; the message is for the log."""


class Program(Protocol):
    """Queues a model's work on a device's stream, with the buffer addresses that it was created with.

    Attributes:
        records_itself: Whether the library keeps graphs of its own; otherwise they are captured here.
    """

    records_itself: bool

    def prepare(self, shape: Shape, *, graph: bool) -> None:
        """Prepares a shape before its first run; with `graph`, a library that keeps graphs makes one."""

    def enqueue(self, shape: Shape) -> None:
        """Queues the work for a shape; raises ProgramError if the library fails."""


class GraphBudget:
    """The memory limit for the graphs of all models on a GPU; `used` is in bytes."""

    def __init__(self, device: Device, limit: int | None = None) -> None:
        self._device = device
        self._limit = GRAPH_BYTES if limit is None else limit
        self._last = 0
        self.used = 0

    @property
    def allows(self) -> bool:
        """Whether another graph as large as the last one may be made."""
        return self.used + self._last <= self._limit and self._device.has_room(self._last)

    def spend(self, free_before: int) -> None:
        """Counts the memory taken since `free_before` bytes were free."""
        self._last = max(0, free_before - self._device.driver.memory()[0])
        self.used += self._last


def lengths_for(max_length: int) -> list[int]:
    """Returns the sequence buckets of a model; the last one is its maximum length.

    >>> lengths_for(100)
    [16, 32, 64, 100]
    """
    return [*itertools.takewhile(lambda bucket: bucket < max_length, BUCKETS), max_length]


class ModelBuffers:
    """The buffers of a model's inputs and outputs by name, each large enough for the largest shape."""

    def __init__(self, device: Device, spec: ModelSpec, shapes: Sequence[Shape]) -> None:
        self.inputs = {
            name: Buffer(device, "int32", max(int(np.prod(shape.input(name))) for shape in shapes))
            for name in spec.inputs
        }
        self.outputs = {
            output.name: Buffer(device, output.dtype, max(int(np.prod(shape.output(output))) for shape in shapes))
            for output in spec.outputs
        }


class GpuModel:
    """A model with graphs of its shapes. One thread may use it at a time.

    Attributes:
        shapes: All shapes that a batch may be padded to, the smallest batches first.
    """

    def __init__(
        self, device: Device, spec: ModelSpec, tensors: ModelBuffers, program: Program, shapes: Sequence[Shape]
    ) -> None:
        self.spec = spec
        self._device = device
        self._tensors = tensors
        self._program = program
        self._graphs: dict[Shape, int] = {}
        self._prepared: set[Shape] = set()
        self._padder = Padder(spec)
        self._pad_id = spec.special_ids.get("pad", 0)
        self.shapes = sorted(shapes, key=lambda shape: (shape.rows * max(1, shape.masks), shape.length))
        self._lengths = sorted({shape.length for shape in shapes})
        self._most: dict[int, int] = defaultdict(int)
        for shape in shapes:
            self._most[shape.length] = max(self._most[shape.length], shape.rows)

    def capture(self, budget: GraphBudget) -> None:
        """Makes the graphs, those of the smallest batches first, until the memory for them is used.

        Raises:
            CudaError: The GPU failed.
            ProgramError: The library failed.
        """
        started, made = time.perf_counter(), 0
        shapes = [shape for shape in self.shapes if shape.masks <= 1]
        for shape in shapes:
            if not budget.allows:
                break
            free, _ = self._device.driver.memory()
            self._prepare(shape, graph=True)
            budget.spend(free)
            made += 1
        log.info(
            "%s: graphs of %d of %d shapes in %.2f s, %d MiB on the GPU",
            *(self.spec.name, made, len(shapes), time.perf_counter() - started, budget.used // _MIB),
        )

    def run(self, batch: Batch) -> BatchOutput:
        """Runs a batch; one that is larger than all shapes runs in several executions.

        Raises:
            EngineFault: It failed, and the GPU still works.
            DeviceLost: The GPU no longer works.
        """
        started = time.perf_counter()
        try:
            self._device.enter()
            arrays = self._computed(batch)
        except CudaError as error:
            self._device.check(str(error), lost=error.sticky or error.out_of_memory)
            raise EngineFault(f"CUDA: {error}") from error
        except ProgramError as error:
            self._device.check(str(error), lost=_FULL.search(str(error)) is not None)
            raise EngineFault(str(error)) from error
        finite = finite_rows(arrays, len(batch.texts))
        return BatchOutput(arrays, finite, (time.perf_counter() - started) * 1e6)

    def _computed(self, batch: Batch) -> list[Array]:
        tensors = self._padder.tensors(batch)
        length = _fitting(self._lengths, batch.padded_length)
        most, rows = self._most[length], []
        for at in range(0, len(batch.texts), most):
            part = {name: values[at : at + most] for name, values in tensors.items()}
            rows.append(self._masked(part, length, batch.padded_length))
        return rows[0] if len(rows) == 1 else _join(rows, axis=0)

    def _masked(self, tensors: Tensors, length: int, padded: int) -> list[Array]:
        """Returns the outputs for a part of a batch; more masks than a shape holds run in several executions."""
        if POSITIONS not in tensors:
            return self._once(tensors, Shape(_fitting(SIZES, len(tensors[IDS])), length), padded)
        positions = tensors[POSITIONS]
        parts = []
        for at in range(0, positions.shape[1], MASK_SIZES[-1]):
            some = positions[:, at : at + MASK_SIZES[-1]]
            masks = _fitting(MASK_SIZES, some.shape[1])
            shape = Shape(_fitting(SIZES, len(positions)), length, masks)
            parts.append(self._once({**tensors, POSITIONS: some}, shape, some.shape[1]))
        return parts[0] if len(parts) == 1 else _join(parts, axis=1)

    def _once(self, tensors: Tensors, shape: Shape, width: int) -> list[Array]:
        """Runs tensors that fit a shape; `width` is the unpadded size of their dynamic dimension."""
        for name, values in tensors.items():
            self._fill(self._tensors.inputs[name].view(shape.input(name)), name, values)
        graph = self._graphs.get(shape)
        if graph is not None:
            self._device.launch(graph)
        else:
            self._prepare(shape, graph=False)
            self._queue(shape)
        self._device.wait()
        rows = len(tensors[IDS])
        return [self._output(spec, shape, rows, width) for spec in self.spec.outputs]

    def _output(self, spec: TensorSpec, shape: Shape, rows: int, width: int) -> Array:
        """Returns an output without its padding: a copy, because the next batch overwrites the buffer."""
        values = self._tensors.outputs[spec.name].view(shape.output(spec))[:rows]
        return (values[:, :width] if spec.shape[1] == -1 else values).copy()

    def _fill(self, target: NDArray[Any], name: str, values: NDArray[np.int32]) -> None:
        """Fills an input; rows beyond the batch repeat its first row, so they hold a real text."""
        rows, width = values.shape
        target[:rows, :width] = values
        target[:rows, width:] = self._pad_id if name == IDS else 0
        target[rows:] = target[0]

    def _queue(self, shape: Shape) -> None:
        for name, buffer in self._tensors.inputs.items():
            buffer.send(shape.input(name))
        self._program.enqueue(shape)
        for spec in self.spec.outputs:
            self._tensors.outputs[spec.name].fetch(shape.output(spec))

    def _prepare(self, shape: Shape, *, graph: bool) -> None:
        """Prepares a shape once: libraries allocate memory and choose kernels at its first run."""
        if shape in self._prepared:
            return
        self._program.prepare(shape, graph=graph)
        self._prepared.add(shape)
        if not graph:
            return
        # All tokens are padding, but the mask is 1: attention needs at least one token.
        for name, buffer in self._tensors.inputs.items():
            buffer.view(shape.input(name))[...] = 1 if name == MASK else 0
        self._queue(shape)
        self._device.wait()
        if self._program.records_itself:
            self._queue(shape)
        else:
            self._graphs[shape] = self._device.capture(lambda: self._queue(shape))
            self._device.launch(self._graphs[shape])
        self._device.wait()


class GpuBackend:
    """Models on one GPU, which is one lane."""

    largest_batch = SIZES[-1]
    padded_to: Sequence[int] = SIZES

    def __init__(self, device: Device, models: Sequence[GpuModel]) -> None:
        """Captures the graphs of every model; raises CudaError, or BundleError if the library cannot run one."""
        self.models = models
        budget = GraphBudget(device)
        for model in models:
            try:
                model.capture(budget)
            except ProgramError as error:
                raise BundleError(f"{model.spec.path}: {error}") from error

    def lanes(self) -> Sequence[LaneKind]:
        return [LaneKind.WIDE]

    def runner(self, lane: int) -> Runner:  # noqa: ARG002  there is one lane
        return self

    def run(self, batch: Batch) -> BatchOutput:
        return self.models[batch.model].run(batch)


def shapes_for(spec: ModelSpec, lengths: Sequence[int], max_batch_tokens: int) -> list[Shape]:
    """Returns all shapes of a model: in each bucket, every batch size within the token budget, at least 1."""
    masks = MASK_SIZES if POSITIONS in spec.inputs else (0,)
    return [
        Shape(rows, length, count)
        for length in lengths
        for rows in SIZES
        for count in masks
        if rows == 1 or (rows * length <= max_batch_tokens and spec.batch_invariant)
    ]


def _fitting(sizes: Sequence[int], size: int) -> int:
    return next((each for each in sizes if each >= size), sizes[-1])


def _join(parts: Sequence[Sequence[Array]], axis: int) -> list[Array]:
    return [np.concatenate(arrays, axis=axis) for arrays in zip(*parts, strict=True)]
