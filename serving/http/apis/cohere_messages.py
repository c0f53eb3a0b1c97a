"""Request and reply types of Cohere's routes, and of the rerank APIs of Jina and vLLM."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bertserve.serving.http.apis.openai_messages import Usage  # noqa: TC001  msgspec reads the annotations
from bertserve.serving.http.apis.tei_messages import SparseWeight  # noqa: TC001  likewise
from bertserve.serving.http.apis.vectors import VectorType
from bertserve.serving.http.faults import IN_BODY, ErrorFormat
from bertserve.serving.inference.requests import InputType  # noqa: TC001  likewise

EmbeddingType = VectorType | Literal["sparse", "tokens"]
"""The vector formats, and the further outputs of some models."""


class TextPart(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """A text part of an input."""

    text: str


class ImagePart(msgspec.Struct, tag="image_url", forbid_unknown_fields=True):
    """An image part of an input; rejected."""

    image_url: Any


class MixedInput(msgspec.Struct, forbid_unknown_fields=True):
    """An input in parts. Its text parts are joined by newlines and embedded as one text."""

    content: list[TextPart | ImagePart]


class CohereEmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed, in Cohere's format.

    Attributes:
        texts: The texts.
        inputs: The texts as parts, instead of `texts`.
        images: Rejected: the models here embed text.
        model: Name of a model. If only one model can answer, any name is accepted, and the reply has the real one.
        input_type: Purpose of the texts, which selects one of the model's prompts; `image` is rejected.
        embedding_types: Formats of the vectors; null: `float`. `sparse` and `tokens` are further outputs of a model
            that has them.
        truncate: End at which long texts are cut; `NONE` rejects them. Null: the server's default, at the model's own
            end.
        output_dimension: Number of leading components to keep.
        max_tokens: Maximum tokens of each text to embed, without special tokens and the prompt.
    """

    texts: list[str] | None = None
    inputs: list[MixedInput] | None = None
    images: list[str] | None = None
    model: str | None = None
    input_type: InputType | Literal["image"] | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None


class EmbeddingsByType(msgspec.Struct, rename={"floats": "float"}, omit_defaults=True):
    """The vectors of all texts in each requested format."""

    floats: list[list[float]] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None
    sparse: list[list[SparseWeight]] | None = None
    tokens: list[list[list[float]]] | None = None


class ApiVersion(msgspec.Struct):
    """The version of the API."""

    version: str


class TokenCount(msgspec.Struct):
    """Computed tokens, including special tokens."""

    input_tokens: int


class EmbeddingMeta(msgspec.Struct):
    """The API version and the tokens of an embed reply."""

    api_version: ApiVersion
    billed_units: TokenCount


class CohereEmbedReply(msgspec.Struct):
    """The vectors in the order of the texts.

    Attributes:
        id: The request's id.
        response_type: The shape of `embeddings`.
        embeddings: A list of vectors for version 1 without types, else a list of vectors for each type.
        texts: The texts of the request.
        model: The model that answered.
        meta: The version of the API, and the computed tokens.
    """

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | EmbeddingsByType
    texts: list[str]
    model: str
    meta: EmbeddingMeta


class RankingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Documents to rank by relevance to a query.

    Attributes:
        query: The query.
        documents: The documents, as texts or objects of texts.
        model: Name of a model. If only one model can answer, any name is accepted, and the reply has the real one.
        top_n: Number of best documents to return; null or 0: all.
        top_k: The same in Voyage's API; `top_n` takes precedence. With it, even null, the reply also has `data`.
        return_documents: Return each document with its score; null: yes on `/rerank`, no on Cohere's routes.
        rank_fields: Fields to read of documents that are objects, joined by newlines; null: `text`.
        max_tokens_per_doc: Maximum tokens of each document to read; null, or more than the model's limit: that limit.
        max_chunks_per_doc: Maximum overlapping windows of a long document to read. The best score counts. Null: one,
            which truncates the document.
        weights: Weights of the scores of a model with several outputs, by the names `dense`, `sparse` and `tokens`;
            null: the same weight for all.
    """

    query: str
    documents: list[str | dict[str, str]]
    model: str | None = None
    top_n: int | None = None
    top_k: int | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None
    weights: dict[str, float] | None = None


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document's score and its index in the request. A text `document` is returned as `text`.

    Scores of cross-encoders are between 0 and 1, except with the activation Identity. Those of other models may be
    larger or negative.
    """

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RankingMeta(msgspec.Struct):
    """The API version and the tokens of a rerank reply."""

    api_version: ApiVersion
    tokens: TokenCount


class RankingReply(msgspec.Struct):
    """The documents, best first.

    Attributes:
        id: The request's id.
        results: The documents.
        model: The model that answered.
        meta: The API version and the tokens.
        usage: The tokens.
        data: The documents again, for requests with `top_k`: Voyage's clients read them here.
    """

    id: str
    results: list[Ranked]
    model: str
    meta: RankingMeta
    usage: Usage
    data: list[Ranked] | msgspec.UnsetType = msgspec.UNSET


class CohereError(msgspec.Struct):
    """An error of Cohere's API; `id` is the request's id."""

    id: str
    message: str
    detail: str


COHERE_ERRORS = ErrorFormat(
    CohereError,
    lambda _, message, identity: CohereError(identity, message, message),
    model_named=IN_BODY,
    empty="a list of inputs",
)
