"""What artifacts of each precision must keep beside PyTorch, unless a task sets other limits.

fp32 differs from PyTorch by the order of additions only, so it is held to every number. fp16 is held to directions and
decisions, and INT8, which differs by design, to what of them a user of the task can see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from serving.models.manifest import Precision


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
UNDIRECTED = {"invariance_difference": 0.05}
"""Without a direction to compare, invariance is a matter of differences: this much of a logit changes nothing."""


def limits_for(
    *, fp32: Mapping[str, Any] | None = None, fp16: Mapping[str, Any] | None = None, int8: Mapping[str, Any]
) -> dict[Precision, Limits]:
    """A task's limits, given where they are not the usual ones; those of `Limits` itself stand for no limit."""
    return {
        "fp32": replace(_EXACT, **fp32 or {}),
        "fp16": replace(_HALF, **fp16 or {}),
        "int8": replace(_EIGHT, **int8),
    }
