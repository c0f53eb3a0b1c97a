"""Compares an artifact with PyTorch, and with itself padded and batched, on the serving engine."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np

from bertserve.export.errors import ExportError
from bertserve.export.texts.corpus import shown
from bertserve.serving.engine.base import Batch, BatchOutput
from bertserve.serving.models.manifest import Invariance, Parity
from bertserve.serving.records import EncodedText, ModelIndex
from bertserve.serving.scheduling.cost import bucket_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from bertserve.export.tasks.decisions import DecisionComparator, Numbers
    from bertserve.export.tasks.limits import Limits
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.engine.base import Engine
    from bertserve.serving.models.manifest import Accuracy
    from bertserve.serving.records import Row

    Count = Callable[[int, int], None]
    Plan = list[tuple[list[int], list[EncodedText]]]

_SAMPLE = 16
"""Texts that a node repeats, in about a second including the start of the process."""
_BATCH = 8
_SHORT = 16
"""Tokens to which texts are truncated for mixed batches."""
_POINTS = 800


@dataclass(slots=True, frozen=True)
class Reference:
    """PyTorch's answers.

    Attributes:
        rows: The raw answers, each text alone, in the form of `decisions`.
    """

    texts: Sequence[Text]
    encoded: Sequence[EncodedText]
    rows: Sequence[Row]

    @property
    def sampled(self) -> list[int]:
        """The texts of a sample, from all parts of the list."""
        return [at * len(self.texts) // _SAMPLE for at in range(_SAMPLE)]

    def sample(self) -> Reference:
        at = self.sampled
        return Reference([self.texts[i] for i in at], [self.encoded[i] for i in at], [self.rows[i] for i in at])


@dataclass(slots=True, frozen=True)
class Comparison:
    """An artifact's answers compared with PyTorch's, each text alone.

    Attributes:
        differences: Largest difference of any number of a text, float64 [texts]; NaN if one is not a number.
        cosines: float64 [texts]; None if a text's numbers have no direction.
        points: Some of PyTorch's numbers with the artifact's, float64 [n, 2].
    """

    differences: NDArray[np.float64]
    cosines: NDArray[np.float64] | None
    points: NDArray[np.float64]

    def worst_first(self) -> NDArray[np.int64]:
        """The texts in order of their difference, largest first; NaN counts as largest."""
        distances = self.differences if self.cosines is None else -self.cosines
        return np.argsort(-np.nan_to_num(distances, nan=np.inf), kind="stable")


@dataclass(slots=True, frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        parity: Each text alone, against PyTorch alone.
        sample: The same for the texts of the sample.
        invariance: Each text alone, against itself padded in a mixed batch; long texts truncated, some whole.
        batch_invariant: Whether the differences of `invariance` keep the limits.
        further: As `parity` for the other tasks that the graph answers, by task.
        broken: The broken limits by name, each with a sentence.
    """

    comparison: Comparison
    parity: Parity
    sample: Parity
    invariance: Invariance
    batch_invariant: bool
    further: dict[str, Parity]
    broken: dict[str, str]


def verify(
    engine: Engine,
    comparator: DecisionComparator,
    reference: Reference,
    limits: Mapping[str, Limits],
    *,
    max_length: int,
    count: Count,
) -> Verdict:
    """Runs an artifact over the texts: each alone, and padded to its sequence bucket in a mixed batch.

    Args:
        engine: Runs the artifact as its only model; its first lane takes padding and batches.
        comparator: Reads its answers.
        reference: The texts and PyTorch's answers.
        limits: The limits to keep, by task; first those of the graph's own task.
        max_length: The model's maximum input in tokens.
        count: Called with the number of finished batches and of all.

    Raises:
        ExportError: The engine failed on a batch.
    """
    texts = reference.encoded
    probes = _probes(texts, max_length)
    company = _in_company(probes.texts, max_length)
    ticks = _Ticks(count, len(texts) + len(probes.cut) + len(company))
    alone = _run(engine, comparator, texts, _alone(texts), ticks)
    cut = _run(engine, comparator, [probes.texts[index] for index in probes.cut], _alone(probes.cut), ticks)
    together = _run(engine, comparator, probes.texts, company, ticks)
    comparison = _compare(comparator, alone, reference.rows)
    parity = _parity(comparator, comparison, alone, reference)
    sample = sample_parity(comparator, [alone[index] for index in reference.sampled], reference)
    invariance = _invariance(comparator, probes.rows(alone, cut), together, len(texts))
    own = next(iter(limits.values()))
    is_invariant = _is_invariant(invariance, own)
    further = further_parities(comparator, alone, reference)
    broken = broken_limits(parity, own)
    for task, figures in further.items():
        broken = with_broken(broken, task, broken_limits(figures, limits[task]))
    return Verdict(comparison, parity, sample, invariance, is_invariant, further, broken)


