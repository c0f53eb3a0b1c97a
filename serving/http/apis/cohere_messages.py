"""What Cohere's routes take and answer, and those of Jina's and vLLM's rerankers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from serving.fields import owners as documented
from serving.fields.owners import Owners  # noqa: TC001  msgspec reads the annotations
from serving.http.apis.openai_messages import Usage  # noqa: TC001  msgspec reads the annotations
from serving.http.apis.vectors import VectorType  # noqa: TC001  likewise
from serving.inference.requests import InputType  # noqa: TC001  likewise


class TextPart(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    """A part of an input that is text."""

    text: str


class ImagePart(msgspec.Struct, tag="image_url", forbid_unknown_fields=True):
    """A part that is an image; it is refused."""

    image_url: Any


class MixedInput(msgspec.Struct, forbid_unknown_fields=True):
    """An input in parts, which are embedded as one text, each on a line of its own."""

    content: list[TextPart | ImagePart]


class CohereEmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed, as Cohere's clients ask.

    Attributes:
        texts: The texts.
        inputs: The same as parts, in place of `texts`.
        images: Refused: the models here read text.
        model: Name of a model; with one model for this, any name is taken and the true one answered.
        input_type: What the texts are for, which chooses one of the model's prompts; `image` is refused.
        embedding_types: The forms wanted of each vector; null means `float`.
        truncate: Which end of a text that is too long is cut; `NONE` refuses it; null means the server's default, and
            the model's own end.
        output_dimension: Keep only the first so many components.
        max_tokens: Of each text so many tokens are embedded, special tokens and a prompt's not counted.
    """

    owners: ClassVar[Owners] = documented.COHERE_EMBED

    texts: list[str] | None = None
    inputs: list[MixedInput] | None = None
    images: list[str] | None = None
    model: str | None = None
    input_type: InputType | Literal["image"] | None = None
    embedding_types: list[VectorType] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None


class EmbeddingsByType(msgspec.Struct, rename={"floats": "float"}, omit_defaults=True):
    """The vectors of all texts in each of the forms that were asked for."""

    floats: list[list[float]] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class ApiVersion(msgspec.Struct):
    """The version of the API."""

    version: str


class TokenCount(msgspec.Struct):
    """Tokens computed, special tokens included."""

    input_tokens: int


class EmbeddingMeta(msgspec.Struct):
    """What came with the vectors."""

    api_version: ApiVersion
    billed_units: TokenCount


class CohereEmbedReply(msgspec.Struct):
    """The vectors in the order of the texts.

    Attributes:
        id: The request's.
        response_type: Which of the two shapes `embeddings` has.
        embeddings: A list for each text where version 1 was asked for no types, else a list for each type.
        texts: The texts as they came.
        model: The one that answered.
        meta: The version of the API, and the tokens computed.
    """

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[list[float]] | EmbeddingsByType
    texts: list[str]
    model: str
    meta: EmbeddingMeta


class RankingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Documents to order by how well they answer a query.

    Attributes:
        query: The query.
        documents: The documents, as texts or objects of texts.
        model: Name of a model; with one model for this, any name is taken and the true one answered.
        top_n: Answer the best so many; null means all.
        top_k: The same in Voyage's word; `top_n` goes before it.
        return_documents: Repeat each document beside its score; null means yes on `/rerank` and no on Cohere's routes.
        rank_fields: The fields of a document that is an object which are read, each on a line; null means `text`.
        max_tokens_per_doc: Of each document so many tokens are read; null, or more than the model takes, means as many
            as that.
        max_chunks_per_doc: A longer document is read in so many overlapping windows, of which the best score counts;
            null means one, which cuts it.
    """

    owners: ClassVar[Owners] = documented.RANKING

    query: str
    documents: list[str | dict[str, str]]
    model: str | None = None
    top_n: int | None = None
    top_k: int | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_tokens_per_doc: int | None = None
    max_chunks_per_doc: int | None = None


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document's score, between 0 and 1, and its index in the request; `document` as it came, a text as `text`."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


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
    usage: Usage
