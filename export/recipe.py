"""What to export, and the limits that its result must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, get_args

from serving.manifest import Precision, Task

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
"""Every precision that can be asked for, in the order in which they are made."""

TASKS: tuple[Task, ...] = get_args(Task)

MAX_ONNX_BYTES = 2**31
"""A protocol buffer, and so an ONNX file with its weights inside, holds less than 2 GiB."""


@dataclass(slots=True, frozen=True)
class Limits:
    """What an artifact must keep beside PyTorch, and what makes it batch-invariant.

    Attributes:
        max_abs_difference: Largest difference of any number of any raw output.
        cosine_mean: Least mean cosine over the texts.
        cosine_p01: Least 1st percentile of the cosine.
        cosine_min: Least cosine of any text.
        agreement: Least share of decisions that are PyTorch's own.
        metric_loss: Points of the task's own metric that may be lost.
        invariance_difference: Largest difference between a text alone and padded or batched.
        invariance_cosine: Least cosine between a text alone and padded or batched.
    """

    max_abs_difference: float = math.inf
    cosine_mean: float = -1
    cosine_p01: float = -1
    cosine_min: float = -1
    agreement: float = 0
    metric_loss: float = math.inf
    invariance_difference: float = math.inf
    invariance_cosine: float = -1


_EXACT = Limits(max_abs_difference=1e-4, agreement=0.999, metric_loss=0.1, invariance_difference=1e-4)
_HALF = Limits(cosine_min=0.9999, agreement=0.999, metric_loss=0.2, invariance_cosine=0.999)
_EIGHT = Limits(metric_loss=0.5, invariance_cosine=0.999)
# Without a direction to compare, invariance is a matter of differences: this much of a logit changes nothing.
_UNDIRECTED = {"invariance_difference": 0.05}

LIMITS: dict[Precision, dict[Task, Limits]] = {
    "fp32": {
        **dict.fromkeys(TASKS, _EXACT),
        # Logits of words are sums over the whole width of the model, and as large as 30.
        "fill_mask": replace(_EXACT, max_abs_difference=1e-3, invariance_difference=1e-3),
    },
    "fp16": {
        **dict.fromkeys(TASKS, _HALF),
        "rerank": replace(_HALF, max_abs_difference=0.05, **_UNDIRECTED),
        "fill_mask": replace(_HALF, max_abs_difference=0.1, agreement=0.99, **_UNDIRECTED),
    },
    "int8": {
        "embed": replace(_EIGHT, cosine_mean=0.99, cosine_p01=0.97, cosine_min=0.95),
        "classify": replace(_EIGHT, agreement=0.95),
        "rerank": replace(_EIGHT, agreement=0.95, **_UNDIRECTED),
        "answer": replace(_EIGHT, cosine_mean=0.98, metric_loss=1),
        "tag": replace(_EIGHT, cosine_mean=0.98, agreement=0.97, metric_loss=1),
        "fill_mask": replace(_EIGHT, agreement=0.8, metric_loss=1, **_UNDIRECTED),
    },
}
"""The limits of each precision and task; those of `Limits` itself stand for no limit.

fp32 differs from PyTorch by the order of additions only, so it is held to every number. fp16 is held to
directions and decisions, and INT8, which differs by design, to what of them a user of the task can see.
"""

LIMIT_NAMES = tuple(limit.name for limit in fields(Limits))
_INVARIANCE_NAMES = tuple(name for name in LIMIT_NAMES if name.startswith("invariance"))
WAIVABLE = tuple(name for name in LIMIT_NAMES if name not in _INVARIANCE_NAMES)
"""Limits that an artifact has to keep to be shipped. One that breaks the others is run text by text."""


@dataclass(slots=True, frozen=True)
class Recipe:
    """One export, as asked for.

    Attributes:
        source: A folder, a hub id, or `demo`.
        out: The model repository to write to.
        name: The model's name there; None takes it from the source.
        precisions: Which artifacts to make, in the order of `PRECISIONS`.
        max_length: Tokens of the longest input; None takes it from the checkpoint.
        task: What to export it for; None takes it from the checkpoint.
        references: Files of labelled text for the task's own metric.
        calibration: A file of texts to calibrate with; None takes the built-in texts.
        calibration_column: Of a table, the column with the texts.
        limits: Limits other than those of `LIMITS`, by their names, or by `precision.name` for one precision.
        allowed: Names of limits, in the same two forms, that may be broken.
    """

    source: str
    out: Path
    name: str | None = None
    precisions: tuple[Precision, ...] = PRECISIONS
    max_length: int | None = None
    task: Task | None = None
    references: tuple[Path, ...] = ()
    calibration: Path | None = None
    calibration_column: str | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    allowed: frozenset[str] = frozenset()

    def limits_of(self, precision: Precision, task: Task) -> Limits:
        """What an artifact of that precision must keep."""
        own = {key.removeprefix(f"{precision}."): value for key, value in sorted(self.limits.items(), key=_general)}
        return replace(LIMITS[precision][task], **{name: own[name] for name in LIMIT_NAMES if name in own})

    def allows(self, precision: Precision, name: str) -> bool:
        """Whether that limit may be broken."""
        return not self.allowed.isdisjoint({name, f"{precision}.{name}"})


def _general(limit: tuple[str, float]) -> bool:
    """Sorts what is said of one precision behind what is said of all, so that it wins."""
    return "." in limit[0]