def further_parities(comparator: DecisionComparator, rows: Sequence[Row], reference: Reference) -> dict[str, Parity]:
    """Compares the answers to the other tasks of the graph, by task."""
    return {
        task: _parity(other, _compare(other, rows, reference.rows), rows, reference)
        for task, other in comparator.further.items()
    }


def with_broken(broken: Mapping[str, str], task: str, others: Mapping[str, str]) -> dict[str, str]:
    """Broken limits with those of another task that the graph answers."""
    joined = dict(broken)
    for name, sentence in others.items():
        joined[name] = "; ".join([*([joined[name]] if name in joined else []), f"{task}: {sentence}"])
    return joined


def sample_parity(comparator: DecisionComparator, rows: Sequence[Row], reference: Reference) -> Parity:
    """Compares the answers to the texts of a sample; the reference is the whole one."""
    sample = reference.sample()
    return _parity(comparator, _compare(comparator, rows, sample.rows), rows, sample)


def elsewhere(proven: Parity, before: Parity | None, now: Parity) -> Parity:
    """The figures over all texts that follow from the figures of the sample on this machine.

    Args:
        proven: Over all texts, on the machine of the proof.
        before: Of the sample, on that machine; None in bundles of earlier versions. Then only the worst text counts.
        now: Of the sample, on this machine.
    """
    before = before or now

    def moved(name: str) -> float | None:
        figures = [getattr(parity, name) for parity in (proven, before, now)]
        return None if None in figures else figures[0] - figures[1] + figures[2]

    # NaN stays NaN.
    differences, cosines = (proven.max_abs_difference, now.max_abs_difference), (proven.cosine_min, now.cosine_min)
    return Parity(
        texts=proven.texts,
        max_abs_difference=float(np.max(differences)),
        cosine_mean=moved("cosine_mean"),
        cosine_p01=moved("cosine_p01"),
        cosine_min=None if None in cosines else float(np.min(np.array(cosines, np.float64))),
        agreement=moved("agreement"),
        worst=now.worst,
    )


def key_figure(before: Parity | None, now: Parity) -> str:
    """The most telling figure of a sample here, and on the machine of the proof."""
    names = {"cosine_mean": "mean cosine to PyTorch", "agreement": "share of decisions that match PyTorch"}
    name, words = next(
        ((name, words) for name, words in names.items() if getattr(now, name) is not None),
        ("max_abs_difference", "largest difference from PyTorch"),
    )
    there = "" if before is None else f", {getattr(before, name):.4f} on the machine of the proof"
    return f"{words} {getattr(now, name):.4f}{there}"


def answers(engine: Engine, comparator: DecisionComparator, texts: Sequence[EncodedText], count: Count) -> list[Row]:
    """An artifact's raw answers, each text alone.

    Raises:
        ExportError: The engine failed on a text.
    """
    plan = _alone(texts)
    return _run(engine, comparator, texts, plan, _Ticks(count, len(plan)))


def _alone(texts: Sequence[object]) -> Plan:
    return [([index], []) for index in range(len(texts))]


