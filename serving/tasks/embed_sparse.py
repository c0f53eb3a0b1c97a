"""The task `embed_sparse`: a weight for each token of the vocabulary that a text speaks of, as SPLADE computes it.

Queries of some models need no engine: their vector has the weight of each of their tokens (`query_weights` of a
manifest; SparseStaticEmbedding in Sentence Transformers).

Other models weigh the tokens of a text itself (bge-m3, arXiv 2402.03216): a token of the vocabulary has the largest
weight of its occurrences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray  # noqa: TC002  bulk work reads the annotations

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.tasks import replies
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Task,
    TaskOptions,
    TaskRoute,
    check_top_k,
    output_at,
    size_of,
    texts_of,
    with_checks,
)
from bertserve.serving.tasks.parts import present
from bertserve.serving.tasks.prompts import Prepared, for_side, prompted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bertserve.serving.records import EncodedText, TextInput, Truncate
    from bertserve.serving.tasks.base import Facts, Tokenizer, Work


class SparseVector(msgspec.Struct, frozen=True, eq=False):
    """A sparse vector over the vocabulary.

    Attributes:
        indices: Token ids, int32, ascending.
        values: Their weights, float32, none of them 0.
    """

    indices: NDArray[np.int32]
    values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.indices)


class NamedSparseVector(SparseVector, frozen=True, eq=False):
    """A sparse vector with the name of each token."""

    tokens: list[str]


class EmbedSparseOptions(TaskOptions[list[SparseVector]], frozen=True):
    """Options whose answer is a sparse vector for each input.

    Attributes:
        top_k: Maximum weights of a vector: the largest; None keeps all.
        threshold: Smallest weight of a vector; None keeps all.
        query: Whether the inputs are queries; matters only for models whose queries have weights of their own.
        tokens: Whether vectors have the names of their tokens.
    """

    top_k: int | None = None
    threshold: float | None = None
    query: bool = False
    tokens: bool = False


_UNWEIGHTED = ("cls", "eos", "pad", "unk")
"""Roles of special tokens without a weight, as in FlagEmbedding."""


def check(options: EmbedSparseOptions, _: Facts) -> None:
    check_top_k(options.top_k)
    if options.threshold is not None and math.isnan(options.threshold):
        raise InvalidRequest("`threshold` is NaN; it must be a number")


def prepare(
    inputs: Sequence[TextInput],
    options: EmbedSparseOptions,
    facts: Facts,
    prompt_name: str | None,
    input_type: str | None,
) -> Prepared[EmbedSparseOptions]:
    options = for_side(options, input_type or prompt_name)
    inputs = prompted(inputs, facts, prompt_name, input_type)
    return Prepared(inputs, options, engineless=options.query and present(facts.sparse).query_weights)


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: EmbedSparseOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    if options.query and tokenizer.query_weights is not None:
        return tokenizer.encode_bare(texts_of(inputs), truncate=truncate)
    return tokenizer.encode(inputs, truncate=truncate)


def finish(work: Work[EmbedSparseOptions]) -> list[SparseVector]:
    options = work.options
    table = work.tokenizer.query_weights if options.query else None
    weighed = _computed(work) if table is None else _looked_up(work.texts, table, size_of(work.manifest, "weights"))
    vectors = [_sparse(indices, weights, options) for indices, weights in with_checks(weighed, work.check, 1)]
    return [_named(vector, work.tokenizer) for vector in vectors] if options.tokens else vectors


def _computed(work: Work[EmbedSparseOptions]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The indices and weights of each text from the graph's outputs, weights descending."""
    facts, rows = work.manifest, work.rows
    if any(spec.name == "token_weights" for spec in facts.outputs):
        at = output_at(facts, "token_weights")
        return (of_tokens(*each, facts.special_ids) for each in zip(work.texts, (row[at] for row in rows), strict=True))
    indices, weights = output_at(facts, "indices"), output_at(facts, "weights")
    return ((row[indices], row[weights]) for row in rows)


