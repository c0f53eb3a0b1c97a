"""The engine interface: everything the rest of the server knows of what runs a batch.

An engine owns one device slot. It offers *lanes*: what runs on one lane runs one batch after another, and
batches on different lanes run side by side. A WIDE lane uses the whole device and runs alone; NARROW lanes
share it, one core each. `submit` never blocks on a remote engine and completes before it returns on an
inline one; either way `done` is called exactly once, so schedulers, tests and tools use both alike.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

from serving.errors import BertserveError
from serving.models.manifest import EngineBuild  # noqa: TC001  read at run time by msgspec
from serving.records import Batch, BatchOutput, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

Done = Callable[[BatchOutput | BertserveError], None]
"""Receives a batch's output, or the error that all of its inputs share."""


ANY_BATCH = 1 << 16
"""The largest batch of an engine that computes any at once."""


class DeviceLost(Exception):
    """Nothing works on the device any more, or its memory is full: the process must end, and another one begin."""


class LaneKind(StrEnum):
    """How much of the device a lane uses."""

    WIDE = "wide"
    NARROW = "narrow"


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as an engine loads it.

    Attributes:
        name: The model's name, for messages.
        path: Artifact file; empty for the fake engine.
        sha256: What the file's bytes must hash to.
        batch_invariant: Whether batches and padding leave answers unchanged.
        vocab_size: Token ids are below this.
        max_length: Longest input in tokens.
        special_ids: Ids of the special tokens by role.
        inputs: Names of the graph's inputs.
        outputs: The graph's outputs.
        copied: Whether each lane may hold it: it is small.
        build: What a TensorRT engine is tied to; None for a graph.
    """

    name: str
    path: str
    sha256: str
    batch_invariant: bool
    vocab_size: int
    max_length: int
    special_ids: dict[str, int]
    inputs: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    copied: bool = False
    build: EngineBuild | None = None

    @property
    def narrow(self) -> bool:
        """Whether narrow lanes run it too: where it is not batched, nothing else fills the device."""
        return self.copied or not self.batch_invariant


class KernelFiles(msgspec.Struct, frozen=True):
    """Where kernels that a library compiles while it loads a model are kept.

    Attributes:
        read: What an earlier start compiled; empty for nothing.
        sha256: Of that file.
        write: Where to put what this one did; empty for nowhere.
    """

    read: str = ""
    sha256: str = ""
    write: str = ""


class Runner(Protocol):
    """One lane's way to run a batch, in the process that owns the device."""

    def run(self, batch: Batch) -> BatchOutput:
        """Runs a batch and answers its outputs.

        Raises:
            EngineFault: This batch failed; the runner lives on.
            DeviceLost: So will all others; the process must end.
        """


class Backend(Protocol):
    """What a kind of engine (ONNX Runtime, fake, ...) has to provide, in the process that owns the device."""

    name: str
    """As `--engine` calls it."""

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
