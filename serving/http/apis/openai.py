"""OpenAI's embeddings API: `/v1/embeddings`, `/embeddings` and `/v1/models`."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import orjson

from bertserve.serving.errors import ForeignTokenIds
from bertserve.serving.http.apis.openai_messages import (
    OPENAI_ERRORS,
    EmbeddingsReply,
    EmbeddingsRequest,
    ModelCard,
    ModelList,
    TextInput,
)
from bertserve.serving.http.apis.tei import BYTES_PER_ID, text_inputs
from bertserve.serving.http.apis.vectors import in_form, rows_json, size_of, sparse_json
from bertserve.serving.http.decoding import JsonDecoder
from bertserve.serving.http.exchange import HttpReply, json_reply, outcome_head
from bertserve.serving.http.routes import Docs, Router, all_models, of_task
from bertserve.serving.inference.pipeline import INLINE_NUMBERS, check_not_empty
from bertserve.serving.inference.requests import InferRequest
from bertserve.serving.tasks.base import go_on, with_checks
from bertserve.serving.tasks.combined import CombinedOptions
from bertserve.serving.tasks.embed import EmbedOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.http.apis.vectors import VectorType
    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.inference.requests import InputType, Outcome
    from bertserve.serving.inference.served_models import ServedModel
    from bertserve.serving.tasks.base import Check
    from bertserve.serving.tasks.combined import Embedded

router = Router("OpenAI", OPENAI_ERRORS, "/v1/")

_JINA_TASKS: Mapping[str | None, InputType] = {
    "retrieval.query": "query",
    "retrieval.passage": "passage",
    "classification": "classification",
    "separation": "clustering",
}

_ROWS = 16
"""Vectors of one output that are encoded at once."""

EMBEDDINGS = JsonDecoder(EmbeddingsRequest)
_embed_models = of_task("embed")


def _example(context: AppContext) -> dict[str, str]:
    return {"model": _embed_models(context)[0], "input": "What is a T4?"}


@router.get("/v1/models", Docs(gives=ModelList))
async def models(context: AppContext, _: HttpRequest) -> HttpReply:
    """List the models."""
    repository = context.repository
    served = [_card(model) for model in repository.models if repository.serves(model.name)]
    return json_reply(ModelList("list", served))


@router.get("/v1/models/{model}", Docs(gives=ModelCard, models=all_models))
async def model(context: AppContext, http: HttpRequest) -> HttpReply:
    """Get a model."""
    return json_reply(_card(context.repository.find(http.parameters["model"])))


_embeddings_docs = Docs(EmbeddingsRequest, EmbeddingsReply, _example, _embed_models)


@router.post("/v1/embeddings", _embeddings_docs, infers=True)
@router.post("/embeddings", _embeddings_docs, summary="Embed texts (OpenAI API, base URL without /v1).", infers=True)
async def embeddings(context: AppContext, http: HttpRequest) -> HttpReply:
    """Embed texts (OpenAI API)."""
    message = await http.json(EMBEDDINGS, context.large_body_lock)
    name, inputs = await _inputs(context, message)
    options: EmbedOptions | CombinedOptions = EmbedOptions(message.normalized, message.dimensions)
    if message.outputs is not None:
        options = CombinedOptions(tuple(dict.fromkeys(message.outputs)), message.normalized, message.dimensions)
    request: InferRequest[Any] = InferRequest(
        inputs,
        options,
        name,
        truncate=message.truncate,
        prompt_name=message.prompt_name,
        input_type=message.input_type or _JINA_TASKS.get(message.task),
    )
    outcome = await context.pipeline.infer(http.stamp(request))
    numbers = outcome.answer.size if message.outputs is None else sum(map(size_of, outcome.answer))
    if numbers > INLINE_NUMBERS:
        body = await context.pipeline.write(outcome, numbers, partial(_large_reply, outcome, message))
    else:
        body = _reply(outcome, message)
    return HttpReply(body, head=outcome_head(outcome))


def _reply(outcome: Outcome[Any], message: EmbeddingsRequest) -> bytes:
    reply = {
        "object": "list",
        "data": _embeddings(outcome, message),
        "model": outcome.model,
        "usage": _usage(outcome),
    }
    return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)


def _large_reply(outcome: Outcome[Any], message: EmbeddingsRequest, check: Check) -> bytes:
    """The same, encoded in pieces."""
    rows = _embeddings(outcome, message, check)
    size = 1 if message.outputs else _ROWS  # vectors of tokens are large
    starts = with_checks(range(0, len(rows), size), check, 1)
    pieces = [orjson.dumps(rows[at : at + size], option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for at in starts]
    end = orjson.dumps({"model": outcome.model, "usage": _usage(outcome)})[1:]
    return b'{"object":"list","data":[%b],%b' % (b",".join(pieces), end)


def _usage(outcome: Outcome[Any]) -> dict[str, int]:
    return {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens}


async def _inputs(context: AppContext, message: EmbeddingsRequest) -> tuple[str | None, Sequence[str | list[int]]]:
    """The model's name and its inputs: texts, or token ids of the model's own tokenizer."""
    name = context.repository.named_or_only(message.model, "embed")
    model = context.repository.find(name, task="embed")
    inputs, read_ids = text_inputs(_plain(message.input)), context.read_ids
    check_not_empty(inputs, "input")
    rows = [value for value in inputs if not isinstance(value, str)]
    if read_ids is None or not rows:
        return name, [text if isinstance(text, str) else _own_ids(model, text) for text in inputs]
    return name, await context.pipeline.read(model, BYTES_PER_ID * sum(map(len, rows)), lambda _: read_ids(inputs))


def _plain(inputs: str | TextInput | list[str | TextInput | list[int] | int]) -> str | list[str | list[int] | int]:
    """The inputs with text objects replaced by their texts."""
    if isinstance(inputs, str):
        return inputs
    if isinstance(inputs, TextInput):
        return inputs.text
    if TextInput in set(map(type, inputs)):
        return [value.text if isinstance(value, TextInput) else value for value in inputs]
    return cast("list[str | list[int] | int]", inputs)


def _own_ids(model: ServedModel, ids: list[int]) -> list[int]:
    """Token ids with the model's special tokens.

    Clients of OpenAI's own server send its tokenizer's ids, which this model would read as other words.

    Raises:
        ForeignTokenIds: The ids may be of another tokenizer.
    """
    tokenizer = model.tokenizer
    if ids and not tokenizer.is_framed(ids):
        raise ForeignTokenIds(
            "`input` has token IDs without this model's special tokens; they may come from another tokenizer. Send"
            " strings (LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)). To accept OpenAI's token IDs,"
            " start the server with --accept-token-ids cl100k_base"
        )
    return ids


def _card(model: ServedModel) -> ModelCard:
    manifest = model.manifest
    created = round(datetime.fromisoformat(manifest.created).timestamp())
    return ModelCard(model.name, "model", created, manifest.source.name, manifest.prompts, manifest.default_prompt)


def _embeddings(outcome: Outcome[Any], message: EmbeddingsRequest, check: Check = go_on) -> list[dict[str, Any]]:
    """The vectors in the message's format."""
    form = message.embedding_type or message.encoding_format
    if message.outputs is None:
        rows = in_form(outcome.answer, form)
        return [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
    parts = [_embedded(one, form, check) for one in outcome.answer]
    return [{"object": "embedding", "index": index, **part} for index, part in enumerate(parts)]


def _embedded(one: Embedded, form: VectorType, check: Check) -> dict[str, Any]:
    check()
    found: dict[str, Any] = {}
    if one.dense is not None:
        found["embedding"] = in_form(one.dense[None], form)[0]
    if one.sparse is not None:
        found["sparse_embedding"] = orjson.Fragment(sparse_json(one.sparse, "list"))
    if one.tokens is not None:
        found["token_embeddings"] = orjson.Fragment(rows_json(one.tokens, check))
    return found
