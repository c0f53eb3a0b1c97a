"""What to export, and the limits that its result must keep."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

from export.errors import ExportError
from export.tasks import EXPORTS
from export.tasks.limits import Limits
from serving import host
from serving.models.manifest import SCHEMA_VERSION, Precision, Target
from serving.models.verified_dir import digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from export.checkpoint.labels import Asked
    from export.checkpoint.layouts.case import Case
    from serving.engine.specs import SplitBy
    from serving.models.manifest import Artifact


@dataclass(slots=True, frozen=True)
class Form:
    """A kind of ONNX artifact.

    Attributes:
        precision: What it computes in.
        target: What runs it.
        file: Its name in the bundle.
    """

    precision: Precision
    target: Target
    file: str


FORMS = {
    "fp32": Form("fp32", "cpu", "model.fp32.onnx"),
    "int8": Form("int8", "cpu", "model.int8.onnx"),
    "int8-openvino": Form("int8", "openvino", "model.int8.openvino.onnx"),
    "fp16": Form("fp16", "cuda", "model.fp16.onnx"),
}
"""The ONNX artifacts that can be asked for, by their names on the command line, in the order in which they are made.

fp16 is for ONNX Runtime on a GPU; on a CPU it is only proven, since there it is slower than fp32.
"""

INT8_ENGINE = "int8-tensorrt"
"""What limits call the INT8 engines of TensorRT: their graph keeps them at the export, an engine where it runs."""

_PRECISIONS: Mapping[str, Precision] = {name: form.precision for name, form in FORMS.items()} | {INT8_ENGINE: "int8"}
SPLIT_FORMS = frozenset({"fp32", "int8", "fp16"})
"""The graphs that can be cut into parts: those that ONNX Runtime runs."""

LIMITED = tuple(_PRECISIONS)
"""Names of what limits can be set for."""

DEFAULT_FORMS = ("fp32", "int8")
SECOND = "int8-openvino"
"""Made by default too where OpenVINO is installed."""

LIMIT_NAMES = tuple(limit.name for limit in fields(Limits))
_INVARIANCE_NAMES = tuple(name for name in LIMIT_NAMES if name.startswith("invariance"))
WAIVABLE = tuple(name for name in LIMIT_NAMES if name not in _INVARIANCE_NAMES)
"""Limits that an artifact has to keep to be shipped. One that breaks the others is run text by text."""


def limits_of(artifact: Artifact, task: str) -> Limits:
    """What an artifact of a bundle must keep: the usual limits, and those that its recipe set.

    Raises:
        ExportError: The manifest sets a limit that there is not.
    """
    if unknown := artifact.limits.keys() - set(LIMIT_NAMES):
        raise ExportError(f"the manifest sets a limit for {artifact.file} that there is not: {min(unknown)!r}")
    return replace(EXPORTS[task].limits[artifact.precision], **artifact.limits)


@dataclass(slots=True, frozen=True)
class Recipe:
    """One export, as asked for.

    Attributes:
        source: A folder, a hub id, or `demo`.
        out: The model repository to write to.
        name: The model's name there; None takes it from the source.
        forms: Which ONNX artifacts to make, in the order of `FORMS`.
        tensorrt: What to build TensorRT engines for.
        tensorrt_precisions: In which precisions: fp16, int8.
        cache_dir: The cache of the node that native engines are built for; None where none is.
        triton: A Triton model repository to write the bundle to as well; None for none.
        max_length: Tokens of the longest input; None takes it from the checkpoint.
        task: What to export it for; None takes it from the checkpoint.
        case: Whether words keep their case; None takes it from the checkpoint.
        change_task: Whether the model may have had another task so far.
        references: Files of labelled text for the task's own metric.
        limits: Limits other than those of the task, by their names, or by `form.name` for one artifact.
        allowed: Names of limits, in the same two ways, that may be broken.
        calibration: A file of text that INT8's ranges are taken from; None for the package's own texts.
        calibration_column: The column of that file, by its number or its name.
        revision: The hub's branch, tag or commit; None for its main branch.
        token: Of an account of the hub; None takes the one that the hub's client finds.
        if_changed: Whether to make nothing where the model's newest version is made of the same by the same recipe.
        split: In how many parts each artifact is cut; 1 for none.
        split_by: How.
    """

    source: str
    out: Path
    name: str | None = None
    forms: tuple[str, ...] = DEFAULT_FORMS
    tensorrt: tuple[str, ...] = ()
    tensorrt_precisions: tuple[Precision, ...] = ("fp16",)
    cache_dir: Path | None = None
    triton: Path | None = None
    max_length: int | None = None
    task: Asked | None = None
    case: Case | None = None
    change_task: bool = False
    references: tuple[Path, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    allowed: frozenset[str] = frozenset()
    calibration: Path | None = None
    calibration_column: str | None = None
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    if_changed: bool = False
    split: int = 1
    split_by: SplitBy = "layers"

    @property
    def ranks(self) -> int:
        """In how many shares layers are split."""
        return self.split if self.split_by == "tensors" else 1

    @property
    def wants_int8_engine(self) -> bool:
        """Whether TensorRT is to have a graph in INT8."""
        return bool(self.tensorrt) and "int8" in self.tensorrt_precisions

    def sha256(self) -> str:
        """Of what decides what is written beside the checkpoint: options, files that they name, and this version."""
        files = [*self.references, *([] if self.calibration is None else [self.calibration])]
        decisive = [
            SCHEMA_VERSION,
            host.installed("bertserve"),
            [self.forms, self.tensorrt, self.tensorrt_precisions, self.max_length, self.task, self.case],
            self.calibration_column,
            [sorted(self.limits.items()), sorted(self.allowed)],
            [(file.name, digest(file)) for file in files],
            *([] if self.split == 1 else [[self.split, self.split_by]]),
        ]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    def asked_of(self, form: str) -> dict[str, float]:
        """The limits set for an artifact of that form; what is said of one form wins over what is said of all."""
        asked = {name: self.limits[name] for name in LIMIT_NAMES if name in self.limits}
        return asked | {name: self.limits[f"{form}.{name}"] for name in LIMIT_NAMES if f"{form}.{name}" in self.limits}

    def limits_of(self, form: str, task: str) -> Limits:
        """What an artifact of that form must keep."""
        return replace(EXPORTS[task].limits[_PRECISIONS[form]], **self.asked_of(form))

    def allows(self, form: str, name: str) -> bool:
        """Whether that limit may be broken."""
        return not self.allowed.isdisjoint({name, f"{form}.{name}"})