@dataclass(slots=True, frozen=True)
class _Probes:
    """Texts for mixed batches.

    Attributes:
        texts: All texts, the long ones truncated; then some whole ones.
        cut: The truncated ones.
        whole: The texts at the end.
    """

    texts: Sequence[EncodedText]
    cut: Sequence[int]
    whole: Sequence[int]

    def rows(self, alone: Sequence[Row], cut: Sequence[Row]) -> list[Row]:
        """Their answers alone, from those of the texts and of the truncated ones."""
        shortened = dict(zip(self.cut, cut, strict=True))
        return [
            *(shortened.get(index, row) for index, row in enumerate(alone)),
            *(alone[index] for index in self.whole),
        ]


def _probes(texts: Sequence[EncodedText], max_length: int) -> _Probes:
    """Every text, truncated to `_SHORT`, and the longest whole text of each longer bucket.

    Batches of many long texts take longer than all else together and tell no more. The smallest cosine of the demo
    model's INT8 is 0.947 this way, and 0.942 with every text whole, padded and mixed over all lengths, in eight times
    the tokens.
    """
    short = [_cut(text) if len(text.ids) > _SHORT else text for text in texts]
    by_length = sorted(range(len(texts)), key=lambda index: len(texts[index].ids))
    longest = {min(bucket_for(len(texts[index].ids)), max_length): index for index in by_length}
    whole = [index for bucket, index in longest.items() if bucket > _SHORT]
    return _Probes(
        [*short, *(texts[index] for index in whole)],
        [index for index, text in enumerate(texts) if len(text.ids) > _SHORT],
        whole,
    )


def _cut(text: EncodedText) -> EncodedText:
    types = None if text.type_ids is None else text.type_ids[: _SHORT - 1] + text.type_ids[-1:]
    return EncodedText(text.ids[: _SHORT - 1] + text.ids[-1:], types)


