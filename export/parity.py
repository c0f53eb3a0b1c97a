"""Compares an artifact with PyTorch, and with itself padded and batched, on the engine that will serve it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np

from export.errors import ExportError
from serving.engine.inline import InlineEngine
from serving.engine.ort import OrtCpuBackend
from serving.manifest import Invariance, Parity
from serving.records import Batch, BatchOutput, EncodedText, ModelIndex
from serving.scheduling.buckets import bucket_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from export.recipe import Limits
    from serving.engine.base import Engine, ModelSpec

    Vectors = NDArray[np.float32]
    Count = Callable[[int, int], None]
    Plan = list[tuple[list[int], list[EncodedText]]]

_BATCH = 8


@dataclass(slots=True, frozen=True)
class Verdict:
    """What the comparison found.

    Attributes:
        parity: Each text alone, beside PyTorch alone.
        invariance: Each text alone, beside itself padded and in mixed batches.
        batch_invariant: Whether the differences of `invariance` keep the limits.
        failure: Why the artifact must not be written; None when it may.
    """

    parity: Parity
    invariance: Invariance
    batch_invariant: bool
    failure: str | None


def verify(
    spec: ModelSpec, texts: Sequence[EncodedText], reference: Vectors, limits: Limits, *, threads: int, count: Count
) -> Verdict:
    """Runs an artifact over the texts: each alone, padded to its sequence bucket, and in a mixed batch.

    Args:
        spec: The artifact. Say `batch_invariant` in it, so that one wide lane takes padding and batches.
        texts: The encoded texts.
        reference: PyTorch's vectors of them, each text alone, float32 [texts, hidden].
        limits: What to keep.
        threads: Cores to use.
        count: Told how many of how many batches are done.

    Raises:
        ExportError: The engine failed on a batch.
    """
    plans = [_alone(texts), _padded(texts, spec.max_length), _mixed(texts)]
    ticks = _Ticks(count, sum(len(plan) for plan in plans))
    engine = InlineEngine(OrtCpuBackend([spec], threads))
    alone, padded, mixed = (_run(engine, texts, plan, reference.shape[1], ticks) for plan in plans)
    parity = _parity(alone, reference)
    invariance = _invariance(alone, [padded, mixed])
    return Verdict(parity, invariance, _is_invariant(invariance, limits), _failure(parity, limits))


def _alone(texts: Sequence[EncodedText]) -> Plan:
    return [([index], []) for index in range(len(texts))]


def _padded(texts: Sequence[EncodedText], max_length: int) -> Plan:
    """Texts of the same bucket together, with a neighbour that is as long as the bucket."""
    buckets = defaultdict(list)
    for index, text in enumerate(texts):
        buckets[min(bucket_for(len(text.ids)), max_length)].append(index)
    plan: Plan = []
    for length, indices in sorted(buckets.items()):
        neighbour = _neighbour(texts, length)
        plan += [(indices[at : at + _BATCH - 1], [neighbour]) for at in range(0, len(indices), _BATCH - 1)]
    return plan


def _mixed(texts: Sequence[EncodedText]) -> Plan:
    """Batches that each reach over the whole range of lengths."""
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
    batches = -(-len(texts) // _BATCH)
    return [(by_length[at::batches], []) for at in range(batches)]


def _neighbour(texts: Sequence[EncodedText], length: int) -> EncodedText:
    """A text of exactly `length` tokens, made of the tokens of all the others."""
    first, last = texts[0].ids[0], texts[0].ids[-1]
    inner = cycle([token for text in texts for token in text.ids[1:-1]] or [first])
    return EncodedText(array("i", [first, *islice(inner, length - 2), last]))


class _Ticks:
    def __init__(self, count: Count, total: int) -> None:
        self._count, self._total, self._done = count, total, 0

    def tick(self) -> None:
        self._done += 1
        self._count(self._done, self._total)


def _run(engine: Engine, texts: Sequence[EncodedText], plan: Plan, hidden_size: int, ticks: _Ticks) -> Vectors:
    vectors = np.full((len(texts), hidden_size), np.nan, np.float32)
    for indices, neighbours in plan:
        results: list[object] = []
        engine.submit(0, Batch(ModelIndex(0), [*(texts[index] for index in indices), *neighbours]), results.append)
        result = results[0]
        if not isinstance(result, BatchOutput):
            raise ExportError(f"the engine failed on a batch of {len(indices)} texts: {result}")
        vectors[indices] = result.arrays[0][: len(indices)]
        ticks.tick()
    return vectors


def _parity(vectors: Vectors, reference: Vectors) -> Parity:
    cosines = cosine(vectors, reference)
    return Parity(
        texts=len(vectors),
        max_abs_difference=float(np.abs(vectors - reference).max()),
        cosine_mean=float(cosines.mean()),
        cosine_p01=float(np.percentile(cosines, 1)),
        cosine_min=float(cosines.min()),
    )


def _invariance(alone: Vectors, others: Sequence[Vectors]) -> Invariance:
    return Invariance(
        texts=len(alone),
        max_abs_difference=max(float(np.abs(alone - other).max()) for other in others),
        cosine_min=min(float(cosine(alone, other).min()) for other in others),
    )


def cosine(left: Vectors, right: Vectors) -> NDArray[np.float64]:
    """The cosine of each row of one with the same row of the other, float64 [rows]."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    result: NDArray[np.float64] = np.divide((a * b).sum(axis=1), lengths, out=np.zeros(len(a)), where=lengths != 0)
    return result


def _is_invariant(found: Invariance, limits: Limits) -> bool:
    return found.max_abs_difference <= limits.invariance_difference and found.cosine_min >= limits.invariance_cosine


def _failure(found: Parity, limits: Limits) -> str | None:
    """The first limit that was broken; a figure that is not a number keeps none."""
    if not found.max_abs_difference <= limits.max_abs_difference:
        return f"largest difference from PyTorch {found.max_abs_difference:.2g}, allowed {limits.max_abs_difference:g}"
    if not found.cosine_mean >= limits.cosine_mean:
        return f"mean cosine to PyTorch {found.cosine_mean:.4f}, at least {limits.cosine_mean} needed"
    if not found.cosine_min >= limits.cosine_min:
        return f"least cosine to PyTorch {found.cosine_min:.4f}, at least {limits.cosine_min} needed"
    return None
