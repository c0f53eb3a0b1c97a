"""ONNX Runtime on a GPU: its CUDA provider on the device's stream, with fixed buffers and a graph per shape.

ONNX Runtime falls back to the CPU silently, so the provider is checked. With graphs enabled, it refuses a model of
which a part would run elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort

from bertserve.serving.engine.base import verified_bytes
from bertserve.serving.engine.cpu.ort import (
    LOAD_ERRORS,
    LOG_ERRORS_ONLY,
    RUN_ERRORS,
    VERSION,
    check_tensors,
    session_options,
)
from bertserve.serving.engine.gpu.model import (
    GpuBackend,
    GpuModel,
    ModelBuffers,
    ProgramError,
    lengths_for,
    shapes_for,
)
from bertserve.serving.errors import BundleError
from bertserve.serving.host import installing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.gpu.model import Shape
    from bertserve.serving.engine.specs import ModelSpec

__all__ = ["VERSION", "OrtCudaBackend"]

PROVIDER = "CUDAExecutionProvider"

_NO_GRAPH = "-1"
"""ONNX Runtime's annotation of a run that neither captures nor uses a graph."""


class OrtCudaBackend(GpuBackend):
    def __init__(
        self,
        models: Sequence[ModelSpec],
        device: Device,
        max_batch_tokens: int,
    ) -> None:
        """Loads every model and captures its graphs.

        Raises:
            BundleError: A model cannot be served on this provider.
            CudaError: The GPU is out of memory, or failed.
        """
        preload()
        super().__init__(device, [_load(spec, device, max_batch_tokens) for spec in models])


def preload() -> None:
    """Loads the CUDA and cuDNN libraries that pip has installed; raises BundleError without the provider."""
    if PROVIDER not in ort.get_available_providers():
        raise BundleError(f"ONNX Runtime {VERSION} is installed without CUDA: {installing('gpu')}")
    ort.preload_dlls()
    ort.set_default_logger_severity(LOG_ERRORS_ONLY)  # each session logs an irrelevant warning about plugins


def _load(spec: ModelSpec, device: Device, max_batch_tokens: int) -> GpuModel:
    session = _open_session(spec, device)
    check_tensors(spec, session)
    shapes = shapes_for(spec, lengths_for(spec.max_length), max_batch_tokens)
    buffers = ModelBuffers(device, spec, shapes)
    return GpuModel(device, spec, buffers, _OrtProgram(session, spec, device, buffers), shapes)


def _open_session(spec: ModelSpec, device: Device) -> ort.InferenceSession:
    """Opens a graph on the device's stream; raises BundleError if the provider cannot run it."""
    try:
        with verified_bytes(spec) as data:
            session = _session(spec, data, device)
    except LOAD_ERRORS as error:
        raise BundleError(f"{spec.path}: ONNX Runtime cannot load it on the GPU: {error}") from error
    if (providers := session.get_providers())[0] != PROVIDER:
        raise BundleError(f"{spec.path}: ONNX Runtime runs it on {providers[0]} instead of the GPU; see its log")
    return session


def _session(spec: ModelSpec, data: bytes, device: Device) -> ort.InferenceSession:
    options = session_options(spec)
    options.use_deterministic_compute = True  # sums by atomic additions would change the last bits from run to run
    provider = {
        "device_id": str(device.gpu.ordinal),
        "user_compute_stream": str(device.stream),
        "enable_cuda_graph": "1",
        # TF32 keeps 10 bits of fp32: a text's output would depend on the rest of its batch.
        "use_tf32": "0",
        # Doubling the allocations would waste up to half of a GPU that holds several models.
        "arena_extend_strategy": "kSameAsRequested",
    }
    session = ort.InferenceSession(data, options, providers=[(PROVIDER, provider)])
    session.disable_fallback()
    return session


class _OrtProgram:
    records_itself = True

    def __init__(self, session: ort.InferenceSession, spec: ModelSpec, device: Device, buffers: ModelBuffers) -> None:
        self._session = session
        self._spec = spec
        self._device = device
        self._buffers = buffers
        self._bindings: dict[Shape, ort.IOBinding] = {}
        self._graphs: dict[Shape, ort.RunOptions] = {}
        self._no_graph = _run_options(_NO_GRAPH)

    def prepare(self, shape: Shape, *, graph: bool) -> None:
        self._bindings[shape] = self._binding(shape)
        if graph:
            self._graphs[shape] = _run_options(str(len(self._graphs)))

    def enqueue(self, shape: Shape) -> None:
        try:
            self._session.run_with_iobinding(self._bindings[shape], self._graphs.get(shape, self._no_graph))
        except RUN_ERRORS as error:
            raise ProgramError(f"ONNX Runtime: {error}") from error

    def _binding(self, shape: Shape) -> ort.IOBinding:
        binding = self._session.io_binding()
        ordinal = self._device.gpu.ordinal
        for name, buffer in self._buffers.inputs.items():
            binding.bind_input(name, "cuda", ordinal, np.int32, shape.input(name), buffer.address)
        for spec in self._spec.outputs:
            address = self._buffers.outputs[spec.name].address
            binding.bind_output(spec.name, "cuda", ordinal, np.dtype(spec.dtype).type, shape.output(spec), address)
        return binding


def _run_options(graph: str) -> ort.RunOptions:
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", graph)
    # Later work waits in the same stream; `GpuModel` waits for all of it at once.
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options
