"""What Cohere's routes take and answer."""

from __future__ import annotations

import msgspec


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document."""

    text: str


class RankingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Documents to order by how well they answer a query.

    Attributes:
        query: The query.
        documents: The documents.
        model: Name of a model; with one model for this, any name is taken.
        top_n: Answer the best so many; null means all.
        max_tokens_per_doc: Documents are cut at the model's own length; a smaller one is refused.
    """

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    max_tokens_per_doc: int | None = None


class RankingRequestV1(msgspec.Struct, forbid_unknown_fields=True):
    """The same as the first version of the API has it.

    Attributes:
        query: The query.
        documents: The documents, as texts or objects.
        model: Name of a model; with one model for this, any name is taken.
        top_n: Answer the best so many; null means all.
        max_tokens_per_doc: Documents are cut at the model's own length; a smaller one is refused.
        return_documents: Repeat each document beside its score.
    """

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    max_tokens_per_doc: int | None = None
    return_documents: bool = False


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document's score, between 0 and 1, and its index in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class ApiVersion(msgspec.Struct):
    """The version of the API."""

    version: str


class TokenCount(msgspec.Struct):
    """Tokens computed, special tokens included."""

    input_tokens: int


class RankingMeta(msgspec.Struct):
    """What came with the answer."""

    api_version: ApiVersion
    tokens: TokenCount


class RankingReply(msgspec.Struct):
    """The documents, best first; `id` is the request's, `model` the one that answered."""

    id: str
    results: list[Ranked]
    model: str
    meta: RankingMeta
