"""The engines that prove artifacts: the very ones that will serve them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from serving.engine.base import InlineEngine
from serving.engine.cpu.ort import OrtCpuBackend
from serving.engine.gpu import cuda_driver, discovery
from serving.engine.gpu.cuda import Device
from serving.engine.gpu.tensorrt import TensorRtBackend
from serving.engine.parts import chain, devices
from serving.engine.parts.processes import Place
from serving.errors import BundleError
from serving.models.manifest import GPUS

if TYPE_CHECKING:
    from serving.engine.base import Backend, Engine
    from serving.engine.gpu.model import BackendModel
    from serving.models.manifest import Artifact, Target
    from serving.records import ModelSpec

MOST_TOKENS = 4096
"""Of a batch while a GPU is compared: 32 texts of 128 tokens."""


def open_engine(spec: ModelSpec, target: Target, threads: int) -> Engine:
    """An engine in this process that runs one artifact.

    Args:
        spec: The artifact. Say `batch_invariant` in it, so that one wide lane takes padding and batches.
        target: What the artifact is made for.
        threads: Cores to use.

    Raises:
        BundleError: The artifact does not load, or is not what the specification says.
    """
    if target in GPUS or target == "cuda":
        return InlineEngine(_on_a_gpu(spec, target))
    if target != "openvino":
        return InlineEngine(OrtCpuBackend([spec], threads, chain.load))
    from serving.engine.cpu.openvino import OpenVinoBackend  # noqa: PLC0415  an optional library

    return InlineEngine(OpenVinoBackend([spec], threads))


def _on_a_gpu(spec: ModelSpec, target: Target) -> Backend:
    try:
        device = Device(cuda_driver.load(), 0)
        place = Place("tensorrt" if target in GPUS else "ort-cuda", 0, MOST_TOKENS)

        def load_split(model: ModelSpec) -> BackendModel:
            return devices.load_here(model, place, device)

        if target in GPUS:
            return TensorRtBackend([spec], device, MOST_TOKENS, load_split=load_split)
        from serving.engine.gpu.ort_cuda import OrtCudaBackend  # noqa: PLC0415  needs its library on a GPU

        return OrtCudaBackend([spec], device, MOST_TOKENS, load_split)
    except cuda_driver.CudaError as error:
        raise BundleError(f"{spec.name} cannot run on this GPU: {cuda_driver.explained(error)}") from error


@cache
def _machine() -> discovery.Machine:
    return discovery.look()


def gpu_obstacle(artifact: Artifact) -> str | None:
    """Why no GPU here can run an artifact that is for one; None where one can."""
    machine = _machine()
    if machine.problem:
        return machine.problem
    library = machine.libraries["ort-cuda" if artifact.engine is None else artifact.engine.flavour]
    if artifact.target != "cuda" and artifact.target != machine.gpus[0].target:
        return f"it is for {artifact.target}, and this {machine.gpus[0].name} is {machine.gpus[0].target}"
    return library.problem or None