def _in_company(texts: Sequence[EncodedText], max_length: int) -> Plan:
    """Texts of a bucket with mixed lengths together, with one as long as the bucket."""
    buckets = defaultdict(list)
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index].ids)):
        buckets[min(bucket_for(len(texts[index].ids)), max_length)].append(index)
    plan: Plan = []
    for length, indices in buckets.items():
        neighbour = text_of_length(texts, length)
        batches = -(-len(indices) // (_BATCH - 1))
        plan += [(indices[at::batches], [neighbour]) for at in range(batches)]
    return plan


def text_of_length(texts: Sequence[EncodedText], length: int) -> EncodedText:
    """A text of exactly `length` tokens (at least 2), made of the tokens of all the others."""
    first, last = texts[0].ids[0], texts[0].ids[-1]
    # Attention must see every token: those that it ignores end a text.
    inner = cycle([token for text in texts for token in text.ids[1:-1] if token >= 0] or [first])
    return EncodedText(array("i", [first, *islice(inner, length - 2), last]))


def run_batch(engine: Engine, texts: Sequence[EncodedText]) -> BatchOutput:
    """Runs one batch on an engine's first lane.

    Raises:
        ExportError: The engine failed on it.
    """
    results: list[object] = []
    engine.submit(0, Batch(ModelIndex(0), texts), results.append)
    if not isinstance(results[0], BatchOutput):
        raise ExportError(f"the engine failed on a batch of {len(texts)} texts: {results[0]}")
    return results[0]


class _Ticks:
    def __init__(self, count: Count, total: int) -> None:
        self._count, self._total, self._done = count, total, 0

    def tick(self) -> None:
        self._done += 1
        self._count(self._done, self._total)


def _run(
    engine: Engine, comparator: DecisionComparator, texts: Sequence[EncodedText], plan: Plan, ticks: _Ticks
) -> list[Row]:
    rows: dict[int, Row] = {}
    for indices, neighbours in plan:
        batch = [texts[index] for index in indices]
        output = run_batch(engine, [*batch, *neighbours])
        rows.update(zip(indices, comparator.rows(output.arrays, batch), strict=True))
        ticks.tick()
    return [rows[index] for index in range(len(texts))]


def _compare(comparator: DecisionComparator, rows: Sequence[Row], reference: Sequence[Row]) -> Comparison:
    found = [comparator.pair(*each) for each in zip(rows, reference, strict=True)]
    pairs = np.concatenate([np.stack([expected, actual], axis=1) for actual, expected in found])
    chosen = np.random.default_rng(0).permutation(len(pairs))[:_POINTS]
    return Comparison(_differences(found), _cosines(comparator, rows, reference), pairs[chosen])


def _parity(
    comparator: DecisionComparator, comparison: Comparison, rows: Sequence[Row], reference: Reference
) -> Parity:
    cosines = comparison.cosines
    return Parity(
        texts=len(comparison.differences),
        max_abs_difference=float(comparison.differences.max()),
        cosine_mean=None if cosines is None else float(cosines.mean()),
        cosine_p01=None if cosines is None else float(np.percentile(cosines, 1)),
        cosine_min=None if cosines is None else float(cosines.min()),
        agreement=comparator.agreement(rows, reference.rows, reference.encoded),
        worst=shown(reference.texts[int(comparison.worst_first()[0])]),
    )


def _invariance(
    comparator: DecisionComparator, alone: Sequence[Row], together: Sequence[Row], texts: int
) -> Invariance:
    differences, smallest = [], []
    for each in (comparator, *comparator.further.values()):
        found = [each.pair(*rows) for rows in zip(together, alone, strict=True)]
        differences.append(_differences(found).max())
        if (cosines := _cosines(each, together, alone)) is not None:
            smallest.append(cosines.min())
    # NaN stays NaN.
    return Invariance(
        texts=texts,
        max_abs_difference=float(np.max(differences)),
        cosine_min=float(np.min(smallest)) if smallest else None,
    )


def _differences(pairs: Sequence[tuple[Numbers, Numbers]]) -> NDArray[np.float64]:
    """The largest difference of each text; NaN if a number is NaN."""
    return np.array([np.abs(one - other).max(initial=0) for one, other in pairs])


def _cosines(
    comparator: DecisionComparator, actual: Sequence[Row], expected: Sequence[Row]
) -> NDArray[np.float64] | None:
    if not comparator.directed:
        return None
    return np.array([comparator.cosine(one, other) for one, other in zip(actual, expected, strict=True)])


def _is_invariant(invariance: Invariance, limits: Limits) -> bool:
    if not invariance.max_abs_difference <= limits.invariance_difference:
        return False
    return invariance.cosine_min is None or invariance.cosine_min >= limits.invariance_cosine


def broken_limits(parity: Parity, limits: Limits) -> dict[str, str]:
    """The broken limits; NaN breaks all of them."""
    broken = {}
    if not parity.max_abs_difference <= limits.max_abs_difference:
        broken["max_abs_difference"] = (
            f"largest difference from PyTorch {parity.max_abs_difference:.2g}, allowed {limits.max_abs_difference:g}"
        )
    for name, words in _AT_LEAST.items():
        figure, least = getattr(parity, name), getattr(limits, name)
        if figure is not None and not figure >= least:
            broken[name] = f"{words} {figure:.4f}, at least {least:g} needed"
    return broken


_AT_LEAST = {
    "cosine_mean": "mean cosine to PyTorch",
    "cosine_p01": "1st percentile of the cosine to PyTorch",
    "cosine_min": "minimum cosine to PyTorch",
    "agreement": "share of decisions that match PyTorch",
}


def broken_accuracy(figures: Sequence[Accuracy], limits: Limits) -> dict[str, str]:
    """The limit on the task's metric, if broken."""
    for figure in figures:
        if not figure.pytorch - figure.artifact <= limits.metric_loss:
            return {
                "metric_loss": f"{figure.metric} on {figure.reference} {figure.artifact:.2f}, PyTorch "
                f"{figure.pytorch:.2f}, allowed loss {limits.metric_loss:g} points"
            }
    return {}
