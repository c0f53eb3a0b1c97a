"""The text API of text-embeddings-inference: what needs no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from serving.errors import EmptyInput, InvalidRequest
from serving.http.apis.tei import TAG
from serving.http.apis.tei_messages import DecodeRequest, Info, TokenizeReply, TokenizeRequest
from serving.http.decoding import JsonDecoder
from serving.http.exchange import HttpReply, Operation
from serving.http.faults import TeiError
from serving.http.naming import Named
from serving.oip.service import SERVER_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.exchange import HttpRequest
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository, ServedModel
    from serving.inference.tokenizer import TextTokenizer
    from serving.lifecycle import Lifecycle
    from serving.models.manifest import Task
    from serving.records import EngineChoice
    from serving.settings import Settings

_MODEL_TYPES: Sequence[Task] = ("embed", "embed_tokens", "rerank", "classify")
_BYTES_PER_ID = 4


def operations(pipeline: Pipeline, repository: Repository, lifecycle: Lifecycle, settings: Settings) -> list[Operation]:
    """The routes of this protocol that need no engine."""
    tokenize_decoder = JsonDecoder(TokenizeRequest)
    decode_decoder = JsonDecoder(DecodeRequest)

    async def tokenize(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = tokenize_decoder.decode(http.body)
        texts = [message.inputs] if isinstance(message.inputs, str) else message.inputs
        model = _find(repository, http)
        _check_count(len(texts), "inputs", settings)
        prompted = [text for text in model.prompted(texts, message.prompt_name) if isinstance(text, str)]
        size = model.tokenizer.size_bytes(prompted)

        def read(tokenizer: TextTokenizer) -> bytes:
            tokens = [tokenizer.tokens(text, special=message.add_special_tokens) for text in prompted]
            return msgspec.json.encode(tokens)

        return HttpReply(await pipeline.read(model, size, read))

    async def decode(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = decode_decoder.decode(http.body)
        rows = _rows(message.ids)
        model = _find(repository, http)
        _check_count(len(rows), "ids", settings)
        for row in rows:
            model.tokenizer.check_readable(row)

        def read(tokenizer: TextTokenizer) -> bytes:
            return msgspec.json.encode([tokenizer.decode(row, bare=message.skip_special_tokens) for row in rows])

        return HttpReply(await pipeline.read(model, _BYTES_PER_ID * sum(map(len, rows)), read))

    async def info(http: HttpRequest) -> HttpReply:
        return HttpReply(msgspec.json.encode(_info(_find(repository, http), settings, repository.engine)))

    async def health(_: HttpRequest) -> HttpReply:
        if lifecycle.ready:
            return HttpReply(b"", content_type=b"text/plain")
        return HttpReply(msgspec.json.encode(TeiError("unhealthy", "Unhealthy")), 503)

    named = Named(repository, TAG)
    names = [model.name for model in repository.models]
    return [
        *named.of_models(
            names,
            "POST",
            "/tokenize",
            tokenize,
            "The tokens of texts.",
            TokenizeRequest,
            TokenizeReply,
            {"inputs": "What is a T4?"},
        ),
        *named.of_models(
            names, "POST", "/decode", decode, "The texts of token ids.", DecodeRequest, list[str], {"ids": [[1, 2, 3]]}
        ),
        *named.of_models(names, "GET", "/info", info, "A model and the server's limits.", reply=Info),
        Operation(
            "GET", "/health", health, "200 while new requests should come here.", TAG, statuses=(503,), open=True
        ),
    ]


def _find(repository: Repository, http: HttpRequest) -> ServedModel:
    """The model named; else the only one, else the only or default one of the first task that has such."""
    name = http.parameters.get("model")
    if name is not None or len(repository.models) == 1:
        return repository.find(name)
    for task in _MODEL_TYPES:
        if repository.of_task(task):
            return repository.find(None, task=task)
    return repository.find(None)


def _rows(ids: list[int | list[int]]) -> list[list[int]]:
    """The ids of each text, of which one may come without a list around it."""
    rows = [row for row in ids if isinstance(row, list)]
    if rows and len(rows) != len(ids):
        raise InvalidRequest("`ids` mixes numbers and lists")
    numbers = [value for value in ids if isinstance(value, int)]
    return [numbers] if numbers else rows


def _check_count(count: int, field: str, settings: Settings) -> None:
    if not count:
        raise EmptyInput(f"`{field}` is empty; send at least one")
    if count > settings.max_client_batch_size:
        raise InvalidRequest(f"{count} inputs in one request; at most {settings.max_client_batch_size} are taken")


def _info(model: ServedModel, settings: Settings, engine: EngineChoice) -> Info:
    manifest = model.manifest
    labels = manifest.labels or ("score",)
    named: dict[str, Any] = {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    pooling = ("embedding", {"pooling": manifest.pooling})
    kinds = {"rerank": ("reranker", named), "embed": pooling, "embed_tokens": pooling}
    kind, details = kinds.get(manifest.task, ("classifier", named))
    return Info(
        model_id=manifest.source.name,
        model_sha=manifest.source.sha256,
        model_dtype={"fp32": "float32", "fp16": "float16"}.get(model.artifact.precision, model.artifact.precision),
        served_model_name=model.name,
        model_type={kind: details},
        max_concurrent_requests=max(1, settings.max_queue_tokens // manifest.max_length),
        max_input_length=manifest.max_length,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=settings.max_client_batch_size,
        auto_truncate=settings.auto_truncate,
        tokenization_workers=1,
        version=SERVER_VERSION,
        engine=engine,
    )
