"""The engine interface: everything the rest of the server knows of what runs a batch.

An engine owns one device slot. It offers *lanes*: what runs on one lane runs one batch after another, and
batches on different lanes run side by side. A WIDE lane uses the whole device and runs alone; NARROW lanes
share it, one core each. `submit` never blocks on a remote engine and completes before it returns on an
inline one; either way `done` is called exactly once, so schedulers, tests and tools use both alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from serving.engine.specs import DATA_SUFFIX, KernelFiles, ModelSpec
from serving.errors import BertserveError, BundleError, EngineFault
from serving.scheduling.cost import CostPoint  # noqa: TC001  read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from serving.records import Array, EncodedText, ModelIndex


class Batch(msgspec.Struct, frozen=True):
    """What an engine runs at once: one or more texts for one of the engine's models."""

    model: ModelIndex
    texts: Sequence[EncodedText]

    @property
    def padded_length(self) -> int:
        """Tokens of the longest input: the sequence length of the tensors."""
        return max(len(text.ids) for text in self.texts)


class BatchOutput(msgspec.Struct, frozen=True):
    """What an engine answers.

    Attributes:
        arrays: The graph's outputs in the manifest's order, each [len(texts), ...].
        finite: For each input, whether all of its numbers are finite.
        compute_us: Time the engine spent, in microseconds.
    """

    arrays: Sequence[Array]
    finite: Sequence[bool]
    compute_us: float


Done = Callable[[BatchOutput | BertserveError], None]
"""Receives a batch's output, or the error that all of its inputs share."""

ANY_BATCH = 1 << 16
"""The largest batch of an engine that computes any at once."""

MAX_LANES = 64
"""Each lane is a thread and a socket; beyond this many cores, narrow lanes gain nothing on one machine."""


class DeviceLost(Exception):
    """Nothing works on the device any more, or its memory is full: the process must end, and another one begin."""


def read_artifact(path: Path, sha256: str) -> bytes:
    """Reads an artifact and verifies the very bytes that will be loaded; raises BundleError where they have changed."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleError(f"bundle {path.parent}: {path.name} does not match its SHA-256 in the manifest")
    return data


def write_kernels(path: str, data: bytes) -> None:
    """Writes what an engine has compiled, or nothing: a part of it helps nobody, and the disk may be full.

    Raises:
        OSError: It could not be written.
    """
    try:
        Path(path).write_bytes(data)
    except OSError:
        Path(path).unlink(missing_ok=True)
        raise


@contextmanager
def verified_bytes(model: ModelSpec) -> Iterator[bytes]:
    """An artifact's bytes; in the block a library may map the weights that lie beside a graph.

    They are too large to be read into memory, so it is their file that is verified, and that must stay as it is.

    Raises:
        BundleError: One of the two files is not what the manifest says, or the weights changed in the block.
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
        raise BundleError(f"bundle {path.parent}: {beside.name} changed while it was loaded")


def _state(path: Path) -> tuple[int, ...]:
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def check_interface(
    model: ModelSpec,
    inputs: Iterable[tuple[str, str | None]],
    outputs: Iterable[tuple[str, str | None, tuple[int, ...]]],
    what: str = "graph",
) -> None:
    """Compares what a loaded model takes and answers with the manifest; raises BundleError where they differ.

    Args:
        model: What the manifest says.
        inputs: Name and type of each input, as `TensorSpec` names types.
        outputs: Name, type and shape of each output; -1 stands for a dimension that varies.
        what: What was loaded, for the message.
    """
    if set(inputs) != {(name, "int32") for name in model.inputs}:
        raise BundleError(f"{model.path}: the {what}'s inputs are not those of the manifest")
    if list(outputs) != [(spec.name, spec.dtype, spec.shape) for spec in model.outputs]:
        raise BundleError(f"{model.path}: the {what}'s outputs are not those of the manifest")


class LaneKind(StrEnum):
    WIDE = "wide"
    NARROW = "narrow"


def lanes_for(models: Sequence[ModelSpec], threads: int) -> list[LaneKind]:
    """The lanes that a CPU offers: one wide lane, and narrow ones where a model is run on them.

    They are one per core, or one for each of the batches that a model in stages works on at once.
    """
    side_by_side = threads > 1 and any(model.narrow for model in models if model.split_by is None)
    stages = max((model.stages for model in models if model.stages > 1), default=0)
    narrow = min(max(stages, threads if side_by_side else 0), MAX_LANES - 1)
    return [LaneKind.WIDE, *[LaneKind.NARROW] * narrow]


class EngineLoad(msgspec.Struct, frozen=True):
    """The order to an engine process: what to load and how.

    Attributes:
        nice: How much less urgent than the server its narrow lanes are, as `nice` counts; all of it where it has none.
        options: The settings of the engine's own, by name.
        costs: For each model what this node measured before; empty where that must be done.
        max_batch_tokens: Padded tokens of the largest batch to measure.
        gpus: GPUs, by their indices among those that a process may use; none for a CPU.
        kernels: For each model the files of its compiled kernels; empty for none.
        bundles: Bundles to be verified first, each with the SHA-256 of its manifest.
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


class Runner(Protocol):
    def run(self, batch: Batch) -> BatchOutput:
        """Runs a batch.

        Raises:
            EngineFault: This batch failed; the runner lives on.
            DeviceLost: All others will fail too; the process must end.
        """


class Backend(Protocol):
    """What a kind of engine (ONNX Runtime, fake, ...) has to provide, in the process that owns the device."""

    largest_batch: int
    """Texts that it computes at once; more of them cost what several batches do."""

    padded_to: Sequence[int]
    """Texts that a batch is padded up to, ascending; empty where it is computed as it is."""

    def lanes(self) -> Sequence[LaneKind]:
        """The lanes that the loaded models need, WIDE first."""

    def runner(self, lane: int) -> Runner:
        """The runner of one lane; it is used by one thread at a time."""


class Engine(Protocol):
    """What the scheduler drives: a device slot's lanes, in this process or behind a socket."""

    lanes: Sequence[LaneKind]

    def submit(self, lane: int, batch: Batch, done: Done) -> None:
        """Runs a batch on a lane, after those it was given before; `done` is called once, on the caller's thread."""


class InlineEngine:
    """An engine in the caller's own process, which runs each batch at once: for tests, tools and `export`."""

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
