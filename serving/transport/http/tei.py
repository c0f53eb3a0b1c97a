"""The text API of text-embeddings-inference: `/embed`, `/predict`, `/rerank`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import orjson

from serving.errors import InvalidRequest
from serving.records import ClassifyOptions, EmbedOptions, InferRequest, LabelScore, RerankOptions
from serving.transport.http.decoding import JsonDecoder
from serving.transport.http.documentation import UNLISTED
from serving.transport.http.exchange import HttpReply, Operation, outcome_headers

if TYPE_CHECKING:
    from serving.manifest import Task
    from serving.pipeline import Pipeline
    from serving.records import TextInput
    from serving.repository import Repository
    from serving.settings import Settings
    from serving.transport.http.exchange import HttpRequest

TAG = "TEI"
_PAIR = 2


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to embed. A list of numbers is one input given as token ids, special tokens included.

    Attributes:
        inputs: One input or a list of them.
        truncate: Cut inputs that are too long; null means the server's default.
        truncation_direction: Which end stays.
        prompt_name: One of the model's prompts, put before each text.
        normalize: Scale vectors to length 1.
        dimensions: Keep only the first so many components.
    """

    inputs: str | list[str | list[int] | int]
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = None


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts or pairs of texts to classify.

    Attributes:
        inputs: A text; a pair as a list of two texts; or a list whose elements are lists of one or two texts.
        truncate: Cut inputs that are too long; null means the server's default.
        truncation_direction: Which end stays.
        raw_scores: Answer the logits themselves.
    """

    inputs: str | list[str | list[str]]
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"
    raw_scores: bool = False


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to order by how well they answer a query.

    Attributes:
        query: The query.
        texts: The texts.
        truncate: Cut what is too long; null means the server's default.
        truncation_direction: Which end stays.
        raw_scores: Answer the logits themselves.
        return_text: Repeat each text beside its score.
    """

    query: str
    texts: list[str]
    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] = "Right"
    raw_scores: bool = False
    return_text: bool = False


class Rank(msgspec.Struct, omit_defaults=True):
    """A text's score; `index` is its place in the request."""

    index: int
    score: float
    text: str | None = None


def text_inputs(given: str | list[str | list[int] | int]) -> list[str | list[int]]:
    """TEI's untagged `Input`: a text, token ids, or a list of either.

    Raises:
        InvalidRequest: Numbers stand beside texts.
    """
    if isinstance(given, str):
        return [given]
    numbers = [value for value in given if isinstance(value, int)]
    if numbers and len(numbers) == len(given):
        return [numbers]
    if numbers:
        raise InvalidRequest("`inputs` mixes numbers and texts; token ids of several inputs are lists of their own")
    return [value for value in given if not isinstance(value, int)]


def predict_inputs(given: str | list[str | list[str]]) -> list[TextInput]:
    """TEI's untagged input of `/predict`: a text, a pair, or a list of lists of one or two texts.

    Raises:
        InvalidRequest: Texts stand beside lists, or a list has neither one nor two texts.
    """
    if isinstance(given, str):
        return [given]
    texts = [value for value in given if isinstance(value, str)]
    if not texts:
        return [_sequence(value) for value in given if not isinstance(value, str)]
    if len(texts) != len(given):
        raise InvalidRequest("`inputs` mixes texts and lists; a list of inputs holds a list for each")
    return [_sequence(texts)]


def _sequence(texts: list[str]) -> TextInput:
    if not 1 <= len(texts) <= _PAIR:
        raise InvalidRequest(f"an input of {len(texts)} texts; one is a text and two are a pair")
    return texts[0] if len(texts) == 1 else (texts[0], texts[1])


def operations(pipeline: Pipeline, repository: Repository, settings: Settings) -> list[Operation]:
    """The routes of this protocol; the documentation shows those that a model here answers."""
    embed_decoder = JsonDecoder(EmbedRequest)
    predict_decoder = JsonDecoder(PredictRequest)
    rerank_decoder = JsonDecoder(RerankRequest)

    async def embed(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = embed_decoder.decode(http.body)
        outcome = await pipeline.infer(
            InferRequest(
                inputs=text_inputs(message.inputs),
                arrival=http.arrival,
                request_id=http.request_id,
                max_inputs=settings.max_client_batch_size,
                options=EmbedOptions(message.normalize, message.dimensions),
                truncate=message.truncate,
                prompt_name=message.prompt_name,
                timeout_ms=http.timeout_ms(),
                priority=http.priority(),
            )
        )
        body = orjson.dumps(outcome.answer, option=orjson.OPT_SERIALIZE_NUMPY)
        return HttpReply(body, headers=outcome_headers(outcome))

    async def predict(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = predict_decoder.decode(http.body)
        outcome = await pipeline.infer(
            InferRequest(
                inputs=predict_inputs(message.inputs),
                arrival=http.arrival,
                request_id=http.request_id,
                max_inputs=settings.max_client_batch_size,
                options=ClassifyOptions("none" if message.raw_scores else None),
                truncate=message.truncate,
                timeout_ms=http.timeout_ms(),
                priority=http.priority(),
            )
        )
        # A list that holds a list is a batch, also of one.
        single = isinstance(message.inputs, str) or isinstance(message.inputs[0], str)
        body = msgspec.json.encode(outcome.answer[0] if single else outcome.answer)
        return HttpReply(body, headers=outcome_headers(outcome))

    async def rerank(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = rerank_decoder.decode(http.body)
        outcome = await pipeline.infer(
            InferRequest(
                inputs=[(message.query, text) for text in message.texts],
                arrival=http.arrival,
                request_id=http.request_id,
                max_inputs=settings.max_client_batch_size,
                options=RerankOptions(message.raw_scores),
                truncate=message.truncate,
                timeout_ms=http.timeout_ms(),
                priority=http.priority(),
            )
        )
        ranks = [
            Rank(index, score, message.texts[index] if message.return_text else None)
            for index, score in enumerate(outcome.answer)
        ]
        ranks.sort(key=lambda rank: -rank.score)
        return HttpReply(msgspec.json.encode(ranks), headers=outcome_headers(outcome))

    def tag(task: Task) -> str:
        return TAG if repository.of_task(task) else UNLISTED

    return [
        Operation(
            "POST",
            "/embed",
            embed,
            "Embed texts; one vector an input.",
            tag("embed"),
            EmbedRequest,
            list[list[float]],
            {"inputs": ["What is a T4?", "A graphics card."]},
        ),
        Operation(
            "POST",
            "/predict",
            predict,
            "Classify texts or pairs; each input's classes, best first.",
            tag("classify"),
            PredictRequest,
            list[LabelScore | list[LabelScore]],
            {"inputs": [["What a card!"], ["It broke.", "It works."]]},
        ),
        Operation(
            "POST",
            "/rerank",
            rerank,
            "Order texts by how well they answer a query.",
            tag("rerank"),
            RerankRequest,
            list[Rank],
            {"query": "What is a T4?", "texts": ["A teapot.", "A graphics card."]},
        ),
    ]
