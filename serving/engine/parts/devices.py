"""A model split by layers across GPUs: each part but the first has a process of its own.

Parts exchange tensors as on CPUs, through memory that all processes share. Each part copies its inputs to its GPU and
its outputs back. Several parts may share a GPU. Lookups in embedding tables run on CPU cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from serving.engine.gpu import cuda_driver
from serving.engine.gpu.cuda import Device
from serving.engine.gpu.cuda_driver import CudaError
from serving.engine.gpu.model import PaddedModel, one_at_a_time, unpadded
from serving.engine.parts import chain
from serving.engine.parts.pipeline import Pipeline
from serving.errors import BundleError
from serving.records import IDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from serving.engine.base import Runner
    from serving.engine.batches import Tensors
    from serving.engine.gpu.model import BackendModel, GraphBudget, Shape
    from serving.engine.parts.processes import Place
    from serving.engine.specs import ModelSpec
    from serving.records import Array


def gpus_of(parts: int, gpus: Sequence[int]) -> list[int]:
    """Returns the GPU of each part, evenly distributed; consecutive parts may share one.

    >>> gpus_of(2, [0, 1, 2]), gpus_of(3, [4, 7]), gpus_of(2, [5])
    ([0, 1], [4, 4, 7], [5, 5])
    """
    used = gpus[:parts]
    return [used[number * len(used) // parts] for number in range(parts)]


def load(model: ModelSpec, places: Sequence[Place], device: Device, lanes: int) -> BackendModel:
    """Loads a model with its parts on these GPUs, the first part on this process's device.

    Raises:
        BundleError: A part cannot be served.
    """
    pipeline = Pipeline(model, 1, lanes, places=places, open_first=lambda graph, _: open_part(graph, places[0], device))
    return _SplitModel(model, shapes_of(model, places[0]), [lane.answers for lane in pipeline.lanes])


def load_here(model: ModelSpec, place: Place, device: Device) -> BackendModel:
    """Loads a model whose parts run one after another in this process, on one GPU, for tools that prove it.

    Raises:
        BundleError: A part cannot be loaded, or the parts do not match.
    """
    return _SplitModel(
        model,
        shapes_of(model, place),
        [chain.Chain(model, 1, lambda graph, _: open_part(graph, place, device)).answers] * (1 + model.stages),
    )


def shapes_of(model: ModelSpec, place: Place) -> Sequence[Shape]:
    """Returns all shapes that a batch may be padded to."""
    if place.engine == "tensorrt":
        from serving.engine.gpu import tensorrt  # noqa: PLC0415  its library may be missing

        return tensorrt.shapes_of(model, place.max_batch_tokens)
    from serving.engine.gpu import ort_cuda  # noqa: PLC0415  likewise

    return ort_cuda.shapes_of(model, place.max_batch_tokens)


def open_part(graph: ModelSpec, place: Place, device: Device | None = None) -> chain.Part:
    """Opens a part on its GPU, which this process takes if it has no device yet; raises BundleError."""
    try:
        device = device or Device(cuda_driver.load(), place.gpu)
        if place.engine == "tensorrt":
            from serving.engine.gpu import tensorrt  # noqa: PLC0415  its library may be missing

            return _PartOnDevice(tensorrt.open_part(graph, device, place.max_batch_tokens), device)
        from serving.engine.gpu import ort_cuda  # noqa: PLC0415  likewise

        ort_cuda.preload()
        return _PartOnDevice(ort_cuda.open_part(graph, device), device)
    except CudaError as error:
        why = cuda_driver.explained(error)
        raise BundleError(f"{graph.path} cannot run on GPU {place.gpu}: {why}") from error


class _PartOnDevice:
    """A part that distinguishes a failed batch from a lost GPU."""

    def __init__(self, part: chain.Part, device: Device) -> None:
        self.inputs, self.outputs = part.inputs, part.outputs
        self._part, self._device = part, device

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        with one_at_a_time(self._device):
            return self._part.run(tensors)


@dataclass
class _SplitModel:
    """A split model among whole ones: each lane has a batch in flight."""

    spec: ModelSpec
    shapes: Sequence[Shape]
    lanes: Sequence[Callable[[dict[str, NDArray[Any]]], Sequence[Array]]]

    def capture(self, budget: GraphBudget) -> None:
        """Does nothing: no graph spans several processes."""

    def on_lane(self, lane: int) -> Runner:
        return _PaddedLane(self.spec, self.shapes, self.lanes[lane])


class _PaddedLane(PaddedModel):
    def __init__(
        self,
        spec: ModelSpec,
        shapes: Sequence[Shape],
        answers: Callable[[dict[str, NDArray[Any]]], Sequence[Array]],
    ) -> None:
        super().__init__(spec, shapes)
        self._answers = answers

    def _once(self, tensors: Tensors, shape: Shape, width: int) -> list[Array]:
        padded: dict[str, NDArray[Any]] = {}
        for name, values in tensors.items():
            padded[name] = np.empty(shape.input(name), np.int32)
            self._fill(padded[name], name, values)
        rows = len(tensors[IDS])
        return [
            unpadded(spec, values, rows, width)
            for spec, values in zip(self.spec.outputs, self._answers(padded), strict=True)
        ]
