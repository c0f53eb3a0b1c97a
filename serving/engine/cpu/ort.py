"""ONNX Runtime on the CPU.

A model gets one session as wide as the machine and one narrow session per core: the wide one answers a lone
text fastest, the narrow ones carry more texts a second. A large batch-invariant artifact, whose weights should
be held once, is batched on the wide session alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from serving.engine.base import ANY_BATCH, read_artifact
from serving.engine.lanes import lanes_for, on_lanes
from serving.engine.padding import Padder, finite_rows
from serving.errors import BundleError, EngineFault
from serving.records import BatchOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.base import LaneKind, Runner
    from serving.records import Batch, ModelSpec

VERSION = str(ort.__version__)

LOG_ERRORS_ONLY = 3

_TYPES = {"float32": "tensor(float)", "int32": "tensor(int32)"}

LOAD_ERRORS = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""What making an `InferenceSession` raises."""

RUN_ERRORS = (
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)
"""What `InferenceSession.run` raises; the classes have no common parent but `Exception`."""


def providers() -> list[str]:
    """What the installed build can run on."""
    return list(ort.get_available_providers())


def cuda_version() -> str:
    """The CUDA that it was built for, as 13.0; empty for a build without."""
    return str(getattr(ort, "cuda_version", "") or "")


class OrtCpuBackend:
    """Sessions of the CPU execution provider, made from verified bytes."""

    name = "ort-cpu"
    largest_batch = ANY_BATCH
    padded_to: Sequence[int] = ()

    def __init__(self, models: Sequence[ModelSpec], threads: int) -> None:
        """Loads every model.

        Args:
            models: What to load.
            threads: Cores to use, the caller's included.

        Raises:
            BundleError: An artifact's bytes are not those of its manifest, it does not load, or it takes or
                gives other tensors than the manifest says.
        """
        self._lanes = lanes_for(models, threads)
        self._padders = [Padder(model) for model in models]
        self._sessions = [on_lanes(model, self._lanes, threads, _sessions) for model in models]

    def lanes(self) -> Sequence[LaneKind]:
        """One wide lane, then the narrow ones."""
        return self._lanes

    def runner(self, lane: int) -> Runner:
        """The runner over every model's session of that lane."""
        return _OrtRunner([sessions[lane] for sessions in self._sessions], self._padders)


class _OrtRunner:
    def __init__(self, sessions: Sequence[ort.InferenceSession | None], padders: Sequence[Padder]) -> None:
        self._sessions = sessions
        self._padders = padders

    def run(self, batch: Batch) -> BatchOutput:
        session = self._sessions[batch.model]
        if session is None:
            raise EngineFault("a model was sent to a lane that does not hold it")
        started = time.perf_counter()
        try:
            arrays = session.run(None, self._padders[batch.model].tensors(batch))
        except RUN_ERRORS as error:
            raise EngineFault(f"ONNX Runtime: {error}") from error
        finite = finite_rows(arrays, len(batch.texts))
        return BatchOutput(arrays, finite, (time.perf_counter() - started) * 1e6)


def _sessions(model: ModelSpec, threads: Sequence[int]) -> list[ort.InferenceSession]:
    """One session for each number of threads, from one reading of the file."""
    data = read_artifact(Path(model.path), model.sha256)
    try:
        sessions = [_session(data, count) for count in threads]
    except LOAD_ERRORS as error:
        raise BundleError(f"{model.path}: ONNX Runtime cannot load it: {error}") from error
    check_tensors(model, sessions[0])
    return sessions


def check_tensors(model: ModelSpec, session: ort.InferenceSession) -> None:
    """Holds what a session takes and answers against the manifest.

    Raises:
        BundleError: They differ.
    """
    inputs = {(tensor.name, tensor.type) for tensor in session.get_inputs()}
    outputs = [(tensor.name, tensor.type, _fixed(tensor.shape)) for tensor in session.get_outputs()]
    if inputs != {(name, "tensor(int32)") for name in model.inputs}:
        raise BundleError(f"{model.path}: the graph's inputs are not those of the manifest")
    if outputs != [(spec.name, _TYPES[spec.dtype], spec.shape) for spec in model.outputs]:
        raise BundleError(f"{model.path}: the graph's outputs are not those of the manifest")


def _fixed(shape: Sequence[object]) -> tuple[int, ...]:
    """A shape as manifests write it: ONNX Runtime gives dimensions that vary as names."""
    return tuple(size if isinstance(size, int) else -1 for size in shape)


def _session(data: bytes, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = LOG_ERRORS_ONLY
    # Every length is a shape of its own: remembered allocation plans would only pile up.
    options.enable_mem_pattern = False
    # A pool thread that sleeps costs the next run 0.1 ms to wake it; one that spins on and on takes a core from
    # the event loop. A millisecond covers the pause between two requests of one client.
    options.add_session_config_entry("session.intra_op.spin_duration_us", "1000")
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    session.disable_fallback()
    return session
