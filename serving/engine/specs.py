"""Which model an engine loads, what it is tied to, and which engine was chosen."""

from __future__ import annotations

from typing import Literal

import msgspec

from serving.records import TensorSpec  # noqa: TC001  msgspec reads the annotations

DATA_SUFFIX = ".data"
"""What follows a graph's name in that of the file with its weights, where they are too large to lie in it."""


class ShapeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One optimization profile of a TensorRT engine: (batch, sequence) at least, usually, at most."""

    min: tuple[int, int]
    opt: tuple[int, int]
    max: tuple[int, int]


class EngineBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a TensorRT engine is tied to."""

    flavour: Literal["rtx", "enterprise"]
    version: str
    compute_capability: str
    profiles: tuple[ShapeProfile, ...]


PARTIAL = ".partial"
"""What follows the name of a tensor in that of a rank's share of it, which the ranks add up."""


class PartFile(msgspec.Struct, frozen=True):
    """One of the files of a model that was cut into parts; `data_sha256` as in `ModelSpec`."""

    path: str
    sha256: str
    data_sha256: str = ""


SplitBy = Literal["layers", "tensors"]
"""How a model is cut into parts: each has some of the layers, or a share of every layer."""


def stages(files: int, *, lookups: bool) -> int:
    """How many parts by layers so many files are, where with `lookups` each but the first has two of them."""
    return (files + 1) // 2 if lookups else files


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as an engine loads it.

    Attributes:
        path: Artifact file; empty for the fake engine.
        data_sha256: Of the file beside a graph that holds its weights; empty where they lie in the graph.
        second: The same model for OpenVINO, with the engine `cpu`.
        batch_invariant: Whether batches and padding leave answers unchanged.
        vocab_size: Token ids are below this.
        max_length: Longest input in tokens.
        special_ids: Ids of the special tokens by role.
        copied: Whether each lane may hold a copy, because it is small.
        build: None for a graph.
        parts: What follows the file in `path` where that is only the first part of the model.
        split_by: How it was cut; None for a whole model.
        ranks: In how many shares its layers are split; each has as many of the files, in order. 1 for whole layers.
        lookups: Whether the parts share a table: each but the first then has a second file, behind those of the parts.
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
    data_sha256: str = ""
    second: ModelSpec | None = None
    parts: tuple[PartFile, ...] = ()
    split_by: SplitBy | None = None
    ranks: int = 1
    lookups: bool = False

    @property
    def narrow(self) -> bool:
        """Whether narrow lanes run it too: where it is not batched or in stages, nothing else fills the device."""
        if self.split_by is not None:
            return self.stages > 1
        return self.copied or not self.batch_invariant

    @property
    def stages(self) -> int:
        """How many batches it works on at once: one in each part that has layers of its own."""
        return stages(1 + len(self.parts), lookups=self.lookups) if self.split_by == "layers" else 1


class KernelFiles(msgspec.Struct, frozen=True):
    """Where an engine reads and writes the kernels that its library compiles while it loads a model.

    Attributes:
        read: What an earlier start compiled; empty for nothing.
        sha256: Of that file.
        write: Where to put what this start compiles; empty for nowhere.
    """

    read: str = ""
    sha256: str = ""
    write: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that this process may use.

    Attributes:
        ordinal: Its index in CUDA's order.
        uuid: As NVML has it: `GPU-` and 32 digits in groups.
        compute_capability: Major and minor, as `7.5`.
    """

    ordinal: int
    name: str
    uuid: str
    compute_capability: str
    memory_bytes: int

    @property
    def target(self) -> str:
        """The target of artifacts for this GPU, such as `sm75`."""
        return f"sm{self.compute_capability.replace('.', '')}"


class RejectedEngine(msgspec.Struct, frozen=True):
    """An engine that was not taken, and why; behind a semicolon `reason` says what to do, where something can be."""

    engine: str
    reason: str


class EngineChoice(msgspec.Struct, frozen=True):
    """What runs the models, and why nothing faster does.

    Attributes:
        engine: As `--engine` calls it.
        degraded: Whether it is less than was meant.
        gpus: The GPUs that it runs on; none for a CPU.
        rejected: What was tried before it, the best first.
        left_out: GPUs like those that cannot take part, each with its reason.
        lost: GPUs that were given up while serving, each with its reason.
    """

    engine: str
    degraded: bool = False
    gpus: tuple[Gpu, ...] = msgspec.field(default=(), name="cards")  # in `/status` since version 0.1
    rejected: tuple[RejectedEngine, ...] = ()
    left_out: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def where(self, threads: int) -> str:
        """The hardware that it computes on, for the log."""
        return f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else f"{threads} threads"
