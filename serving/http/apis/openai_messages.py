"""What OpenAI's routes take and answer."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from serving.fields import owners as documented
from serving.fields.owners import Owners  # noqa: TC001  msgspec reads the annotations
from serving.http.apis.vectors import VectorType  # noqa: TC001  msgspec reads the annotations
from serving.inference.requests import InputType  # noqa: TC001  likewise

JinaTask = Literal["retrieval.query", "retrieval.passage", "classification", "separation", "text-matching"]


class TextInput(msgspec.Struct, forbid_unknown_fields=True):
    """A text as Jina's clients write it."""

    owners: ClassVar[Owners] = documented.EMBEDDING_INPUT

    text: str


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed, as OpenAI's clients ask.

    Attributes:
        input: A text, a list of texts, as strings or objects, or token ids of this model's own tokenizer with its
            special tokens around them.
        model: Name of a model; with one model for this, any name is taken and the true one returned.
        encoding_format: `base64` is little-endian float32.
        embedding_type: The form of the vectors, as Jina's clients ask for it; it goes before `encoding_format`.
        normalized: Scale vectors to length 1, in Jina's word; null means as the model's own folder says.
        task: Jina's word for the `input_type`, which goes before it.
        truncate: Cut inputs that are too long, in Jina's word; null means the server's default.
        dimensions: Keep only the first so many components.
        user: Not used.
        prompt_name: One of the model's prompts, put before each text; null means the default one, if it has one.
        input_type: What the texts are for, which chooses a prompt in place of its name.
    """

    owners: ClassVar[Owners] = documented.EMBEDDINGS

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


class Embedding(msgspec.Struct):
    """One vector, in the form that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(msgspec.Struct):
    """Tokens computed, special tokens included."""

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
        id: What requests call it.
        created: When it was exported, in seconds since 1970.
        owned_by: The checkpoint that it was exported from.
        prompts: What a request may have put before its texts, by name.
        default_prompt_name: The one that is put there where a request asks for none.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    prompts: dict[str, str]
    default_prompt_name: str | None


class ModelList(msgspec.Struct):
    """Every model of this server, of whatever task."""

    object: Literal["list"]
    data: list[ModelCard]
