"""OpenAI's API for embeddings: `/v1/embeddings`, and `/v1/models`."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import orjson

from serving.http.apis.tei_messages import text_inputs
from serving.http.decoding import JsonDecoder
from serving.http.documentation import UNLISTED
from serving.http.exchange import HttpReply, Operation, outcome_head
from serving.records import EmbedOptions, InferRequest

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from serving.http.exchange import HttpRequest
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository, ServedModel
    from serving.records import Outcome
    from serving.settings import Settings


TAG = "OpenAI"


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed, as OpenAI's clients ask.

    Attributes:
        input: A text, a list of texts, or token ids of this model's own vocabulary.
        model: Name of a model; with one model for this, any name is taken and the true one returned.
        encoding_format: `base64` is little-endian float32.
        dimensions: Keep only the first so many components.
        user: Not used.
    """

    input: str | list[str | list[int] | int]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class Embedding(msgspec.Struct):
    """One vector, always of length 1."""

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
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    """Every model of this server, of whatever task."""

    object: Literal["list"]
    data: list[ModelCard]


def operations(pipeline: Pipeline, repository: Repository, settings: Settings) -> list[Operation]:
    """The routes of this protocol."""
    decoder = JsonDecoder(EmbeddingsRequest)
    names = [model.name for model in repository.models if model.manifest.task == "embed"]

    async def embeddings(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = decoder.decode(http.body)
        outcome = await pipeline.infer(
            InferRequest(
                inputs=text_inputs(message.input),
                arrival=http.arrival,
                request_id=http.request_id,
                max_inputs=settings.max_openai_batch_size,
                model=repository.named_or_only(message.model, "embed"),
                options=EmbedOptions(normalize=True, dimensions=message.dimensions),
                timeout_ms=http.timeout_ms(),
                priority=http.priority(),
                trace=http.trace,
            )
        )
        body = orjson.dumps(_reply(outcome, message.encoding_format), option=orjson.OPT_SERIALIZE_NUMPY)
        return HttpReply(body, head=outcome_head(outcome))

    async def models(_: HttpRequest) -> HttpReply:
        served = [_card(model) for model in repository.models if repository.serves(model.name)]
        return HttpReply(msgspec.json.encode(ModelList("list", served)))

    async def model(http: HttpRequest) -> HttpReply:
        return HttpReply(msgspec.json.encode(_card(repository.find(http.parameters["model"]))))

    return [
        Operation("GET", "/v1/models", models, "The models of this server.", TAG, reply=ModelList),
        Operation(
            *("GET", "/v1/models/{model}", model, "One of them.", TAG),
            reply=ModelCard,
            values={"model": [model.name for model in repository.models]},
        ),
        Operation(
            "POST",
            "/v1/embeddings",
            embeddings,
            "Embed texts, in OpenAI's shape.",
            TAG if names else UNLISTED,
            EmbeddingsRequest,
            EmbeddingsReply,
            {"model": names[0] if names else "", "input": "What is a T4?"},
        ),
    ]


def _card(model: ServedModel) -> ModelCard:
    created = round(datetime.fromisoformat(model.manifest.created).timestamp())
    return ModelCard(model.name, "model", created, model.manifest.source.name)


def _reply(outcome: Outcome[NDArray[np.float32]], encoding: str) -> dict[str, Any]:
    rows = [base64.b64encode(row.tobytes()).decode() if encoding == "base64" else row for row in outcome.answer]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": outcome.model,
        "usage": {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens},
    }
