"""The model that an engine loads, the platform of a TensorRT engine, and the selected engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from bertserve.serving.records import TensorSpec  # noqa: TC001  read at run time by msgspec

DATA_SUFFIX = ".data"
"""Suffix of the external weights file, after the graph's file name. Used if the weights are too large for the graph."""


class ShapeProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An optimization profile of a TensorRT engine: minimum, optimum and maximum (batch, sequence)."""

    min: tuple[int, int]
    opt: tuple[int, int]
    max: tuple[int, int]


class EngineBuild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The platform and shapes that a TensorRT engine is built for."""

    flavour: Literal["rtx", "enterprise"]
    version: str
    compute_capability: str
    profiles: tuple[ShapeProfile, ...]


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as an engine loads it.

    Attributes:
        path: Artifact file; empty for the fake engine.
        size_bytes: Size of the artifact with its external weights.
        data_sha256: SHA-256 of the graph's external weights file; empty if the weights are in the graph.
        second: The same model for OpenVINO, with the engine `cpu`.
        batch_invariant: Whether outputs are independent of batching and padding.
        vocab_size: Exclusive upper bound of token ids.
        max_length: Maximum input length in tokens.
        special_ids: Special token ids by role.
        unattended: Whether texts may hold tokens that attention must ignore.
        narrow: Whether narrow lanes run the model too, on a second copy of its weights.
        small: Whether OpenVINO may hold the model in several graphs, and cache its kernels on the node.
        build: Platform of a TensorRT engine; None for a graph.
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
    unattended: bool = False
    narrow: bool = True
    small: bool = False
    build: EngineBuild | None = None
    size_bytes: int = 0
    data_sha256: str = ""
    second: ModelSpec | None = None


class KernelFiles(msgspec.Struct, frozen=True):
    """Files of the kernels that a library compiles while it loads a model.

    Attributes:
        read: Kernels that an earlier start compiled; empty for none.
        sha256: SHA-256 of `read`.
        write: Destination of the kernels that this start compiles; empty for none.
    """

    read: str = ""
    sha256: str = ""
    write: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that this process may use.

    Attributes:
        ordinal: Index in CUDA's order.
        uuid: UUID as NVIDIA's tools show it: `GPU-` and 32 digits in groups.
        compute_capability: Major and minor version, such as `7.5`.
    """

    ordinal: int
    name: str
    uuid: str
    compute_capability: str
    memory_bytes: int

    @property
    def target(self) -> str:
        """The artifact target of this GPU, such as `sm75`."""
        return f"sm{self.compute_capability.replace('.', '')}"


class RejectedEngine(msgspec.Struct, frozen=True):
    """An engine that was not selected; `reason` may end with a remedy after a semicolon."""

    engine: str
    reason: str


class EngineChoice(msgspec.Struct, frozen=True):
    """The selected engine, and why no faster one was selected.

    Attributes:
        engine: Name, as in `--engine`.
        degraded: Whether the engine or its GPUs fall short of the intended ones.
        gpus: GPUs in use; empty for a CPU.
        rejected: Engines that were tried before, the best first.
        left_out: GPUs of the same kind that cannot be used, each with its reason.
        lost: GPUs that were given up while serving, each with its reason.
    """

    engine: str
    degraded: bool = False
    gpus: tuple[Gpu, ...] = msgspec.field(default=(), name="cards")  # in `/status` since version 0.1
    rejected: tuple[RejectedEngine, ...] = ()
    left_out: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def where(self, threads: int) -> str:
        """The hardware in use, for the log."""
        return f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else f"{threads} threads"
