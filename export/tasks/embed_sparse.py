"""The task embed_sparse: the vocabulary head, pooled over the tokens of a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bertserve.export.checkpoint.sparse import IDF
from bertserve.export.tasks.accuracy import PairReader
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import DecisionComparator, cosine
from bertserve.export.tasks.embed import Encoder
from bertserve.export.tasks.libraries.answers import FEW, MANY, NEAR, Answer, Variant, vector
from bertserve.export.tasks.libraries.sentences import BATCH
from bertserve.export.tasks.limits import limits_for
from bertserve.serving.records import MASK
from bertserve.serving.tasks.base import size_of
from bertserve.serving.tasks.embed_sparse import EmbedSparseOptions, of_tokens
from bertserve.serving.tasks.prompts import QUERIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.tasks.decisions import Numbers
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.records import EncodedText, Row
    from bertserve.serving.tasks.embed_sparse import SparseVector

_LARGEST = 32
"""Words of a text that count as its decisions: in an inverted index they decide what is found."""

_HARDLY = 1e-3
_TOP_K = 8
_MAX_PROMPTS = 4


def _forward(own: Any, common: Any, named: Any) -> tuple[Any, ...]:  # noqa: ANN401  see `TaskExport`
    encoder: Any = getattr(own.model, own.family.prefix.removesuffix("."))
    words, weights = own.sparse(own.model, encoder(**common).last_hidden_state, named[MASK])
    return words, weights


@dataclass(slots=True, frozen=True)
class _Comparator(DecisionComparator):
    """The weights of all words; the words with the largest."""

    directed: ClassVar[bool] = True

    def pair(self, row: Row, other: Row) -> tuple[Numbers, Numbers]:
        """Weights above the cut-off, beside those of the same words: rounding may choose another word at the end."""
        return self._beside(row, other, lambda weights: weights - weights[-1])

    def cosine(self, row: Row, other: Row) -> float:
        pair = self._beside(row, other, lambda weights: weights)
        # Two texts without a word are the same.
        return float(cosine(*pair)) if any(each.any() for each in pair) else 1.0

    def agreement(self, actual: Sequence[Row], expected: Sequence[Row], texts: Sequence[EncodedText]) -> float:
        """The mean share of the words with the largest weights that are the same."""
        del texts
        return float(np.mean([_overlap(*pair) for pair in zip(actual, expected, strict=True)]))

    def _beside(self, row: Row, other: Row, measure: Callable[[Numbers], Numbers]) -> tuple[Numbers, Numbers]:
        words = np.union1d(row[0], other[0])
        filled = []
        for indices, weights in (row, other):
            numbers = np.zeros(len(words))
            numbers[np.searchsorted(words, indices)] = measure(weights.astype(np.float64))
            filled.append(numbers)
        return filled[0], filled[1]


def _overlap(actual: Row, expected: Row) -> float:
    wanted = expected[0][: min(_LARGEST, int(np.count_nonzero(expected[1])))]
    return float(np.isin(wanted, actual[0][: len(wanted)]).mean()) if len(wanted) else 1.0


@dataclass(slots=True, frozen=True)
class _OfTokens(DecisionComparator):
    """The weights of a text's tokens; the words with the largest."""

    directed: ClassVar[bool] = True

    def numbers(self, row: Row) -> Numbers:
        numbers: Numbers = row[self.at("token_weights")].astype(np.float64)
        return numbers

    def cosine(self, row: Row, other: Row) -> float:
        pair = self.pair(row, other)
        # Two texts with hardly a weight are the same.
        return float(cosine(*pair)) if max(np.abs(each).max() for each in pair) > _HARDLY else 1.0

    def agreement(self, actual: Sequence[Row], expected: Sequence[Row], texts: Sequence[EncodedText]) -> float:
        """As that of `_Comparator`."""
        at = self.at("token_weights")
        sides = [
            [of_tokens(text, row[at], self.special_ids) for row, text in zip(side, texts, strict=True)]
            for side in (actual, expected)
        ]
        return float(np.mean([_overlap(*pair) for pair in zip(*sides, strict=True)]))


