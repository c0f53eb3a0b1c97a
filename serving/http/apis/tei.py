"""The text API of text-embeddings-inference: what a model infers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson

from serving.errors import EmptyInput
from serving.http.apis.tei_messages import (
    EmbedAllRequest,
    EmbedRequest,
    PredictRequest,
    Rank,
    RerankRequest,
    SimilarityParameters,
    SimilarityRequest,
    predict_inputs,
    text_inputs,
    truncation,
)
from serving.http.decoding import JsonDecoder
from serving.http.exchange import HttpReply, outcome_head
from serving.http.naming import Named
from serving.records import ClassifyOptions, EmbedOptions, InferRequest, LabelScore, RerankOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.exchange import HttpRequest, Operation
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository
    from serving.records import A, Outcome, TaskOptions, TextInput
    from serving.settings import Settings

TAG = "TEI"

_COMPUTE_TYPE = "cpu"
_TIMES = (
    f"x-compute-type: {_COMPUTE_TYPE}\r\nx-compute-characters: %d\r\nx-compute-time: %d\r\nx-total-time: %d\r\n"
    "x-tokenization-time: %d\r\nx-queue-time: %d\r\nx-inference-time: %d\r\n"
).encode()


def times_head(outcome: Outcome[Any], inputs: Sequence[TextInput]) -> bytes:
    """What every reply carries, and TEI's own headers: whole milliseconds, and the characters of the texts."""
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


def asked(
    settings: Settings,
    http: HttpRequest,
    inputs: Sequence[TextInput],
    options: TaskOptions[A],
    given: EmbedRequest | EmbedAllRequest | PredictRequest | RerankRequest | SimilarityParameters,
    prompt_name: str | None = None,
) -> InferRequest[A]:
    """What a request asks of the pipeline."""
    return InferRequest(
        inputs=inputs,
        arrival=http.arrival,
        request_id=http.request_id,
        max_inputs=settings.max_client_batch_size,
        options=options,
        model=http.parameters.get("model"),
        truncate=truncation(given.truncate, given.truncation_direction, settings.auto_truncate),
        prompt_name=prompt_name,
        timeout_ms=http.timeout_ms(),
        priority=http.priority(),
        trace=http.trace,
    )


def operations(pipeline: Pipeline, repository: Repository, settings: Settings) -> list[Operation]:
    """The routes of this protocol that infer; the documentation shows those that a model here answers."""
    embed_decoder = JsonDecoder(EmbedRequest)
    predict_decoder = JsonDecoder(PredictRequest)
    rerank_decoder = JsonDecoder(RerankRequest)
    similarity_decoder = JsonDecoder(SimilarityRequest)

    async def embed(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = embed_decoder.decode(http.body)
        inputs = text_inputs(message.inputs)
        outcome = await pipeline.infer(
            asked(
                settings,
                http,
                inputs,
                EmbedOptions(message.normalize, message.dimensions),
                message,
                message.prompt_name,
            )
        )
        body = orjson.dumps(outcome.answer, option=orjson.OPT_SERIALIZE_NUMPY)
        return HttpReply(body, head=times_head(outcome, inputs))

    async def predict(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = predict_decoder.decode(http.body)
        inputs = predict_inputs(message.inputs)
        outcome = await pipeline.infer(
            asked(settings, http, inputs, ClassifyOptions("none" if message.raw_scores else None), message)
        )
        # A list that holds a list is a batch, also of one.
        single = isinstance(message.inputs, str) or isinstance(message.inputs[0], str)
        body = msgspec.json.encode(outcome.answer[0] if single else outcome.answer)
        texts = [text for value in inputs for text in (value if isinstance(value, tuple) else (value,))]
        return HttpReply(body, head=times_head(outcome, texts))

    async def rerank(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = rerank_decoder.decode(http.body)
        outcome = await pipeline.infer(
            asked(
                settings,
                http,
                [(message.query, text) for text in message.texts],
                RerankOptions(message.raw_scores),
                message,
            )
        )
        ranks = [
            Rank(index, score, message.texts[index] if message.return_text else None)
            for index, score in enumerate(outcome.answer)
        ]
        ranks.sort(key=lambda rank: -rank.score)
        return HttpReply(msgspec.json.encode(ranks), head=times_head(outcome, [message.query, *message.texts]))

    async def similarity(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = similarity_decoder.decode(http.body)
        if not message.inputs.sentences:
            raise EmptyInput("`sentences` is empty; send at least one")
        given = message.parameters or SimilarityParameters()
        inputs = [message.inputs.source_sentence, *message.inputs.sentences]
        outcome = await pipeline.infer(asked(settings, http, inputs, EmbedOptions(), given, given.prompt_name))
        vectors = outcome.answer
        cosines = np.clip(vectors[1:] @ vectors[0], -1.0, 1.0)
        body = orjson.dumps(cosines, option=orjson.OPT_SERIALIZE_NUMPY)
        return HttpReply(body, head=times_head(outcome, inputs))

    named = Named(repository, TAG)
    return [
        *named.routes(
            "embed",
            "/embed",
            embed,
            "Embed texts; one vector an input.",
            EmbedRequest,
            list[list[float]],
            {"inputs": ["What is a T4?", "A graphics card."]},
        ),
        *named.routes(
            "classify",
            "/predict",
            predict,
            "Classify texts or pairs; each input's classes, best first.",
            PredictRequest,
            list[LabelScore | list[LabelScore]],
            {"inputs": [["What a card!"], ["It broke.", "It works."]]},
        ),
        *named.routes(
            "rerank",
            "/rerank",
            rerank,
            "Order texts by how well they answer a query.",
            RerankRequest,
            list[Rank],
            {"query": "What is a T4?", "texts": ["A teapot.", "A graphics card."]},
        ),
        *named.routes(
            "embed",
            "/similarity",
            similarity,
            "The cosines of sentences with one.",
            SimilarityRequest,
            list[float],
            {"inputs": {"source_sentence": "What is a T4?", "sentences": ["A teapot.", "A graphics card."]}},
        ),
    ]
