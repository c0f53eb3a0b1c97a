"""ONNX Runtime on the CPU.

A model gets a wide session for all cores and a narrow one, which all narrow lanes share: without threads of its own, a
session computes each run on its caller's thread. The wide session has the lowest latency for a single text; the narrow
lanes have the higher throughput. One session for both would compute on other lanes' threads too, and take 1.4 times the
CPU time for each text.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from bertserve.serving import host
from bertserve.serving.engine.base import Batch, check_interface, verified_bytes
from bertserve.serving.engine.batches import Padder, sample_text
from bertserve.serving.engine.cpu.backend import CpuBackend
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.records import ModelIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array

VERSION = str(ort.__version__)

LOG_ERRORS_ONLY = 3

_TYPES = {"tensor(float)": "float32", "tensor(int32)": "int32"}

LOAD_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""Exceptions of creating an `InferenceSession`."""

RUN_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""Exceptions of `InferenceSession.run`; the classes have no common parent but `Exception`."""


def providers() -> list[str]:
    return list(ort.get_available_providers())


def cuda_version() -> str:
    """Returns the CUDA version of the build, such as 13.0; empty for a build without CUDA."""
    return str(getattr(ort, "cuda_version", "") or "")


class OrtCpuBackend(CpuBackend):
    def __init__(self, models: Sequence[ModelSpec], threads: int) -> None:
        super().__init__(models, threads, load)


class _Model:
    def __init__(self, session: ort.InferenceSession, model: ModelSpec) -> None:
        self._session = session
        self._padder = Padder(model)
        self._shortest = Batch(ModelIndex(0), [sample_text(model, 1)])

    def run(self, batch: Batch, options: ort.RunOptions | None = None) -> Sequence[Array]:
        try:
            arrays: Sequence[Array] = self._session.run(None, self._padder.tensors(batch), options)
        except RUN_ERRORS as error:
            raise EngineFault(f"ONNX Runtime: {error}") from error
        return arrays

    def trim(self) -> None:
        # The session's arena is released at the end of a run. After each large batch that would take 2 to 10% more CPU.
        options = ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        self.run(self._shortest, options)


def load(model: ModelSpec, threads: Sequence[int]) -> list[_Model]:
    """Loads the model once for all lanes with the same number of threads, from one read of the file."""
    try:
        with verified_bytes(model) as data, ThreadPoolExecutor() as pool:
            counts = list(dict.fromkeys(threads))
            sessions = list(pool.map(partial(_session, model, data), counts))
    except LOAD_ERRORS as error:
        raise BundleError(f"{model.path}: ONNX Runtime cannot load it: {error}") from error
    check_tensors(model, sessions[0])
    loaded = {count: _Model(session, model) for count, session in zip(counts, sessions, strict=True)}
    return [loaded[count] for count in threads]


def check_tensors(model: ModelSpec, session: ort.InferenceSession) -> None:
    inputs = [(tensor.name, _TYPES.get(tensor.type)) for tensor in session.get_inputs()]
    outputs = [(tensor.name, _TYPES.get(tensor.type), _fixed(tensor.shape)) for tensor in session.get_outputs()]
    check_interface(model, inputs, outputs)


def _fixed(shape: Sequence[object]) -> tuple[int, ...]:
    """Returns a shape in the manifest's notation; ONNX Runtime gives dynamic dimensions as names."""
    return tuple(size if isinstance(size, int) else -1 for size in shape)


def session_options(model: ModelSpec) -> ort.SessionOptions:
    """Returns the session options, with the folder of external weights, which ONNX Runtime maps as needed."""
    options = ort.SessionOptions()
    options.log_severity_level = LOG_ERRORS_ONLY
    if host.saturates():
        # Converts weights to u8, whose kernels do not saturate. On a processor with VNNI, ONNX Runtime would take these
        # slower kernels too.
        options.add_session_config_entry("session.x64quantprecision", "1")
    # Every length is a new shape, so cached allocation plans would only accumulate.
    options.enable_mem_pattern = False
    if model.data_sha256:
        folder = str(Path(model.path).absolute().parent)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return options


def _session(model: ModelSpec, data: bytes, threads: int) -> ort.InferenceSession:
    options = session_options(model)
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # To wake a sleeping pool thread adds 0.1 ms to the next run; endless spinning takes a core from the event loop. A
    # millisecond covers the pause between two requests of one client.
    options.add_session_config_entry("session.intra_op.spin_duration_us", "1000")
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    session.disable_fallback()
    return session
