"""Requests and answers of the server and the libraries, in one form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.tasks.base import TaskOptions

FEW = 4
"""Number of texts for a variant other than the usual one."""

MANY = 48
"""Number of texts for a variant that is another reading of the same numbers."""

NEAR = 1e-4
"""Maximum difference of logits, and of relative scores, that makes a near-tie in fp32; the limit of fp32's numbers."""


@dataclass(slots=True, frozen=True)
class Variant:
    """A variant of a request.

    Attributes:
        title: What it requests, as the end of a sentence; empty for the usual variant.
        prompt: The name of a prompt; None for the default one, if any.
        most: Maximum number of texts that are asked like this; None for all.
        exact: Whether it applies only to artifacts with a limit on every number: one other tag makes other entities.
    """

    options: TaskOptions[Any]
    title: str = ""
    prompt: str | None = None
    most: int | None = None
    exact: bool = False


@dataclass(slots=True, frozen=True)
class Answer:
    """The answer to one text.

    Attributes:
        structure: What does not depend on precision: sizes, names, places.
        decisions: What follows from the numbers: labels, words, spans.
        numbers: The numbers, float64 [n].
        sure: Whether no decision is a near-tie, which rounding may change.
    """

    structure: tuple[object, ...]
    decisions: tuple[object, ...]
    numbers: NDArray[np.float64]
    sure: bool = True


def vector(numbers: Any) -> Answer:  # noqa: ANN401  an array of NumPy's or of PyTorch's
    """A vector, or one for each token."""
    array = np.asarray(numbers, np.float64)
    return Answer(array.shape, (), array.ravel())


def score(number: float) -> Answer:
    return Answer((), (), np.array([number], np.float64))


def labels(scores: Iterable[tuple[str, float]], *, chosen: bool) -> Answer:
    """Every label with its score; `chosen` if one of them is the answer."""
    ordered = sorted(scores)
    best = max(ordered, key=lambda pair: pair[1])[0]
    numbers = np.array([number for _, number in ordered], np.float64)
    return Answer(tuple(name for name, _ in ordered), (best,) if chosen else (), numbers, _is_clear(numbers))


def tagged(found: Iterable[tuple[str, float, int, str, int, int]]) -> Answer:
    """Tokens with their tags: tag, score, place, word, start, end of each."""
    whole = list(found)
    numbers = np.array([one[1] for one in whole], np.float64)
    return Answer(tuple(one[2:] for one in whole), tuple(one[0] for one in whole), numbers)


def entities(found: Iterable[tuple[str, float, int, int]]) -> Answer:
    """Entities: tag, score, start, end of each."""
    whole = list(found)
    decisions = tuple((tag, start, end) for tag, _, start, end in whole)
    return Answer((), decisions, np.array([one[1] for one in whole], np.float64))


def fillings(masks: Iterable[Sequence[tuple[float, int, str, str]]]) -> Answer:
    """The best words of each mask, best first: score, token, word, whole text of each."""
    whole = list(masks)
    numbers = np.array([word[0] for best in whole for word in best], np.float64)
    sure = all(_is_clear([word[0] for word in best]) for best in whole)
    return Answer((len(whole),), tuple(best[0][1:] for best in whole), numbers, sure)


def _is_clear(scores: Sequence[float] | NDArray[np.float64]) -> bool:
    """Whether the largest number is not a near-tie with the next one."""
    *_, second, best = [-np.inf, *sorted(scores)]
    return bool(best - second > NEAR * abs(best))


def span(answer: str, number: float, start: int, end: int) -> Answer:
    """The part of a context that answers a question."""
    return Answer((), ((answer, start, end),), np.array([number], np.float64))
