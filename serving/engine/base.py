"""The engine interface between the scheduler and the code that runs batches.

An engine owns one device slot and offers *lanes*. A lane runs one batch after another; batches on different lanes run
in parallel. A WIDE lane uses the whole device and runs alone. NARROW lanes share the device, one core each. `submit`
never blocks on a remote engine, and completes before it returns on an inline one. Either way `done` is called exactly
once, so schedulers, tests and tools use both alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from bertserve.serving.engine.specs import DATA_SUFFIX, KernelFiles, ModelSpec
from bertserve.serving.errors import BertserveError, BundleError, EngineFault
from bertserve.serving.scheduling.cost import CostPoint  # noqa: TC001  read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from bertserve.serving.records import Array, EncodedText, ModelIndex


class Batch(msgspec.Struct, frozen=True):
    """A batch: one or more texts for one of the engine's models.

    Attributes:
        alone: Whether no other request waits or runs.
    """

    model: ModelIndex
    texts: Sequence[EncodedText]
    alone: bool = False

    @property
    def padded_length(self) -> int:
        """Tokens of the longest input, which is the sequence length of the tensors."""
        return max(len(text.ids) for text in self.texts)


class BatchOutput(msgspec.Struct, frozen=True):
    """The result of a batch.

    Attributes:
        arrays: The graph's outputs in the manifest's order, each [len(texts), ...].
        finite: For each input, whether all numbers of its outputs are finite.
        compute_us: Compute time in microseconds.
    """

    arrays: Sequence[Array]
    finite: Sequence[bool]
    compute_us: float


Done = Callable[[BatchOutput | BertserveError], None]
"""Receives a batch's output, or the error that all of its inputs share."""

ANY_BATCH = 1 << 16
"""Batch size limit of an engine that runs batches of any size."""

MAX_LANES = 64
"""Maximum number of lanes. Each lane is a thread and a socket; beyond this many cores, narrow lanes gain nothing on one
machine."""


class DeviceLost(Exception):
    """The device no longer works or its memory is full: the process must end, and another one must start."""


def read_artifact(path: Path, sha256: str) -> bytes:
    """Reads an artifact and verifies the bytes that will be loaded; raises BundleError on a digest mismatch."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleError(f"bundle {path.parent}: {path.name} does not match its SHA-256 in the manifest")
    return data


def write_kernels(path: str, data: bytes) -> None:
    """Writes compiled kernels; deletes the file on failure, since a partial file is useless.

    Raises:
        OSError: The file could not be written, for example because the disk is full.
    """
    try:
        Path(path).write_bytes(data)
    except OSError:
        Path(path).unlink(missing_ok=True)
        raise


@contextmanager
def verified_bytes(model: ModelSpec) -> Iterator[bytes]:
    """Yields an artifact's verified bytes; inside the block a library may map the external weights.

    External weights are too large to read into memory. Their file is verified instead, and must not change inside the
    block.

    Raises:
        BundleError: A file does not match the manifest, or the weights changed inside the block.
    """
    path = Path(model.path)
    data = read_artifact(path, model.sha256)
    if not model.data_sha256:
        yield data
        return
    beside = path.with_name(f"{path.name}{DATA_SUFFIX}")
    before = _state(beside)
    with beside.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.data_sha256:
        raise BundleError(f"bundle {path.parent}: {beside.name} does not match its SHA-256 in the manifest")
    yield data
    if _state(beside) != before:
        raise BundleError(f"bundle {path.parent}: {beside.name} changed while loading")


def _state(path: Path) -> tuple[int, ...]:
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def check_interface(
    model: ModelSpec,
    inputs: Iterable[tuple[str, str | None]],
    outputs: Iterable[tuple[str, str | None, tuple[int, ...]]],
    what: str = "graph",
) -> None:
    """Compares the inputs and outputs of a loaded model with the manifest; raises BundleError if they differ.

    Args:
        model: The model's specification, from the manifest.
        inputs: Name and type of each input; types are named as in `TensorSpec`.
        outputs: Name, type and shape of each output; -1 is a dynamic dimension.
        what: Name of the loaded object, for the error message.
    """
    if set(inputs) != {(name, "int32") for name in model.inputs}:
        raise BundleError(f"{model.path}: the {what}'s inputs do not match the manifest")
    if list(outputs) != [(spec.name, spec.dtype, spec.shape) for spec in model.outputs]:
        raise BundleError(f"{model.path}: the {what}'s outputs do not match the manifest")


class LaneKind(StrEnum):
    WIDE = "wide"
    NARROW = "narrow"


def lanes_for(models: Sequence[ModelSpec], threads: int) -> list[LaneKind]:
    """Returns the lanes of a device: one wide lane, plus one narrow lane per core if a model uses them."""
    side_by_side = threads > 1 and any(model.narrow for model in models)
    return [LaneKind.WIDE, *[LaneKind.NARROW] * min(threads if side_by_side else 0, MAX_LANES - 1)]


class EngineLoad(msgspec.Struct, frozen=True):
    """The load command for an engine process.

    Attributes:
        nice: Nice value added to the narrow lanes, or to the whole process if it has no narrow lanes.
        options: Values of the engine's own settings, by name.
        costs: Earlier measurements of each model on this node; empty to measure again.
        max_batch_tokens: Padded tokens of the largest batch to measure.
        gpus: Indices of GPUs among those that a process may use; empty for a CPU.
        kernels: Files of each model's compiled kernels; empty for none.
        bundles: Bundles to verify first, each with the SHA-256 of its manifest.
        needed_mib: Approximate memory that the server needs with these models, for messages; 0 with GPUs.
    """

    engine: str
    models: list[ModelSpec]
    threads: int
    nice: int = 0
    options: dict[str, float | str] = {}
    costs: list[list[CostPoint]] = []
    max_batch_tokens: int = 1024
    log_format: Literal["text", "json"] = "text"
    gpus: list[int] = []
    kernels: list[KernelFiles] = []
    bundles: list[tuple[str, str]] = []
    needed_mib: int = 0


class Runner(Protocol):
    def run(self, batch: Batch) -> BatchOutput:
        """Runs a batch.

        Raises:
            EngineFault: This batch failed; the runner still works.
            DeviceLost: All further batches would fail; the process must end.
        """


class Backend(Protocol):
    """The interface of an engine kind (ONNX Runtime, fake, ...) in the process that owns the device."""

    largest_batch: int
    """Maximum texts per execution; a larger batch costs as much as several."""

    padded_to: Sequence[int]
    """Batch sizes in texts that batches are padded to, ascending; empty if batches are not padded."""

    def lanes(self) -> Sequence[LaneKind]:
        """Returns the lanes that the loaded models need, WIDE first."""

    def runner(self, lane: int) -> Runner:
        """Returns a lane's runner, which one thread may use at a time."""


class Engine(Protocol):
    """The interface that the scheduler uses: a device slot's lanes, in this process or behind a socket."""

    lanes: Sequence[LaneKind]

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        """Runs a batch on a lane, in FIFO order; `done` is called once, on the caller's thread."""


class InlineEngine:
    """An in-process engine that runs each batch synchronously, for tests, tools and `export`."""

    def __init__(self, backend: Backend) -> None:
        self.lanes = backend.lanes()
        self._runners = [backend.runner(lane) for lane in range(len(self.lanes))]

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        try:
            output = self._runners[lane].run(batch)
        except EngineFault as fault:
            done(fault)
        else:
            done(output)
