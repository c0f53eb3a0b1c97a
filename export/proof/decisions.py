"""Raw answers of a graph, text by text: their numbers, and what they decide.

A `Row` here is one text's part of every output without what padding added: outputs of a token each are as long
as the text, outputs of a mask each have as many entries as the text has masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from serving.models.manifest import Task
    from serving.records import Array, EncodedText, Row, TensorSpec

    Numbers = NDArray[np.float64]

LONGEST_SPAN = 30
"""Tokens of the longest answer that is looked for in a context."""

_CLEARLY = 0.1
"""Two scores differ clearly when they do by this share of the standard deviation of all."""

_DIRECTED = frozenset({"embed", "embed_tokens", "answer", "tag"})
_OF_MASKS = frozenset({"top_ids", "top_logits", "logsumexp"})


@dataclass(slots=True, frozen=True)
class Judge:
    """How the raw answers of one model are read.

    Attributes:
        task: The model's task.
        outputs: The graph's outputs.
        special_ids: Ids of the special tokens by role.
        multi_label: Whether each label is decided for itself.
        regression: Whether the labels are values.
    """

    task: Task
    outputs: Sequence[TensorSpec]
    special_ids: dict[str, int]
    multi_label: bool = False
    regression: bool = False

    @property
    def directed(self) -> bool:
        """Whether a text's numbers have a direction, so that a cosine says something."""
        return self.task in _DIRECTED

    def rows(self, arrays: Sequence[Array], texts: Sequence[EncodedText]) -> list[Row]:
        """An engine's answer to a batch, text by text, without what padding added."""
        return [
            tuple(
                array[index][: self._size(spec, text)] if len(spec.shape) > 1 and spec.shape[1] == -1 else array[index]
                for spec, array in zip(self.outputs, arrays, strict=True)
            )
            for index, text in enumerate(texts)
        ]

    def sizes(self, spec: TensorSpec, texts: Sequence[EncodedText]) -> list[int]:
        """How many entries of an output belong to each text."""
        return [self._size(spec, text) if len(spec.shape) > 1 and spec.shape[1] == -1 else 1 for text in texts]

    def _size(self, spec: TensorSpec, text: EncodedText) -> int:
        return text.ids.count(self.special_ids["mask"]) if spec.name in _OF_MASKS else len(text.ids)

    def numbers(self, row: Row) -> Numbers:
        """All floating-point numbers of one text's answer, float64 [n].

        The best logits of a mask are in their order, so two answers that name the same words in another order
        still lie beside one another.
        """
        parts = [array.ravel() for spec, array in zip(self.outputs, row, strict=True) if spec.dtype == "float32"]
        return np.concatenate(parts).astype(np.float64)

    def cosine(self, row: Row, other: Row) -> float:
        """Between two answers to a text; where each token has a direction of its own, of the worst token."""
        if self.task == "embed_tokens":
            return float(cosine(row[0], other[0]).min())
        return float(cosine(self.numbers(row), self.numbers(other)))

    def agreement(self, actual: Sequence[Row], expected: Sequence[Row], texts: Sequence[EncodedText]) -> float | None:
        """Share of the decisions that are the same; None for embed and embed_tokens, which decide nothing.

        classify: the label of a text, or each of its labels. rerank, and each value of a regression: which of two
        texts stands first, over all pairs whose scores differ clearly. answer: the best span, or one that the wanted
        answer scores no worse than its best but for a step of fp16 in each logit: it does not tell those two apart
        itself. tag: the tag of a token. fill_mask: the best word of a mask.
        """
        if self.task in {"embed", "embed_tokens"}:
            return None
        if self.task == "answer":
            return float(np.mean([self._same_span(*pair) for pair in zip(actual, expected, texts, strict=True)]))
        if self.task == "rerank" or self.regression:
            columns = (np.stack([row[0] for row in side], axis=1) for side in (actual, expected))
            return float(np.mean([order_agreement(*pair) for pair in zip(*columns, strict=True)]))
        pairs = [
            (self._decisions(one, text), self._decisions(other, text))
            for one, other, text in zip(actual, expected, texts, strict=True)
        ]
        same = np.concatenate([left == right for left, right in pairs])
        return float(same.mean()) if same.size else 1.0

    def _decisions(self, row: Row, text: EncodedText) -> NDArray[np.int64]:
        if self.task == "classify":
            return (row[0] > 0).astype(np.int64) if self.multi_label else np.array([row[0].argmax()])
        if self.task == "tag":
            spoken = np.array([token not in self._frame() for token in text.ids])
            tags: NDArray[np.int64] = row[0].argmax(axis=-1)[spoken]
            return tags
        return row[0][:, 0].astype(np.int64)

    def _same_span(self, actual: Row, expected: Row, text: EncodedText) -> bool:
        first, last = self.context(text)
        starts, ends = (side[first:last] for side in expected)
        if not len(starts):
            return True
        best, other = best_span(starts, ends), best_span(actual[0][first:last], actual[1][first:last])
        logits, others = (np.array([starts[span[0]], ends[span[1]]], np.float64) for span in (best, other))
        return bool(logits.sum() - others.sum() <= np.spacing(np.abs(logits).astype(np.float16)).sum(dtype=np.float64))

    def _frame(self) -> set[int]:
        return {self.special_ids[role] for role in ("cls", "sep", "pad")}

    def context(self, text: EncodedText) -> tuple[int, int]:
        """Where the second text of a pair stands: its first token, and one past its last."""
        separator = self.special_ids["sep"]
        first = text.ids.index(separator) + 1
        # RoBERTa puts two separators between the texts of a pair.
        while first < len(text.ids) - 1 and text.ids[first] == separator:
            first += 1
        return first, len(text.ids) - 1


def best_span(start: Array, end: Array, longest: int = LONGEST_SPAN) -> tuple[int, int]:
    """The span with the largest sum of its first token's start logit and its last token's end logit.

    Args:
        start: Start logits of the context's tokens.
        end: End logits of the same tokens.
        longest: Tokens that a span may have.

    Returns:
        Its first and last token; (0, 0) of an empty context.
    """
    if not len(start):
        return 0, 0
    sums = start[:, None].astype(np.float64) + end[None, :]
    indices = np.arange(len(start))
    lengths = indices[None, :] - indices[:, None]
    sums[(lengths < 0) | (lengths >= longest)] = -np.inf
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    return int(first), int(last)


def cosine(left: Array | Numbers, right: Array | Numbers) -> NDArray[np.float64]:
    """The cosines of vectors, which lie along the last axis; 0 where one has no length."""
    a, b = left.astype(np.float64), right.astype(np.float64)
    products = np.asarray((a * b).sum(axis=-1))
    lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    result: NDArray[np.float64] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths != 0)
    return result


def order_agreement(actual: Array, expected: Array) -> float:
    """Share of the pairs of texts that stand in the same order, of those whose wanted scores differ clearly."""
    difference = expected[:, None].astype(np.float64) - expected[None, :]
    clear = np.triu(np.abs(difference) > _CLEARLY * expected.std(), 1)
    same = np.sign(actual[:, None] - actual[None, :])[clear] == np.sign(difference)[clear]
    return float(same.mean()) if same.size else 1.0
