"""The parts of a manifest: what a model has of its task, each present or not."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

Part = Literal["embedding", "labels", "sparse", "multi_vector", "activation"]
"""The names of the parts, which are fields of a manifest. Sizes are no part: the outputs of the graph have them."""

LARGEST_SIZE = 1 << 20

Size = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_SIZE)]

Length = Annotated[int, msgspec.Meta(ge=3, le=LARGEST_SIZE)]
"""Tokens of an input: at least [CLS], one token, [SEP]."""

POOLING_MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Pooling modes, named as in Sentence Transformers."""

Activation = Literal["sigmoid", "identity"]
"""The default function from the logit of a pair of texts to their score."""

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]

Problem = Literal["single_label", "multi_label", "regression"]

P = TypeVar("P")


class Embedding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vector for each text.

    Attributes:
        pooling: Some of `POOLING_MODES`, whose vectors are concatenated.
        normalize: Whether vectors are scaled to length 1 by default.
        matryoshka: Sizes to which vectors may be truncated; empty allows any.
        similarity: The similarity function that the vectors are meant for; None if unknown.
    """

    pooling: tuple[str, ...]
    normalize: bool = True
    matryoshka: tuple[Size, ...] = ()
    similarity: Similarity | None = None


class Labels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The classes or tags of a model.

    Attributes:
        names: By index; names may repeat.
        problem: Whether one of them is chosen, each is decided by itself, or they name values that answers return
            unchanged. Tags have `single_label`.
    """

    names: tuple[str, ...]
    problem: Problem = "single_label"


class Sparse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of tokens for each text.

    Attributes:
        query_weights: Whether queries take their weights from a file of the bundle, without the engine.
        similarity: As in `Embedding`.
    """

    query_weights: bool = False
    similarity: Similarity | None = None


class Expansion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How queries of a multi-vector model are filled up with a token.

    Attributes:
        token: Id of the token.
        length: Tokens of a filled query, including special tokens.
        attended: Whether attention sees the added tokens. Otherwise they only get vectors.
    """

    token: int
    length: Size
    attended: bool


class MultiVector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a multi-vector model (ColBERT) reads queries and documents, beside their prompts.

    Attributes:
        query_length: Maximum tokens of a query, including special tokens.
        document_length: Maximum tokens of a document, including special tokens.
        expansion: None if queries are not filled up.
        skipped: Ids of tokens without a vector, such as punctuation.
        skips_queries: Whether `skipped` applies to queries.
        skips_documents: Whether `skipped` applies to documents.
        normalized: Whether the graph scales vectors to length 1.
        mean: Whether a score is by default the mean over a query's vectors, instead of the sum.
        skips_first: Whether the first token has no vector.
    """

    query_length: Length
    document_length: Length
    expansion: Expansion | None = None
    skipped: tuple[int, ...] = ()
    skips_queries: bool = False
    skips_documents: bool = True
    normalized: bool = True
    mean: bool = False
    skips_first: bool = False

    @property
    def unattended(self) -> bool:
        """Whether queries may hold tokens that attention must ignore."""
        return self.expansion is not None and not self.expansion.attended

    def length(self, *, query: bool) -> int:
        return self.query_length if query else self.document_length


def present(part: P | None) -> P:
    """A part that every model of the task has."""
    if part is None:
        raise LookupError("the manifest lacks the part of its task")
    return part