def of_tokens(
    text: EncodedText, token_weights: NDArray[Any], special_ids: Mapping[str, int]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The largest weight of each token of a text, descending, without special tokens and zeros.

    `token_weights`, float32 [tokens], may be padded.
    """
    ids, weights = np.array(text.ids, np.int32), token_weights[: len(text.ids)]
    unweighted = [special_ids[role] for role in _UNWEIGHTED if role in special_ids]
    kept = (weights > 0) & ~np.isin(ids, unweighted)
    indices, places = np.unique(ids[kept], return_inverse=True)
    largest = np.zeros(len(indices), np.float32)
    np.maximum.at(largest, places, weights[kept])
    order = np.argsort(-largest, kind="stable")
    return indices[order], largest[order]


def _looked_up(
    texts: Sequence[EncodedText], table: NDArray[np.float32], most: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """The tokens of each text with the largest weights in the table, descending. Their sign does not count."""
    for text in texts:
        indices = np.unique(np.array(text.ids, np.int32))
        order = np.argsort(-np.abs(table[indices]), kind="stable")[:most]
        yield indices[order], table[indices[order]]


def _sparse(indices: NDArray[Any], weights: NDArray[Any], options: EmbedSparseOptions) -> SparseVector:
    """The vector of tokens with descending weights, some of which may be 0."""
    kept = weights != 0 if options.threshold is None else (weights != 0) & (weights >= options.threshold)
    places = np.flatnonzero(kept)[: options.top_k]
    places = places[np.argsort(indices[places])]
    return SparseVector(indices[places].astype(np.int32), weights[places].astype(np.float32))


def _named(vector: SparseVector, tokenizer: Tokenizer) -> SparseVector:
    # A model may have more rows of embeddings than its tokenizer has tokens.
    tokens = [tokenizer.name(token) or f"#{token}" for token in vector.indices.tolist()]
    return NamedSparseVector(vector.indices, vector.values, tokens)


def _recorded(options: EmbedSparseOptions, _: Facts, count: int) -> list[SparseVector]:
    indices, values = np.array([1056, 2549, 4003], np.int32), np.array([1.2031, 1.8664, 0.4113], np.float32)
    vector = SparseVector(indices, values)
    return [NamedSparseVector(indices, values, ["t", "##4", "card"]) if options.tokens else vector] * count


def _split(indices: NDArray[Any], values: NDArray[Any], splits: NDArray[Any]) -> list[tuple[Any, ...]]:
    if splits[0] != 0 or splits[-1] != len(indices) or len(indices) != len(values):
        raise replies.WrongError("row_splits that do not match the vectors")
    return list(zip(np.split(indices, splits[1:-1]), np.split(values, splits[1:-1]), strict=True))


def _check(found: Any) -> int:  # noqa: ANN401  any JSON
    indices = [index for index, _ in found]
    if indices and not np.array_equal(replies.finite(indices, 1), np.unique(indices)):
        raise replies.WrongError("indices that do not ascend")
    if indices:
        replies.finite([value for _, value in found], 1)
    return 0


_WAY: TaskRoute[EmbedSparseOptions, list[SparseVector]] = TaskRoute(
    EmbedSparseOptions,
    "embed_sparse",
    finish,
    check,
    prepare=prepare,
    encode=encode,
    after=lambda _, lengths, __, ___: len(lengths),
)

TASK = Task(
    way=_WAY,
    # The largest weights of a text, descending; an entry of weight 0 is padding.
    graph=(GraphOutput("indices", ("active",), "int32"), GraphOutput("weights", ("active",))),
    part="sparse",
    token_head=(GraphOutput("token_weights", (-1,)),),
    head="ForMaskedLM",
    path="/embed_sparse",
    example={"inputs": "What is a T4?"},
    parameters=False,
    # The vectors of all texts, one after another; `row_splits` has the position of each, and their total length.
    outputs=(Output("sparse_indices", "INT32"), Output("sparse_values", "FP32"), Output("row_splits", "INT32")),
    write=lambda answer, _: (
        np.concatenate([vector.indices for vector in answer]),
        np.concatenate([vector.values for vector in answer]),
        np.cumsum([0, *map(len, answer)], dtype=np.int32),
    ),
    recorded=_recorded,
    column=lambda options, _: ("sparse", NamedSparseVector if options.tokens else SparseVector),
    summary=lambda facts: f"at most {size_of(facts, 'weights')} of {facts.vocab_size} weights",
    load=LoadFormat(
        answers=lambda found: [[(one["index"], one["value"]) for one in vector] for vector in replies.listed(found)],
        row=lambda indices, values: list(zip(indices, values, strict=True)),
        split=_split,
        check=_check,
    ),
)
