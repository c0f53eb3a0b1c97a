"""The API of text-embeddings-inference."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import orjson

from bertserve.serving.errors import EmptyInput, InvalidRequest, WrongTask
from bertserve.serving.http.apis import cohere
from bertserve.serving.http.apis.cohere_messages import RankingReply, RankingRequest
from bertserve.serving.http.apis.tei_messages import (
    TEI_ERRORS,
    DecodeRequest,
    Direction,
    EmbedAllRequest,
    EmbeddedChunk,
    EmbeddedText,
    EmbedRequest,
    EmbedSparseRequest,
    Info,
    PredictRequest,
    Rank,
    RerankRequest,
    SimilarityParameters,
    SimilarityRequest,
    SparseWeight,
    TeiError,
    TokenizeReply,
    TokenizeRequest,
)
from bertserve.serving.http.apis.vectors import NUMBERS_OF_A_WEIGHT, embedded_json, rows_json, size_of, sparse_json
from bertserve.serving.http.decoding import JsonDecoder
from bertserve.serving.http.exchange import HttpReply, json_reply, outcome_head
from bertserve.serving.http.routes import Docs, Router, all_models, ranking_models
from bertserve.serving.inference.pipeline import INLINE_NUMBERS, check_count, check_not_empty
from bertserve.serving.inference.ranking import ranking
from bertserve.serving.inference.requests import InferRequest
from bertserve.serving.oip.service import SERVER_VERSION
from bertserve.serving.tasks.base import texts_of, with_checks
from bertserve.serving.tasks.chunks import ChunkOptions, LateChunkOptions
from bertserve.serving.tasks.classify import ClassifyOptions, LabelScore
from bertserve.serving.tasks.combined import CombinedOptions, offered
from bertserve.serving.tasks.embed import EmbedOptions
from bertserve.serving.tasks.embed_sparse import EmbedSparseOptions
from bertserve.serving.tasks.embed_tokens import EmbedTokensOptions
from bertserve.serving.tasks.prompts import prompted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.inference.requests import Outcome
    from bertserve.serving.inference.served_models import ServedModel
    from bertserve.serving.records import Side, TextInput, Truncate
    from bertserve.serving.tasks.base import A, Check, TaskOptions
    from bertserve.serving.tasks.chunks import Chunk
    from bertserve.serving.tasks.embed_sparse import SparseVector

router = Router("TEI", TEI_ERRORS)

_TIMES = (
    b"x-compute-characters: %d\r\nx-compute-time: %d\r\nx-total-time: %d\r\n"
    b"x-tokenization-time: %d\r\nx-queue-time: %d\r\nx-inference-time: %d\r\n"
)

_TASKS = ("embed", "embed_tokens", "embed_sparse", "rerank", "classify")
"""The tasks whose only or default model answers if no model is named, in this order."""

BYTES_PER_ID = 4
_PAIR = 2

_SIDES: Mapping[Direction, Side] = {"Left": "left", "left": "left", "Right": "right", "right": "right"}

_EMBED, _EMBED_ALL = JsonDecoder(EmbedRequest), JsonDecoder(EmbedAllRequest)
_EMBED_SPARSE, _PREDICT = JsonDecoder(EmbedSparseRequest), JsonDecoder(PredictRequest)
_RERANK, _SIMILARITY = JsonDecoder(RerankRequest), JsonDecoder(SimilarityRequest)
_TOKENIZE, _DECODE = JsonDecoder(TokenizeRequest), JsonDecoder(DecodeRequest)

# Examples for the OpenAPI document.
_PREDICTED = {"inputs": [["What a card!"], ["It broke.", "It works."]]}
_RANKED = {"query": "What is a T4?", "texts": ["A teapot.", "A graphics card."]}
_COMPARED = {"inputs": {"source_sentence": "What is a T4?", "sentences": ["A teapot.", "A graphics card."]}}


async def _run_task(
    context: AppContext,
    http: HttpRequest,
    inputs: Sequence[TextInput],
    options: TaskOptions[A],
    message: EmbedRequest | EmbedAllRequest | PredictRequest | RerankRequest | SimilarityParameters,
    model: str | None = None,
) -> Outcome[A]:
    check_not_empty(inputs)
    cut = _truncation(message.truncate, message.truncation_direction, context.settings.auto_truncate)
    model = model or http.parameters.get("model")
    request = InferRequest(inputs, options, model, truncate=cut)
    if not isinstance(message, PredictRequest | RerankRequest):
        request.prompt_name, request.input_type = message.prompt_name, message.input_type
    return await context.pipeline.infer(http.stamp(request))


@router.infer(
    "/embed",
    "embed",
    EmbedRequest,
    list[list[float | EmbeddedChunk] | EmbeddedText],
    {"inputs": ["What is a T4?", "A graphics card."]},
)
async def embed(context: AppContext, http: HttpRequest) -> HttpReply:
    """Embed texts, one vector per input."""
    return await embed_texts(context, http, await http.json(_EMBED, context.large_body_lock))


async def embed_texts(context: AppContext, http: HttpRequest, message: EmbedRequest) -> HttpReply:
    inputs = text_inputs(message.inputs)
    options = EmbedOptions(message.normalize, message.dimensions)
    if message.chunk:
        if message.outputs is not None:
            raise InvalidRequest("`outputs` cannot be combined with `chunk`; leave one out")
        return await _embed_chunks(context, http, message, inputs, options)
    if message.late_chunking or message.chunk_tokens is not None or message.chunk_overlap:
        raise InvalidRequest("`chunk_tokens`, `chunk_overlap` and `late_chunking` need `chunk` to be true")
    if message.outputs is not None:
        return await _embed_several(context, http, message, inputs, message.outputs)
    outcome = await _run_task(context, http, inputs, options, message)
    if outcome.answer.size > INLINE_NUMBERS:
        body = await context.pipeline.write(outcome, outcome.answer.size, partial(rows_json, outcome.answer))
    else:
        body = orjson.dumps(outcome.answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return HttpReply(body, head=_times_head(outcome, inputs))


async def _embed_several(
    context: AppContext,
    http: HttpRequest,
    message: EmbedRequest,
    inputs: Sequence[str | list[int]],
    outputs: Sequence[str],
) -> HttpReply:
    options = CombinedOptions(tuple(dict.fromkeys(outputs)), message.normalize, message.dimensions)
    outcome = await _run_task(context, http, inputs, options, message)

    def write(check: Check) -> bytes:
        return b"[%b]" % b",".join([embedded_json(one, check) for one in outcome.answer])

    body = await context.pipeline.write(outcome, sum(map(size_of, outcome.answer)), write)
    return HttpReply(body, head=_times_head(outcome, inputs))


async def _embed_chunks(
    context: AppContext,
    http: HttpRequest,
    message: EmbedRequest,
    inputs: Sequence[str | list[int]],
    vectors: EmbedOptions,
) -> HttpReply:
    kind = LateChunkOptions if message.late_chunking else ChunkOptions
    try:
        options = kind(message.chunk_tokens, message.chunk_overlap, vectors)
        outcome = await _run_task(context, http, inputs, options, message)
    except WrongTask as error:
        if not message.late_chunking:
            raise
        raise WrongTask(
            f"{error.message}; late chunking needs token embeddings: export a model with `bertserve export"
            " MODEL --task embed_tokens` and send requests to /models/NAME/embed"
        ) from None

    def write(check: Check) -> bytes:
        return b"[%b]" % b",".join([_chunks(chunks, check) for chunks in outcome.answer])

    numbers = sum([chunk.embedding.size for chunks in outcome.answer for chunk in chunks])
    body = await context.pipeline.write(outcome, numbers, write)
    return HttpReply(body, head=_times_head(outcome, inputs))


def _chunks(chunks: Sequence[Chunk], check: Check) -> bytes:
    rows = map(msgspec.structs.asdict, with_checks(chunks, check, 8))
    return b"[%b]" % b",".join([orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in rows])


@router.infer("/embed_all", "embed_tokens", EmbedAllRequest, list[list[list[float]]], {"inputs": "What is a T4?"})
async def embed_all(context: AppContext, http: HttpRequest) -> HttpReply:
    """Embed the tokens of texts, one vector per token, special tokens included."""
    message = await http.json(_EMBED_ALL, context.large_body_lock)
    inputs = text_inputs(message.inputs)
    try:
        outcome = await _run_task(context, http, inputs, EmbedTokensOptions(), message)
    except WrongTask as error:
        raise WrongTask(
            f"{error.message}; export one with `bertserve export MODEL --task embed_tokens`, or bge-m3 without --task"
            " and --outputs"
        ) from None
    numbers = sum([tokens.size for tokens in outcome.answer])
    body = await context.pipeline.write(outcome, numbers, partial(_ragged, outcome.answer))
    return HttpReply(body, head=_times_head(outcome, inputs))


@router.infer(
    "/embed_sparse",
    "embed_sparse",
    EmbedSparseRequest,
    list[list[SparseWeight] | dict[str, Any]],
    {"inputs": "What is a T4?"},
)
async def embed_sparse(context: AppContext, http: HttpRequest) -> HttpReply:
    """Compute sparse vectors of texts, with a weight for each of their tokens."""
    message = await http.json(_EMBED_SPARSE, context.large_body_lock)
    inputs = text_inputs(message.inputs)
    named = message.tokens or message.format == "tokens"
    options = EmbedSparseOptions(message.top_k, message.threshold, tokens=named)
    outcome = await _run_task(context, http, inputs, options, message)
    numbers = NUMBERS_OF_A_WEIGHT * sum(map(len, outcome.answer))
    body = await context.pipeline.write(outcome, numbers, partial(_sparse, outcome.answer, message))
    return HttpReply(body, head=_times_head(outcome, inputs))


def _sparse(answer: Sequence[SparseVector], message: EmbedSparseRequest, check: Check) -> bytes:
    return b"[%b]" % b",".join([sparse_json(vector, message.format) for vector in with_checks(answer, check, 1)])


@router.infer("/predict", "classify", PredictRequest, list[LabelScore | list[LabelScore]], _PREDICTED)
async def predict(context: AppContext, http: HttpRequest) -> HttpReply:
    """Classify texts or pairs, best class first."""
    message = await http.json(_PREDICT, context.large_body_lock)
    inputs = _predict_inputs(message.inputs)
    outcome = await _run_task(
        context, http, inputs, ClassifyOptions("none" if message.raw_scores else None, windows=message.windows), message
    )
    # A list that contains a list is a batch, even of one input.
    single = isinstance(message.inputs, str) or isinstance(message.inputs[0], str)
    body = msgspec.json.encode(outcome.answer[0] if single else outcome.answer)
    texts = [text for value in inputs for text in (value if isinstance(value, tuple) else (value,))]
    return HttpReply(body, head=_times_head(outcome, texts))


_RERANKS = Docs((RerankRequest, RankingRequest), list[Rank] | RankingReply, _RANKED, ranking_models)


@router.named("POST", "/rerank", _RERANKS, infers=True)
async def rerank(context: AppContext, http: HttpRequest) -> HttpReply:
    """Rerank texts by relevance to a query, or `documents` in the format of Jina and vLLM."""
    if cohere.brings_documents(http.body):
        return await cohere.rank(context, http, "1", repeat=True)
    message = await http.json(_RERANK, context.large_body_lock)
    pairs = [(message.query, text) for text in message.texts]
    named, windows = http.parameters.get("model"), message.windows
    model, options = ranking(
        context.repository, named, raw_scores=message.raw_scores, windows=windows, weights=message.weights
    )
    outcome = await _run_task(context, http, pairs, options, message, model)
    ranks = [
        Rank(index, score, message.texts[index] if message.return_text else None)
        for index, score in enumerate(outcome.answer)
    ]
    ranks.sort(key=lambda rank: -rank.score)
    return HttpReply(
        msgspec.json.encode(ranks[: message.top_n or None]), head=_times_head(outcome, [message.query, *message.texts])
    )


@router.infer("/similarity", "embed", SimilarityRequest, list[float], _COMPARED)
async def similarity(context: AppContext, http: HttpRequest) -> HttpReply:
    """Compare sentences with a source sentence by cosine similarity."""
    return await compare(context, http, await http.json(_SIMILARITY, context.large_body_lock))


async def compare(context: AppContext, http: HttpRequest, message: SimilarityRequest) -> HttpReply:
    if not message.inputs.sentences:
        raise EmptyInput("`sentences` is empty; send at least one")
    parameters = message.parameters or SimilarityParameters()
    inputs = [message.inputs.source_sentence, *message.inputs.sentences]
    outcome = await _run_task(context, http, inputs, EmbedOptions(normalize=True), parameters)
    vectors = outcome.answer
    cosines = np.clip(vectors[1:] @ vectors[0], -1.0, 1.0)
    body = orjson.dumps(cosines, option=orjson.OPT_SERIALIZE_NUMPY)
    return HttpReply(body, head=_times_head(outcome, inputs))


@router.named("POST", "/tokenize", Docs(TokenizeRequest, TokenizeReply, {"inputs": "What is a T4?"}, all_models))
async def tokenize(context: AppContext, http: HttpRequest) -> HttpReply:
    """Tokenize texts."""
    message = await http.json(_TOKENIZE, context.large_body_lock)
    model, special = _model(context, http), message.add_special_tokens
    texts = [message.inputs] if isinstance(message.inputs, str) else message.inputs
    check_count(len(texts), context.settings.max_client_batch_size, "`inputs`")
    check_not_empty(texts)
    texts = texts_of(prompted(texts, model.manifest, message.prompt_name, message.input_type))
    body = await context.pipeline.read(
        model,
        sum(model.tokenizer.sizes_bytes(texts)),
        lambda tokenizer: msgspec.json.encode([tokenizer.tokens(text, special=special) for text in texts]),
    )
    return HttpReply(body)


@router.named("POST", "/decode", Docs(DecodeRequest, list[str], {"ids": [[1, 2, 3]]}, all_models))
async def decode(context: AppContext, http: HttpRequest) -> HttpReply:
    """Decode token IDs into texts."""
    message = await http.json(_DECODE, context.large_body_lock)
    rows, bare = _rows(message.ids), message.skip_special_tokens
    model = _model(context, http)
    check_count(len(rows), context.settings.max_client_batch_size, "`ids`")
    check_not_empty(rows, "input_ids")
    for row in rows:
        model.tokenizer.check_readable(row)
    body = await context.pipeline.read(
        model,
        BYTES_PER_ID * sum(map(len, rows)),
        lambda tokenizer: msgspec.json.encode([tokenizer.decode(row, bare=bare) for row in rows]),
    )
    return HttpReply(body)


def _model(context: AppContext, http: HttpRequest) -> ServedModel:
    """The named model; without a name, the only model or the only or default model of the first of `_TASKS`.

    Raises:
        ModelNotFound: No model of that name is served.
        ModelNotNamed: No name is given, and there are several models to choose from.
    """
    repository, name = context.repository, http.parameters.get("model")
    if name is not None or len(repository.models) == 1:
        return repository.find(name)
    return repository.find(None, task=next(filter(repository.of_task, _TASKS), None))


@router.named("GET", "/info", Docs(gives=Info, models=all_models))
async def info(context: AppContext, http: HttpRequest) -> HttpReply:
    """Get a model's metadata and the server's limits."""
    model, settings = _model(context, http), context.settings
    manifest = model.manifest
    labels = manifest.labels.names if manifest.labels else ("score",)
    named: dict[str, Any] = {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }
    if manifest.labels and manifest.labels.problem == "regression":
        named["problem_type"] = "regression"
    pooling = ("embedding", {"pooling": "+".join(manifest.embedding.pooling) if manifest.embedding else None})
    sparse = ("embedding", {"pooling": "splade"})
    kinds = {"rerank": ("reranker", named), "embed": pooling, "embed_tokens": pooling, "embed_sparse": sparse}
    kind, details = kinds.get(manifest.task, ("classifier", named))
    found = Info(
        model_id=manifest.source.name,
        model_sha=manifest.source.sha256,
        model_dtype={"fp32": "float32", "fp16": "float16"}.get(model.artifact.precision, model.artifact.precision),
        served_model_name=model.name,
        model_type={kind: details},
        max_concurrent_requests=max(1, settings.max_queue_tokens // manifest.max_length),
        max_input_length=manifest.max_length,
        max_batch_tokens=settings.max_batch_tokens,
        max_batch_requests=None,
        max_client_batch_size=int(settings.max_client_batch_size),  # msgspec cannot encode a `Limit`
        auto_truncate=settings.auto_truncate,
        tokenization_workers=1,
        version=SERVER_VERSION,
        engine=context.repository.engine,
        prompts=manifest.prompts,
        default_prompt_name=manifest.default_prompt,
        outputs=offered(manifest) if manifest.task == "embed" else (),
    )
    return json_reply(found)


_UNHEALTHY = {503: "The server is not ready for requests."}


@router.get("/health", Docs(statuses=_UNHEALTHY), public=True)
@router.get("/ping", Docs(statuses=_UNHEALTHY), public=True)
async def health(context: AppContext, _: HttpRequest) -> HttpReply:
    """Readiness probe: 200 while the server accepts requests."""
    if context.lifecycle.ready:
        return HttpReply(b"", content_type=b"text/plain")
    return json_reply(TeiError("unhealthy", "Unhealthy"), 503)


def _truncation(truncate: bool | None, direction: Direction | None, default: bool) -> Truncate | None:  # noqa: FBT001
    """The truncation that both fields request; `default` applies if `truncate` is null."""
    if direction is None:
        return truncate
    return _SIDES[direction] if (default if truncate is None else truncate) else False


def text_inputs(inputs: str | list[str | list[int] | int]) -> list[str | list[int]]:
    """TEI's untagged `Input`: a text, token ids, or a list of either.

    Raises:
        InvalidRequest: The list mixes numbers and texts.
    """
    if isinstance(inputs, str):
        return [inputs]
    kinds = set(map(type, inputs))  # there may be hundreds of thousands of numbers
    if kinds == {int}:
        return [cast("list[int]", inputs)]
    if int in kinds:
        raise InvalidRequest("`inputs` mixes numbers and texts; send the token IDs of each input as a list")
    return cast("list[str | list[int]]", inputs)


def _predict_inputs(inputs: str | list[str | list[str]]) -> list[TextInput]:
    """TEI's untagged input of `/predict`: a text, a pair, or a list of lists of one or two texts.

    Raises:
        InvalidRequest: The list mixes texts and lists, or a list has neither one nor two texts.
    """
    if isinstance(inputs, str):
        return [inputs]
    texts = [value for value in inputs if isinstance(value, str)]
    if not texts:
        return [_text_or_pair(value) for value in inputs if not isinstance(value, str)]
    if len(texts) != len(inputs):
        raise InvalidRequest("`inputs` mixes texts and lists; send each input as a list")
    return [_text_or_pair(texts)]


def _text_or_pair(texts: Sequence[str]) -> TextInput:
    """One input of `/predict`: a text, or a pair of texts.

    Raises:
        InvalidRequest: There are neither one nor two texts.
    """
    if not 1 <= len(texts) <= _PAIR:
        raise InvalidRequest(f"an input has {len(texts)} texts; send one text or a pair")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def _times_head(outcome: Outcome[Any], inputs: Sequence[TextInput]) -> bytes:
    """The headers of every reply, and TEI's own: whole milliseconds, and the characters of the texts."""
    times = outcome.timings
    total_ms = times.total_us / 1e3
    return outcome_head(outcome) + _TIMES % (
        sum([len(text) if isinstance(text, str) else 0 for text in inputs]),
        total_ms,
        total_ms,
        times.tokenize_us / 1e3,
        times.queue_us / 1e3,
        times.compute_us / 1e3,
    )


def _ragged(answer: Sequence[NDArray[np.float32]], check: Check) -> bytes:
    return b"[%b]" % b",".join([rows_json(tokens, check) for tokens in answer])


def _rows(ids: list[int | list[int]]) -> list[list[int]]:
    """The ids of each text; a single text's ids need no outer list."""
    kinds = set(map(type, ids))
    if len(kinds) > 1:
        raise InvalidRequest("`ids` mixes numbers and lists; send one or the other")
    return [cast("list[int]", ids)] if kinds == {int} else cast("list[list[int]]", ids)
