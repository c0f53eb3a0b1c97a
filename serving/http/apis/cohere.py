"""Cohere's API: `/v1/embed`, `/v2/embed`, `/v1/rerank`, `/v2/rerank`. Jina and vLLM share the rerank format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson

from bertserve.serving.errors import EmptyInput, InvalidRequest, quote
from bertserve.serving.http.apis.cohere_messages import (
    COHERE_ERRORS,
    ApiVersion,
    CohereEmbedReply,
    CohereEmbedRequest,
    EmbeddingMeta,
    ImagePart,
    Ranked,
    RankingMeta,
    RankingReply,
    RankingRequest,
    TokenCount,
)
from bertserve.serving.http.apis.openai_messages import Usage
from bertserve.serving.http.apis.vectors import in_form, rows_json, size_of, sparse_json
from bertserve.serving.http.decoding import JsonDecoder
from bertserve.serving.http.exchange import HttpReply, json_reply, outcome_head
from bertserve.serving.http.routes import Docs, Router, of_task, ranking_models
from bertserve.serving.inference.ranking import named_or_only, ranking
from bertserve.serving.inference.requests import InferRequest
from bertserve.serving.tasks import TASK_ROUTES, combined
from bertserve.serving.tasks.base import with_checks
from bertserve.serving.tasks.combined import CombinedOptions
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.windows import Windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.http.apis.cohere_messages import EmbeddingType
    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.inference.requests import Outcome
    from bertserve.serving.inference.served_models import ServedModel
    from bertserve.serving.inference.tokenizer import TextTokenizer
    from bertserve.serving.records import Truncate
    from bertserve.serving.tasks.base import Check

router = Router("Cohere", COHERE_ERRORS)

_EMBED, _RANK = JsonDecoder(CohereEmbedRequest), JsonDecoder(RankingRequest)
_TRUNCATE: dict[str, Truncate] = {"NONE": False, "START": "left", "END": "right"}
_TEXT = "text"

# Examples for the OpenAPI document.
_TEXTS = {"texts": ["What is a T4?", "A graphics card."], "input_type": "search_document"}
_TYPED = {**_TEXTS, "embedding_types": ["float", "int8"]}
RANKED = {"query": "What is a T4?", "documents": ["A teapot.", "A graphics card."], "top_n": 1}


class _Documents(msgspec.Struct):
    documents: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_DOCUMENTS = msgspec.json.Decoder(_Documents)


@router.post("/v2/embed", Docs(CohereEmbedRequest, CohereEmbedReply, _TYPED, of_task("embed")), infers=True)
async def embed(context: AppContext, http: HttpRequest) -> HttpReply:
    """Embed texts (Cohere API v2)."""
    return await _embed(context, http, "2")


@router.post("/v1/embed", Docs(CohereEmbedRequest, CohereEmbedReply, _TEXTS, of_task("embed")), infers=True)
async def embed_v1(context: AppContext, http: HttpRequest) -> HttpReply:
    """Embed texts (Cohere API v1)."""
    return await _embed(context, http, "1")


@router.post("/v2/rerank", Docs(RankingRequest, RankingReply, RANKED, ranking_models), infers=True)
async def rerank(context: AppContext, http: HttpRequest) -> HttpReply:
    """Rerank documents (Cohere API v2)."""
    return await rank(context, http, "2")


@router.post("/v1/rerank", Docs(RankingRequest, RankingReply, RANKED, ranking_models), infers=True)
async def rerank_v1(context: AppContext, http: HttpRequest) -> HttpReply:
    """Rerank documents (Cohere API v1, Jina, vLLM)."""
    return await rank(context, http, "1")


def brings_documents(body: bytes) -> bool:
    """Whether a body is a `RankingRequest`. TEI's requests have `texts` instead."""
    if b'"documents"' not in body:
        return False
    try:
        return _DOCUMENTS.decode(body).documents is not msgspec.UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


