"""Raw answers of a graph for each text: their numbers and decisions.

A `Row` here is one text's part of every output without padding. Outputs per token are as long as the text; outputs per
mask have one entry for each mask of the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.records import Array, EncodedText, Row, TensorSpec
    from bertserve.serving.tasks.parts import Problem

    Numbers = NDArray[np.float64]

_CLEARLY = 0.1
"""Two scores differ clearly if they differ by more than this share of the standard deviation of all scores."""


@dataclass(slots=True, frozen=True)
class DecisionComparator:
    """Reads and compares the raw answers of one model.

    Attributes:
        problem: As in `Labels`.
        further: Comparators of the other tasks that the graph answers, by task. They read the same rows.
        directed: Whether a text's numbers have a direction, so that a cosine is meaningful.
        masked: Whether outputs have an entry for each mask instead of each token.
    """

    outputs: Sequence[TensorSpec]
    special_ids: dict[str, int]
    problem: Problem = "single_label"
    further: Mapping[str, DecisionComparator] = field(default_factory=dict)
    directed: ClassVar[bool] = False
    masked: ClassVar[bool] = False

    def rows(self, arrays: Sequence[Array], texts: Sequence[EncodedText]) -> list[Row]:
        """An engine's answer to a batch, as rows without padding."""
        return [
            tuple(
                array[index][: self._size(text)] if len(spec.shape) > 1 and spec.shape[1] == -1 else array[index]
                for spec, array in zip(self.outputs, arrays, strict=True)
            )
            for index, text in enumerate(texts)
        ]

    def sizes(self, spec: TensorSpec, texts: Sequence[EncodedText]) -> list[int]:
        """Number of entries of an output for each text."""
        return [self._size(text) if len(spec.shape) > 1 and spec.shape[1] == -1 else 1 for text in texts]

    def at(self, output: str) -> int:
        """The index of an output."""
        return [spec.name for spec in self.outputs].index(output)

    def _size(self, text: EncodedText) -> int:
        return text.ids.count(self.special_ids["mask"]) if self.masked else len(text.ids)

    def numbers(self, row: Row) -> Numbers:
        """All floating-point numbers of one text's answer, float64 [n].

        The best logits of a mask are sorted, so answers that name the same words in another order stay comparable.
        """
        parts = [array.ravel() for spec, array in zip(self.outputs, row, strict=True) if spec.dtype == "float32"]
        return np.concatenate(parts).astype(np.float64)

    def pair(self, row: Row, other: Row) -> tuple[Numbers, Numbers]:
        """The numbers of two answers to a text, each number beside its counterpart."""
        return self.numbers(row), self.numbers(other)

    def cosine(self, row: Row, other: Row) -> float:
        """The cosine of two answers to a text."""
        return float(cosine(self.numbers(row), self.numbers(other)))

    def agreement(self, actual: Sequence[Row], expected: Sequence[Row], texts: Sequence[EncodedText]) -> float | None:
        """Share of equal decisions; None if there are no decisions."""
        pairs = [
            (self.decisions(one, text), self.decisions(other, text))
            for one, other, text in zip(actual, expected, texts, strict=True)
        ]
        same = np.concatenate([left == right for left, right in pairs])
        return float(same.mean()) if same.size else 1.0

    def decisions(self, row: Row, text: EncodedText) -> NDArray[np.int64]:
        """The decisions of an answer, if each of them is a number."""
        raise NotImplementedError


@dataclass(slots=True, frozen=True)
class Undecided(DecisionComparator):
    """Vectors, which have no decisions."""

    directed: ClassVar[bool] = True

    def agreement(self, *_: object) -> None:
        pass


@dataclass(slots=True, frozen=True)
class Scores(DecisionComparator):
    """Values; their decisions are the order of each pair of texts whose scores differ clearly."""

    def agreement(self, actual: Sequence[Row], expected: Sequence[Row], texts: Sequence[EncodedText]) -> float | None:
        del texts
        columns = (np.stack([row[0] for row in side], axis=1) for side in (actual, expected))
        return float(np.mean([order_agreement(*pair) for pair in zip(*columns, strict=True)]))


def cosine(left: Array | Numbers, right: Array | Numbers) -> NDArray[np.float64]:
    """Cosines of vectors along the last axis; 0 if a vector is zero."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    products = np.asarray((a * b).sum(axis=-1))
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    result: NDArray[np.float64] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths != 0)
    return result


def order_agreement(actual: Array, expected: Array) -> float:
    """Share of text pairs in the same order, among those whose expected scores differ clearly."""
    difference = expected[:, None].astype(np.float64) - expected[None, :]
    clear = np.triu(np.abs(difference) > _CLEARLY * expected.std(), 1)
    same = np.sign(actual[:, None] - actual[None, :])[clear] == np.sign(difference)[clear]
    return float(same.mean()) if same.size else 1.0
