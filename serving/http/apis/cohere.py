"""Reranking in Cohere's shape: `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from serving.errors import InvalidRequest
from serving.http.decoding import JsonDecoder
from serving.http.documentation import UNLISTED
from serving.http.exchange import HttpReply, Operation, outcome_head
from serving.records import InferRequest, RerankOptions

if TYPE_CHECKING:
    from serving.http.exchange import Handler, HttpRequest
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository
    from serving.records import Outcome
    from serving.settings import Settings

TAG = "Cohere"


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document."""

    text: str


class RankingRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Documents to order by how well they answer a query.

    Attributes:
        query: The query.
        documents: The documents.
        model: Name of a model; with one model for this, any name is taken.
        top_n: Answer the best so many; null means all.
        max_tokens_per_doc: Documents are cut at the model's own length; a smaller one is refused.
    """

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    max_tokens_per_doc: int | None = None


class RankingRequestV1(msgspec.Struct, forbid_unknown_fields=True):
    """The same as the first version of the API has it.

    Attributes:
        query: The query.
        documents: The documents, as texts or objects.
        model: Name of a model; with one model for this, any name is taken.
        top_n: Answer the best so many; null means all.
        max_tokens_per_doc: Documents are cut at the model's own length; a smaller one is refused.
        return_documents: Repeat each document beside its score.
    """

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    max_tokens_per_doc: int | None = None
    return_documents: bool = False


class Ranked(msgspec.Struct, omit_defaults=True):
    """A document's score, between 0 and 1, and its place in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class ApiVersion(msgspec.Struct):
    """The version of the API."""

    version: str


class TokenCount(msgspec.Struct):
    """Tokens computed, special tokens included."""

    input_tokens: int


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


def operations(pipeline: Pipeline, repository: Repository, settings: Settings) -> list[Operation]:
    """The routes of this protocol."""

    async def rank(
        http: HttpRequest, message: RankingRequest | RankingRequestV1, documents: list[str]
    ) -> tuple[Outcome[list[float]], list[Ranked]]:
        if message.top_n is not None and message.top_n < 1:
            raise InvalidRequest(f"`top_n` is {message.top_n}; at least 1 is given")
        name = repository.named_or_only(message.model, "rerank")
        longest = repository.find(name, task="rerank").manifest.max_length
        if message.max_tokens_per_doc is not None and message.max_tokens_per_doc < longest:
            raise InvalidRequest(f"`max_tokens_per_doc` is below the model's own {longest}, at which documents are cut")
        outcome = await pipeline.infer(
            InferRequest(
                inputs=[(message.query, document) for document in documents],
                arrival=http.arrival,
                request_id=http.request_id,
                max_inputs=settings.max_openai_batch_size,
                options=RerankOptions(),
                model=name,
                timeout_ms=http.timeout_ms(),
                priority=http.priority(),
                trace=http.trace,
            )
        )
        ranks = sorted(map(Ranked, range(len(documents)), outcome.answer), key=lambda rank: -rank.relevance_score)
        return outcome, ranks[: message.top_n]

    def reply(http: HttpRequest, outcome: Outcome[Any], ranks: list[Ranked], version: str) -> HttpReply:
        meta = RankingMeta(ApiVersion(version), TokenCount(outcome.tokens))
        body = msgspec.json.encode(RankingReply(http.request_id, ranks, outcome.model, meta))
        return HttpReply(body, head=outcome_head(outcome))

    decoder = JsonDecoder(RankingRequest)
    decoder_v1 = JsonDecoder(RankingRequestV1)

    async def current(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = decoder.decode(http.body)
        outcome, ranks = await rank(http, message, message.documents)
        return reply(http, outcome, ranks, "2")

    async def first(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = decoder_v1.decode(http.body)
        texts = [value if isinstance(value, str) else value.text for value in message.documents]
        outcome, ranks = await rank(http, message, texts)
        if message.return_documents:
            for entry in ranks:
                entry.document = Document(texts[entry.index])
        return reply(http, outcome, ranks, "1")

    names = [model.name for model in repository.of_task("rerank")]
    example = {"query": "What is a T4?", "documents": ["A teapot.", "A graphics card."], "top_n": 1}

    def route(path: str, handler: Handler, kind: type[msgspec.Struct]) -> Operation:
        tag = TAG if names else UNLISTED
        return Operation("POST", path, handler, "Order documents, in Cohere's shape.", tag, kind, RankingReply, example)

    return [route("/v2/rerank", current, RankingRequest), route("/v1/rerank", first, RankingRequestV1)]