async def _embed(context: AppContext, http: HttpRequest, version: str) -> HttpReply:
    message = await http.json(_EMBED, context.large_body_lock)
    texts = _texts(message)
    model = _model(context, http, message.model)
    truncate = None if message.truncate is None else _TRUNCATE[message.truncate]
    inputs, cut = texts, 0
    if message.max_tokens is not None:
        allowed = context.settings.auto_truncate if truncate is None else truncate
        inputs, cut = await _shortened(context, model, texts, message.max_tokens, "max_tokens", truncate=allowed)
    types = tuple(dict.fromkeys(message.embedding_types or ("float",)))
    request: InferRequest[Any] = InferRequest(
        inputs,
        _options(types, model, message.output_dimension),
        model.name,
        truncate=truncate,
        input_type=None if message.input_type == "image" else message.input_type,
    )
    outcome = await context.pipeline.infer(http.stamp(request))
    plain = version == "1" and not message.embedding_types

    def write(check: Check) -> bytes:
        answer = outcome.answer
        reply = {
            "id": http.request_id,
            "response_type": "embeddings_floats" if plain else "embeddings_by_type",
            "embeddings": _of_type(answer, "float", check)
            if plain
            else {kind: _of_type(answer, kind, check) for kind in types},
            "texts": texts,
            "model": outcome.model,
            "meta": msgspec.to_builtins(EmbeddingMeta(ApiVersion(version), TokenCount(outcome.tokens))),
        }
        return orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY)

    several = isinstance(request.options, CombinedOptions)
    numbers = sum(map(size_of, outcome.answer)) if several else outcome.answer.size
    body = await context.pipeline.write(outcome, numbers, write)
    return HttpReply(body, head=_head(outcome, cut))


def _options(
    types: Sequence[EmbeddingType], model: ServedModel, dimensions: int | None
) -> EmbedOptions | CombinedOptions:
    outputs = tuple(dict.fromkeys(kind if kind in {"sparse", "tokens"} else "dense" for kind in types))
    if outputs == ("dense",):
        return EmbedOptions(dimensions=dimensions)
    combined.check_offered(outputs, model.manifest, "embedding_types")
    return CombinedOptions(outputs, dimensions=dimensions)


def _of_type(answer: Any, kind: EmbeddingType, check: Check) -> Any:  # noqa: ANN401  answers of both options, JSON
    """The embeddings of all texts in one type."""
    if kind == "sparse":
        return [orjson.Fragment(sparse_json(one.sparse, "list")) for one in with_checks(answer, check, 1)]
    if kind == "tokens":
        return [orjson.Fragment(rows_json(one.tokens, check)) for one in answer]
    vectors = answer if isinstance(answer, np.ndarray) else combined.column(answer, "dense")
    return orjson.Fragment(rows_json(in_form(vectors, kind), check))


def _texts(message: CohereEmbedRequest) -> list[str]:
    if message.images is not None or message.input_type == "image":
        raise InvalidRequest("`images` and the `input_type` image are not supported; send `texts`")
    if (message.texts is None) == (message.inputs is None):
        raise InvalidRequest("send either `texts` or `inputs`")
    texts = []
    for index, value in enumerate(message.inputs or ()):
        parts = [part.text for part in value.content if not isinstance(part, ImagePart)]
        if len(parts) < len(value.content):
            raise InvalidRequest(f"input {index} has an `image_url`, which is not supported; send text")
        if not parts:
            raise EmptyInput(f"the `content` of input {index} is empty; send a part of the type text")
        texts.append("\n".join(parts))
    return texts if message.texts is None else message.texts


