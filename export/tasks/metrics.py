"""The tasks' metrics, times 100: rank correlation, accuracy, exact match and F1 of answers, entity F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Entity = tuple[int, int, str]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. NaN if all values are equal."""
    one, other = _ranks(np.asarray(left, np.float64)), _ranks(np.asarray(right, np.float64))
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return float("nan")
    return float(100 * np.corrcoef(one, other)[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: NDArray[np.float64] = (last - (counts - 1) / 2)[inverse]
    return result


def accuracy(actual: Sequence[object], expected: Sequence[object]) -> float:
    """Share of correct answers."""
    return 100 * sum(one == other for one, other in zip(actual, expected, strict=True)) / len(expected)


def answers(actual: Sequence[str], expected: Sequence[Sequence[str]]) -> tuple[float, float]:
    """Exact match and word F1 as in SQuAD 1.1; each question counts its best match among the right answers."""
    exact, shared = 0.0, 0.0
    for answer, options in zip(actual, expected, strict=True):
        exact += max(float(_normal(answer) == _normal(option)) for option in options)
        shared += max(_word_f1(answer, option) for option in options)
    return 100 * exact / len(expected), 100 * shared / len(expected)


def _normal(answer: str) -> str:
    """Lowercase, without punctuation, articles and extra spaces."""
    letters = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", letters).split())


def _word_f1(answer: str, option: str) -> float:
    actual, expected = _normal(answer).split(), _normal(option).split()
    same = sum((Counter(actual) & Counter(expected)).values())
    return 2 * same / (len(actual) + len(expected)) if same else 0.0


def entity_f1(actual: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> float:
    """F1 over the entities of all sentences; an entity matches if its first word, last word and type do."""
    pairs = [(entities(one), entities(other)) for one, other in zip(actual, expected, strict=True)]
    same = sum(len(one & other) for one, other in pairs)
    total = sum(len(one) + len(other) for one, other in pairs)
    return 200 * same / total if total else 0.0


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of a sentence in BIO tags, each as (first word, last word, type).

    An I- tag that does not continue an entity of its type starts one, as in the scorer of the CoNLL task.
    """
    spans: set[Entity] = set()
    begun: tuple[int, str] | None = None
    for index, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        continues = mark == "I" and begun is not None and begun[1] == kind
        if begun is not None and not continues:
            spans.add((begun[0], index - 1, begun[1]))
        if not continues:
            begun = None if mark == "O" else (index, kind)
    return spans
