"""What to export, and the limits that its result must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

Precision = Literal["fp32", "int8"]

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")
"""Every precision that can be asked for, in the order in which they are made."""

MAX_ONNX_BYTES = 2**31
"""A protocol buffer, and so an ONNX file with its weights inside, holds less than 2 GiB."""


@dataclass(slots=True, frozen=True)
class Limits:
    """What an artifact must keep beside PyTorch, and what makes it batch-invariant.

    Attributes:
        max_abs_difference: Largest difference of any component of any raw vector.
        cosine_mean: Least mean cosine over the texts.
        cosine_min: Least cosine of any text.
        invariance_difference: Largest difference between a text alone and padded or batched.
        invariance_cosine: Least cosine between a text alone and padded or batched.
    """

    max_abs_difference: float
    cosine_mean: float
    cosine_min: float
    invariance_difference: float
    invariance_cosine: float


LIMITS: dict[Precision, Limits] = {
    "fp32": Limits(
        max_abs_difference=1e-4, cosine_mean=-1, cosine_min=-1, invariance_difference=1e-4, invariance_cosine=-1
    ),
    "int8": Limits(
        max_abs_difference=math.inf,
        cosine_mean=0.99,
        cosine_min=0.95,
        invariance_difference=math.inf,
        invariance_cosine=0.999,
    ),
}
"""The limits of each precision; -1 and infinity stand for no limit.

fp32 differs from PyTorch by the order of additions only, so it is held to components. INT8 differs by
design, so it is held to directions, which is what an embedding is compared by.
"""


@dataclass(slots=True, frozen=True)
class Recipe:
    """One export, as asked for.

    Attributes:
        source: A folder, a hub id, or `demo`.
        out: The model repository to write to.
        name: The model's name there; None takes it from the source.
        precisions: Which artifacts to make, in the order of `PRECISIONS`.
        max_length: Tokens of the longest input; None takes it from the checkpoint.
    """

    source: str
    out: Path
    name: str | None = None
    precisions: tuple[Precision, ...] = PRECISIONS
    max_length: int | None = None
