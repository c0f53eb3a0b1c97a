"""The task `embed_tokens`: a vector for each token of a text.

The vectors are those of the model's last layer. A multi-vector model (ColBERT) projects and normalizes them, reads
queries and documents differently, and leaves some tokens out (`multi_vector` of a manifest).
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bertserve.serving.records import EncodedText
from bertserve.serving.tasks import replies
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Task,
    TaskOptions,
    TaskRoute,
    Vector,
    output_at,
    pad_column,
    size_of,
    with_checks,
)
from bertserve.serving.tasks.embed import VECTOR
from bertserve.serving.tasks.prompts import Prepared, for_side, prompted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from bertserve.serving.records import Array, TextInput, Truncate
    from bertserve.serving.tasks.base import Facts, Tokenizer, Work
    from bertserve.serving.tasks.parts import Expansion, MultiVector


class EmbedTokensOptions(TaskOptions[list[NDArray[np.float32]]], frozen=True):
    """Options whose answer is, for each input, float32 [tokens, vector size], with special tokens.

    Only vectors of multi-vector models may be normalized.

    Attributes:
        query: Whether the inputs are queries; matters only for multi-vector models.
    """

    query: bool = False


def prepare(
    inputs: Sequence[TextInput],
    options: EmbedTokensOptions,
    facts: Facts,
    prompt_name: str | None,
    input_type: str | None,
) -> Prepared[EmbedTokensOptions]:
    options = for_side(options, input_type or prompt_name)
    return Prepared(prompted(inputs, facts, prompt_name, input_type), options)


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: EmbedTokensOptions, *, truncate: Truncate
) -> list[EncodedText]:
    """Token ids of queries or documents, as Sentence Transformers' MultiVectorEncoder makes them.

    The inputs have their prompts.
    """
    sides = tokenizer.multi_vector
    if sides is None:
        return tokenizer.encode(inputs, truncate=truncate)
    texts = tokenizer.encode(inputs, truncate=truncate, most=sides.length(query=options.query))
    return fill_queries(texts, sides.expansion) if options.query else texts


def fill_queries(texts: Sequence[EncodedText], expansion: Expansion | None) -> list[EncodedText]:
    """Queries, filled up to the length of the expansion."""
    return list(texts) if expansion is None else [_fill_query(text, expansion) for text in texts]


def _fill_query(text: EncodedText, expansion: Expansion) -> EncodedText:
    missing = expansion.length - len(text.ids)
    if missing <= 0:
        return text
    token = expansion.token if expansion.attended else ~expansion.token
    types = None if text.type_ids is None else text.type_ids + array("i", [0]) * missing
    return EncodedText(text.ids + array("i", [token]) * missing, types, text.truncated)


def vectors(
    text: EncodedText, token_embeddings: Array, sides: MultiVector | None, *, query: bool
) -> NDArray[np.float32]:
    """The vectors of a text, from its row of the graph's output, which may be padded."""
    ids, found = text.ids, token_embeddings[: len(text.ids)]
    if sides is not None and sides.skips_first:
        ids, found = ids[1:], found[1:]
    if sides is not None and sides.skipped and (sides.skips_queries if query else sides.skips_documents):
        numbers = np.array(ids, np.int32)
        found = found[~np.isin(np.where(numbers < 0, ~numbers, numbers), sides.skipped)]
    return np.ascontiguousarray(found, np.float32)


def _finish(work: Work[EmbedTokensOptions]) -> list[NDArray[np.float32]]:
    sides, query, at = work.manifest.multi_vector, work.options.query, output_at(work.manifest, "token_embeddings")
    pairs = with_checks(zip(work.texts, work.rows, strict=True), work.check, 1)
    return [vectors(text, row[at], sides, query=query) for text, row in pairs]


def _row(found: NDArray[Any], count: int) -> NDArray[Any]:
    if not 0 < count <= len(found):
        raise replies.WrongError("another number of tokens than of vectors")
    return found[:count]


def size(facts: Facts) -> int:
    """Components of a token's vector."""
    return size_of(facts, "token_embeddings")


def _summary(facts: Facts) -> str:
    sides = facts.multi_vector
    vectors = f"{size(facts)} components for each token"
    if sides is None:
        return vectors
    length = ", of length 1" if sides.normalized else ""
    return f"{vectors}{length}; queries of {sides.query_length} tokens, documents of {sides.document_length}"


TASK = Task(
    way=TaskRoute(
        EmbedTokensOptions,
        "embed_tokens",
        _finish,
        prepare=prepare,
        encode=encode,
        token_numbers=lambda _, facts: size(facts),
        token_outputs=True,
    ),
    graph=(GraphOutput("token_embeddings", (-1, "hidden_size")),),  # includes special tokens
    part="multi_vector",
    token_head=(GraphOutput("token_embeddings", (-1, "token_size")),),
    path="/embed_all",
    example={"inputs": "What is a T4?"},
    parameters=False,
    outputs=(Output("embeddings", "FP32", lambda facts: (-1, size(facts))), Output("tokens", "INT64")),
    write=lambda answer, _: (pad_column(answer), np.array([len(row) for row in answer], np.int64)),
    recorded=lambda _, __, count: [np.stack([VECTOR, VECTOR[::-1]])] * count,
    column=lambda _, facts: ("embeddings", [Vector(size(facts))]),
    summary=_summary,
    load=LoadFormat(answers=replies.listed, row=_row, check=lambda found: replies.finite(found, 2).shape[1]),
)
