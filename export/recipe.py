"""The options of an export and the limits of its result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from bertserve.export.errors import ExportError
from bertserve.export.tasks import EXPORTS
from bertserve.export.tasks.limits import Limits
from bertserve.serving import host
from bertserve.serving.models.manifest import SCHEMA_VERSION, Precision, Target
from bertserve.serving.models.verified_dir import digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bertserve.export.checkpoint.layouts.case import Case
    from bertserve.serving.models.manifest import Artifact


@dataclass(slots=True, frozen=True)
class ArtifactKind:
    """A kind of ONNX artifact.

    Attributes:
        target: The library that runs it.
        file: Its name in the bundle.
    """

    precision: Precision
    target: Target
    file: str


ARTIFACTS = {
    "fp32": ArtifactKind("fp32", "cpu", "model.fp32.onnx"),
    "int8": ArtifactKind("int8", "cpu", "model.int8.onnx"),
    "int8-openvino": ArtifactKind("int8", "openvino", "model.int8.openvino.onnx"),
    "fp16": ArtifactKind("fp16", "cuda", "model.fp16.onnx"),
}
"""ONNX artifacts by their names on the command line, in the order in which they are made.

fp16 is for ONNX Runtime on a GPU. On a CPU it is only proven, because it is slower than fp32.
"""

INT8_ENGINE = "int8-tensorrt"
"""The name of TensorRT's INT8 engines in limits. Their graph is checked at export, the engine where it runs."""

_PRECISIONS: Mapping[str, Precision] = {name: kind.precision for name, kind in ARTIFACTS.items()} | {
    INT8_ENGINE: "int8"
}

LIMITED = tuple(_PRECISIONS)
"""Names of artifacts with limits."""

DEFAULT_ARTIFACTS = ("fp32", "int8")
OPENVINO_ARTIFACT = "int8-openvino"
"""Also made by default if OpenVINO is installed."""

LIMIT_NAMES = tuple(limit.name for limit in fields(Limits))
_INVARIANCE_NAMES = tuple(name for name in LIMIT_NAMES if name.startswith("invariance"))
WAIVABLE = tuple(name for name in LIMIT_NAMES if name not in _INVARIANCE_NAMES)
"""Limits that an artifact must keep to be shipped. If another one is broken, the artifact runs text by text."""


def limits_of(artifact: Artifact, task: str) -> Limits:
    """The limits of an artifact in a bundle: the default ones and those of its recipe.

    Raises:
        ExportError: The manifest sets an unknown limit.
    """
    if unknown := artifact.limits.keys() - set(LIMIT_NAMES):
        raise ExportError(f"the manifest sets an unknown limit for {artifact.file}: {min(unknown)!r}")
    return replace(EXPORTS[task].limits[artifact.precision], **artifact.limits)


@dataclass(slots=True, frozen=True)
class Recipe:
    """The options of one export.

    Attributes:
        source: A folder, a hub id, or `demo`.
        out: The model repository to write to.
        name: The model's name there; None takes it from the source.
        artifacts: ONNX artifacts to make, in the order of `ARTIFACTS`.
        cache_dir: The cache of the node for native engines; None for none.
        max_length: Maximum tokens of an input; None takes it from the checkpoint.
        task: The task; None takes it from the checkpoint.
        case: Whether words keep their case; None takes it from the checkpoint.
        outputs: Outputs of an encoder with several; None takes all.
        change_task: Whether the model's task may change.
        references: Files of labeled text for the task's metric.
        limits: Limits other than the task's, by name, or by `artifact.name` for one artifact.
        allowed: Names of limits, in the same two ways, that may be broken.
        calibration: A file of text for calibration; None for the package's own texts.
        calibration_column: The column of that file, by number or name.
        revision: The hub's branch, tag or commit; None for its main branch.
        token: Hub access token; None takes the one that the hub's client finds.
        if_changed: Whether to do nothing if the newest version has the same source and recipe.
    """

    source: str
    out: Path
    name: str | None = None
    artifacts: tuple[str, ...] = DEFAULT_ARTIFACTS
    tensorrt: tuple[str, ...] = ()
    tensorrt_precisions: tuple[Precision, ...] = ("fp16",)
    cache_dir: Path | None = None
    max_length: int | None = None
    task: str | None = None
    case: Case | None = None
    outputs: tuple[str, ...] | None = None
    change_task: bool = False
    references: tuple[Path, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    allowed: frozenset[str] = frozenset()
    calibration: Path | None = None
    calibration_column: str | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    if_changed: bool = False

    @property
    def wants_int8_engine(self) -> bool:
        return bool(self.tensorrt) and "int8" in self.tensorrt_precisions

    def sha256(self) -> str:
        """SHA-256 of everything beside the checkpoint that decides the result: options, their files, this version."""
        files = [*self.references, *([] if self.calibration is None else [self.calibration])]
        decisive = [
            SCHEMA_VERSION,
            host.installed_versions("bertserve"),
            [self.artifacts, self.tensorrt, self.tensorrt_precisions, self.max_length, self.task, self.case],
            self.calibration_column,
            [sorted(self.limits.items()), sorted(self.allowed)],
            [(file.name, digest(file)) for file in files],
            *([] if self.outputs is None else [["outputs", *self.outputs]]),
        ]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    def asked_of(self, artifact: str) -> dict[str, float]:
        """The limits set for an artifact; limits of one artifact override those for all."""
        places = {place: name for prefix in ("", f"{artifact}.") for name in LIMIT_NAMES if (place := prefix + name)}
        return {name: self.limits[place] for place, name in places.items() if place in self.limits}

    def limits_of(self, artifact: str, task: str) -> Limits:
        return replace(EXPORTS[task].limits[_PRECISIONS[artifact]], **self.asked_of(artifact))

    def allows(self, artifact: str, name: str) -> bool:
        return not self.allowed.isdisjoint({name, f"{artifact}.{name}"})