async def rank(context: AppContext, http: HttpRequest, version: str, *, repeat: bool = False) -> HttpReply:
    """Reranks documents. `repeat` returns each document with its score, unless the request says otherwise."""
    message = await http.json(_RANK, context.large_body_lock)
    field, most = ("top_n", message.top_n) if message.top_n is not None else ("top_k", message.top_k)
    if most is not None and most < 0:
        raise InvalidRequest(f"`{field}` is {quote(most)}; the minimum is 0, which returns all")
    name = http.parameters.get("model") or named_or_only(context.repository, message.model)
    windows = _windows(message.max_chunks_per_doc)
    name, options = ranking(context.repository, name, windows=windows, weights=message.weights)
    model = context.repository.find(name, task=TASK_ROUTES[type(options)].task)
    fields = [_TEXT] if message.rank_fields is None else message.rank_fields
    documents, cut = [_read(index, value, fields) for index, value in enumerate(message.documents)], 0
    if (tokens := message.max_tokens_per_doc) is not None:
        documents, cut = await _shortened(context, model, documents, tokens, "max_tokens_per_doc", truncate=True)
    request = InferRequest(
        [(message.query, document) for document in documents],
        options,
        model.name,
    )
    outcome = await context.pipeline.infer(http.stamp(request))
    if message.return_documents is not None:
        repeat = message.return_documents
    ranks = [
        Ranked(index, score, _document(message.documents[index]) if repeat else None)
        for index, score in enumerate(outcome.answer)
    ]
    ranks.sort(key=lambda ranked: -ranked.relevance_score)
    meta = RankingMeta(ApiVersion(version), TokenCount(outcome.tokens))
    usage = Usage(outcome.tokens, outcome.tokens)
    ranks = ranks[: most or None]
    # A null may already have left the message. In a JSON text, the quotes would be escaped.
    data = ranks if b'"top_k"' in http.body else msgspec.UNSET
    reply = RankingReply(http.request_id, ranks, outcome.model, meta, usage, data)
    return json_reply(reply, head=_head(outcome, cut))


def _model(context: AppContext, http: HttpRequest, named: str | None) -> ServedModel:
    """The model for embeddings that the path names, else the body."""
    name = http.parameters.get("model") or context.repository.named_or_only(named, "embed")
    return context.repository.find(name, task="embed")


def _read(index: int, document: str | dict[str, str], fields: Sequence[str]) -> str:
    """The text of a document that the model reads."""
    if isinstance(document, str):
        return document
    try:
        return "\n".join([document[field] for field in fields])
    except KeyError:
        why = "has no `text`; name the fields to read in `rank_fields`"
        raise InvalidRequest(
            f"document {index} {why if fields == [_TEXT] else 'lacks a field that `rank_fields` names'}"
        ) from None


def _document(document: str | dict[str, str]) -> dict[str, str]:
    return {_TEXT: document} if isinstance(document, str) else document


def _windows(most: int | None) -> Windows | None:
    if most is not None and most < 1:
        raise InvalidRequest(f"`max_chunks_per_doc` is {quote(most)}; the minimum is 1")
    return None if most is None or most == 1 else Windows(most=most)


async def _shortened(
    context: AppContext, model: ServedModel, texts: Sequence[str], tokens: int, field: str, *, truncate: Truncate
) -> tuple[list[str], int]:
    """Texts cut to at most `tokens` tokens, and the number of tokens cut.

    Raises:
        InvalidRequest: `tokens` is below 1, or a longer text must not be cut.
    """
    if tokens < 1:
        raise InvalidRequest(f"`{field}` is {quote(tokens)}; the minimum is 1")
    if tokens >= model.tokenizer.max_length or len(texts) > context.settings.max_client_batch_size:
        return list(texts), 0  # the model takes less, or so many texts are refused

    def shorten(tokenizer: TextTokenizer) -> list[tuple[str, int]]:
        return [tokenizer.shortened(text, tokens, truncate=truncate) for text in texts]

    done = await context.pipeline.read(model, sum(model.tokenizer.sizes_bytes(texts, truncate=truncate)), shorten)
    for index, (_, surplus) in enumerate(done):
        if surplus and not truncate:
            raise InvalidRequest(
                f"input {index} has {tokens + surplus} tokens; `{field}` is {tokens}: shorten it or allow truncation"
            )
    return [text for text, _ in done], sum([surplus for _, surplus in done])


def _head(outcome: Outcome[Any], cut: int) -> bytes:
    """The headers of every reply; the truncated tokens include those cut before the pipeline."""
    return outcome_head(msgspec.structs.replace(outcome, truncated_tokens=outcome.truncated_tokens + cut))
