"""MaxSim: how well each text answers a query, by the vectors of a multi-vector model (ColBERT, arXiv 2004.12832).

A text's score is the sum, over the query's vectors, of the largest dot product with one of the text's vectors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bertserve.serving.errors import WrongTask
from bertserve.serving.tasks.base import TaskOptions, TaskRoute, go_on, output_at, pairs_of, with_checks
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions, vectors
from bertserve.serving.tasks.embed_tokens import encode as encode_side
from bertserve.serving.tasks.prompts import Prepared, find_prompt, has_sides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.records import EncodedText, TextInput, Truncate
    from bertserve.serving.tasks.base import Check, Facts, Tokenizer, Work

O = TypeVar("O")  # noqa: E741  the options
E = TypeVar("E")
"""The embedding of a text."""

LOWEST = -1e9
"""The score of a text without vectors, as in Sentence Transformers."""

_BLOCK = 256
"""Vectors of a query that are multiplied at once."""


class MaxSimOptions(TaskOptions[list[float]], frozen=True):
    """Options whose answer is one score for each pair of query and text. The model is a multi-vector model.

    Attributes:
        raw_scores: Return the sum over the query's vectors instead of the mean; None means the model's default.
    """

    raw_scores: bool | None = None


def check(_: MaxSimOptions, manifest: Facts) -> None:
    if manifest.multi_vector is None:
        raise WrongTask("the model embeds tokens, but is no multi-vector model (ColBERT), which can rank texts")


def prepare(inputs: Sequence[TextInput], options: O, facts: Facts, *_: object) -> Prepared[O]:
    """Pairs of query and document, each with its side's prompt; raises `InvalidRequest` for other inputs."""
    pairs = pairs_of(inputs)
    if not has_sides(facts):
        return Prepared(pairs, options)  # as in Sentence Transformers, where the default prompt is for neither side
    before, behind = find_prompt(facts, None, "query"), find_prompt(facts, None, "document")
    return Prepared([(before + query, behind + document) for query, document in pairs], options)


def sizes_bytes(tokenizer: Tokenizer, inputs: Sequence[TextInput], _: object, *, truncate: Truncate) -> list[int]:
    """The size of each text; that of a query counts once, for its first text."""
    queries, texts = sides_of(inputs)
    sizes = tokenizer.sizes_bytes(texts, truncate=truncate)
    firsts = tokenizer.sizes_bytes(list(queries), truncate=truncate)
    for place, size in zip(queries.values(), firsts, strict=True):
        sizes[place] += size
    return sizes


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], _: object, *, truncate: Truncate
) -> Sequence[EncodedText]:
    """The token ids of each distinct query, then those of each text."""
    queries, texts = sides_of(inputs)
    return [
        *encode_side(tokenizer, list(queries), EmbedTokensOptions(query=True), truncate=truncate),
        *encode_side(tokenizer, texts, EmbedTokensOptions(), truncate=truncate),
    ]


def products(inputs: Sequence[TextInput], lengths: Sequence[int], _: object, __: Facts) -> int:
    """The dot products of all pairs. Some tokens may have no vector."""
    pairs = pairs_of(inputs)
    queries, _ = sides_of(pairs)
    sizes = dict(zip(queries, lengths, strict=False))
    return sum([sizes[query] * length for (query, _), length in zip(pairs, lengths[len(queries) :], strict=True)])


def maxsim(query: NDArray[np.float32], text: NDArray[np.float32], check: Check = go_on) -> float:
    """The score of a text, from vectors float32 [tokens, size]."""
    if not len(text):
        return LOWEST
    # In blocks: all products of two texts of 8,192 tokens take 268 MB.
    blocks = (query[at : at + _BLOCK] @ text.T for at in with_checks(range(0, len(query), _BLOCK), check, 1))
    return sum((float(block.max(axis=1).sum(dtype=np.float64)) for block in blocks), 0.0)


def mean_maxsim(query: NDArray[np.float32], text: NDArray[np.float32], check: Check = go_on) -> float:
    """The same as a mean over the query's vectors."""
    return maxsim(query, text, check) / max(1, len(query))


def finish(work: Work[MaxSimOptions]) -> list[float]:
    sides, raw = work.manifest.multi_vector, work.options.raw_scores
    count, at = len(work.texts) - len(work.inputs), output_at(work.manifest, "token_embeddings")
    found = [
        vectors(text, row[at], sides, query=index < count)
        for index, (text, row) in enumerate(with_checks(zip(work.texts, work.rows, strict=True), work.check, 1))
    ]
    is_mean = sides is not None and sides.mean if raw is None else not raw
    return score_pairs(work.inputs, found, partial(mean_maxsim if is_mean else maxsim, check=work.check))


def score_pairs(inputs: Sequence[TextInput], found: Sequence[E], score: Callable[[E, E], float]) -> list[float]:
    """The score of each pair of query and text, from the embeddings of the texts of `encode`."""
    pairs = pairs_of(inputs)
    count = len(found) - len(pairs)
    queries = dict(zip(sides_of(pairs)[0], found[:count], strict=True))
    return [score(queries[query], text) for (query, _), text in zip(pairs, found[count:], strict=True)]


def sides_of(inputs: Sequence[TextInput]) -> tuple[dict[str, int], list[str]]:
    """Each distinct query with the index of its first pair, and all texts."""
    pairs = pairs_of(inputs)
    queries: dict[str, int] = {}
    for index, (query, _) in enumerate(pairs):
        queries.setdefault(query, index)
    return queries, [text for _, text in pairs]


WAY: TaskRoute[MaxSimOptions, list[float]] = TaskRoute(
    MaxSimOptions,
    "embed_tokens",
    finish,
    check,
    sizes_bytes,
    prepare=prepare,
    encode=encode,
    token_outputs=True,
    after=products,
)