@dataclass(slots=True, frozen=True)
class _Reader(PairReader):
    @staticmethod
    def similarities(answers: Sequence[Row], pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Dot products."""
        return [_product(answers[one], answers[other]) for one, other in pairs]


def _product(row: Row, other: Row) -> float:
    _, at, beside = np.intersect1d(row[0], other[0], assume_unique=True, return_indices=True)
    return float(row[1][at].astype(np.float64) @ other[1][beside].astype(np.float64))


class SparseEncoder(Encoder):
    """Sentence Transformers' model; for OpenSearch's folders without modules, with its module for queries beside it."""

    _kind = "SparseEncoder"

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        super().__init__(checkpoint, folder)
        routes = getattr(self._model[0], "sub_modules", None)
        self._readers = [self._model[0]] if routes is None else [routes["document"][0], routes["query"][0]]
        self.tokenizer = self._readers[0].tokenizer
        self._lookup: Any = None
        if checkpoint.query_weights is not None and routes is None:
            from sentence_transformers.sparse_encoder import modules  # noqa: PLC0415  slow to import

            self._lookup = modules.SparseStaticEmbedding.from_json(str(folder / IDF), self.tokenizer)

    @property
    def longest(self) -> int:
        return super().longest

    @longest.setter
    def longest(self, length: int) -> None:
        for reader in self._readers:
            reader.tokenizer.model_max_length = length

    def variants(self) -> list[Variant]:
        checkpoint, usual = self._checkpoint, EmbedSparseOptions()
        prompts, looks_up = checkpoint.sentence.prompts, checkpoint.query_weights is not None
        # A server takes texts with a query's prompt for queries.
        left = {checkpoint.default_prompt, *(QUERIES if looks_up else ())}
        others = [name for name in prompts if name not in left][:_MAX_PROMPTS]
        variants = [Variant(usual), *(Variant(usual, f"with the prompt {name!r}", name, FEW) for name in others)]
        few = max(1, min(_TOP_K, checkpoint.active // 2))
        variants.append(Variant(EmbedSparseOptions(top_k=few), f"with `top_k` {few}", most=FEW, exact=True))
        if looks_up:
            query = "query" if "query" in prompts else None
            variants.append(Variant(EmbedSparseOptions(query=True), "as queries", query, MANY, exact=True))
        return variants

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        options, active = variant.options, self._checkpoint.active
        if not isinstance(options, EmbedSparseOptions):
            raise TypeError
        rows = self._weights(texts, variant, options)
        if options.top_k is None:
            return [vector(above_cut(row, active)) for row in rows]
        chosen = self._weights(texts, variant, options, max_active_dims=options.top_k)
        return [_surely(*each, options.top_k) for each in zip(chosen, rows, strict=True)]

    def _weights(
        self, texts: Sequence[Text], variant: Variant, options: EmbedSparseOptions, **asked: object
    ) -> NDArray[np.float32]:
        asked |= {"task": "query"} if options.query else {}
        if options.query and self._lookup is not None:
            alone = [self._lookup(self._lookup.preprocess([text]))["sentence_embedding"] for text in texts]
            return np.concatenate([weights.detach().numpy() for weights in alone])
        asked |= {"convert_to_sparse_tensor": False, "show_progress_bar": False}
        numbers: NDArray[np.float32] = self._model.encode(
            list(texts), prompt_name=variant.prompt, batch_size=BATCH, **asked
        ).numpy()
        return numbers


def above_cut(weights: NDArray[np.float32], active: int) -> NDArray[np.float32]:
    """The largest weights of a text, above the next one: rounding may choose another word at the end of them.

    All of them if `active`, their number, is 0.
    """
    if not active or np.count_nonzero(weights) < active:
        return weights
    cut: NDArray[np.float32] = np.maximum(weights - np.partition(weights, -active)[-active], 0)
    return cut


def _surely(chosen: NDArray[np.float32], weights: NDArray[np.float32], count: int) -> Answer:
    """The chosen weights; without content if the choice is a near-tie."""
    after, last = np.sort(weights)[-count - 1 : len(weights) - count + 1]
    if last > 0 and last - after <= NEAR * max(1, last):
        return Answer(weights.shape, (), np.array([]), sure=False)
    return vector(chosen)


def _read(answer: SparseVector, manifest: Manifest) -> Answer:
    weights = np.zeros(manifest.vocab_size, np.float32)
    weights[answer.indices] = answer.values
    return vector(above_cut(weights, 0 if manifest.also else size_of(manifest, "weights")))


EXPORT = TaskExport(
    forward=_forward,
    limits=limits_for(
        fp16={"agreement": 0.99},
        int8={"cosine_mean": 0.98, "cosine_p01": 0.95, "agreement": 0.9},
    ),
    comparator=_Comparator,
    further_comparator=_OfTokens,
    reader=_Reader,
    library=SparseEncoder,
    read=_read,
    vectors=True,
)
