"""Request and reply types of OpenAI's routes."""

from __future__ import annotations

from typing import Literal

import msgspec

from bertserve.serving.errors import BertserveError, InvalidRequest, Overloaded
from bertserve.serving.http.apis.tei_messages import SparseWeight  # noqa: TC001  msgspec reads the annotations
from bertserve.serving.http.apis.vectors import VectorType  # noqa: TC001  likewise
from bertserve.serving.http.faults import IN_BODY, ErrorFormat, word_of
from bertserve.serving.inference.requests import InputType  # noqa: TC001  likewise

JinaTask = Literal["retrieval.query", "retrieval.passage", "classification", "separation", "text-matching"]


class TextInput(msgspec.Struct, forbid_unknown_fields=True):
    """A text in Jina's format."""

    text: str


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed, in OpenAI's format.

    Attributes:
        input: A text, a list of texts (strings or objects), or token ids of this model's own tokenizer with its special
            tokens around them.
        model: Name of a model. If only one model can answer, any name is accepted, and the reply has the real one.
        encoding_format: Format of the vectors; `base64` is little-endian float32.
        embedding_type: The same in Jina's API; takes precedence over `encoding_format`.
        normalized: Scale vectors to length 1 (Jina); null: as the model's folder says.
        task: The same as `input_type` in Jina's API; `input_type` takes precedence.
        truncate: Truncate long inputs (Jina); null: the server's default.
        dimensions: Number of leading components to keep.
        user: Not used.
        prompt_name: Name of the model's prompt to prepend to each text; null: the default prompt, if there is one.
        input_type: Purpose of the texts, which selects a prompt instead of its name.
        outputs: Return several embeddings of each text: any of `dense` (as `embedding`), `sparse` (as
            `sparse_embedding`) and `tokens` (as `token_embeddings`) that the model has; null: the dense vector alone.
    """

    input: str | TextInput | list[str | TextInput | list[int] | int]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    embedding_type: VectorType | None = None
    normalized: bool | None = None
    task: JinaTask | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    user: str | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    outputs: list[str] | None = None


class Embedding(msgspec.Struct):
    """The embedding of a text.

    Attributes:
        embedding: The vector, in the requested format; missing if `outputs` has no `dense`.
        sparse_embedding: The weights of its tokens, as in `/embed_sparse`.
        token_embeddings: The vectors of its tokens.
    """

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str | msgspec.UnsetType = msgspec.UNSET
    sparse_embedding: list[SparseWeight] | msgspec.UnsetType = msgspec.UNSET
    token_embeddings: list[list[float]] | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct):
    """Computed tokens, including special tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(msgspec.Struct):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ModelCard(msgspec.Struct):
    """A model of this server.

    Attributes:
        id: The name that requests use.
        created: Time of its export, in seconds since 1970.
        owned_by: The checkpoint that it was exported from.
        prompts: The prompts that requests may select, by name.
        default_prompt_name: The prompt of requests that select none.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    prompts: dict[str, str]
    default_prompt_name: str | None


class ModelList(msgspec.Struct):
    """All models of this server, whatever their task."""

    object: Literal["list"]
    data: list[ModelCard]


class OpenAiDetail(msgspec.Struct):
    """An error's details: `param` is the field, if there is one; `code` is this server's reason."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAiError(msgspec.Struct):
    """An error of OpenAI's API."""

    error: OpenAiDetail
    detail: str  # the message, for clients of Jina and Voyage, which read no other field


_ERROR_TYPES: dict[type[BertserveError], str] = {
    InvalidRequest: "invalid_request_error",
    Overloaded: "rate_limit_error",
    BertserveError: "server_error",
}


def _error(error: BertserveError, message: str, _: str) -> OpenAiError:
    param = error.param if isinstance(error, InvalidRequest) else None
    return OpenAiError(OpenAiDetail(message, word_of(_ERROR_TYPES, error), param, error.reason), message)


OPENAI_ERRORS = ErrorFormat(
    OpenAiError, _error, invalid_status=400, model_named=IN_BODY, empty="a list of inputs or an input"
)
