"""The limits for artifacts of each precision relative to PyTorch, unless a task sets other ones.

fp32 differs from PyTorch only by the order of additions, so every number is limited. fp16 has limits on directions and
decisions. INT8 differs by design, so only directions and decisions that users of the task see are limited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.serving.models.manifest import Precision


@dataclass(slots=True, frozen=True)
class Limits:
    """Limits of an artifact's differences from PyTorch, and of batch invariance.

    Attributes:
        max_abs_difference: Maximum difference of any number of any raw output.
        cosine_mean: Minimum mean cosine over the texts.
        cosine_p01: Minimum 1st percentile of the cosine.
        cosine_min: Minimum cosine of any text.
        agreement: Minimum share of decisions that equal PyTorch's.
        metric_loss: Maximum loss of the task's own metric, in points.
        invariance_difference: Maximum difference between a text alone and padded or batched.
        invariance_cosine: Minimum cosine between a text alone and padded or batched.
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
"""Batch invariance for outputs without a direction: a difference of this much in a logit changes nothing."""


def limits_for(
    *, fp32: Mapping[str, Any] | None = None, fp16: Mapping[str, Any] | None = None, int8: Mapping[str, Any]
) -> dict[Precision, Limits]:
    """A task's limits: the usual ones, with the given changes. The defaults of `Limits` mean no limit."""
    return {
        "fp32": replace(_EXACT, **fp32 or {}),
        "fp16": replace(_HALF, **fp16 or {}),
        "int8": replace(_EIGHT, **int8),
    }
