"""Checks of replies for the load generator, shared by the tasks; see `LoadFormat`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class WrongError(Exception):
    """A reply is wrong. The message is the reason."""


def finite(values: object, dimensions: int) -> NDArray[Any]:
    """Checks that values are finite numbers, at least one, in an array of so many dimensions."""
    array = np.asarray(values)
    if array.dtype.kind not in "fi" or array.ndim != dimensions or not array.size:
        raise TypeError
    if not np.isfinite(array).all():
        raise WrongError("a number that is not finite")
    return array


def number(score: object) -> int:
    return finite(score, 0).ndim


def place(found: Any) -> int:  # noqa: ANN401  any JSON
    """The number of characters between the start and the end of a result."""
    if not 0 <= found["start"] <= found["end"]:
        raise WrongError("an end before its start")
    return int(found["end"] - found["start"])


def words(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError
    return text


def scored(found: Any) -> int:  # noqa: ANN401  any JSON
    for name, _ in found:
        words(name)
    return len(finite([score for _, score in found], 1))


def listed(found: Any) -> list[Any]:  # noqa: ANN401  any JSON
    if not isinstance(found, list):
        raise TypeError
    return found


def nested(found: Any) -> list[Any]:  # noqa: ANN401  any JSON
    """A list of lists of objects. A single list of objects is wrapped."""
    return [found] if isinstance(listed(found)[0], dict) else listed(found)


def ordered(indexed: list[tuple[int, Any]]) -> list[Any]:
    """Values in the order of their indices, which must be 0 to n - 1."""
    indexed.sort(key=lambda pair: pair[0])
    if [index for index, _ in indexed] != list(range(len(indexed))):
        raise WrongError("an index that is missing or given twice")
    return [value for _, value in indexed]
