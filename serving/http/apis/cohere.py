"""Reranking in Cohere's shape: `/v1/rerank` and `/v2/rerank`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.errors import InvalidRequest
from serving.http.apis.cohere_messages import (
    ApiVersion,
    Document,
    Ranked,
    RankingMeta,
    RankingReply,
    RankingRequest,
    RankingRequestV1,
    TokenCount,
)
from serving.http.exchange import HttpReply, JsonDecoder, json_reply, outcome_head
from serving.http.routes import Docs, Router, of_task
from serving.records import RerankOptions

if TYPE_CHECKING:
    from serving.http.api import Api
    from serving.http.exchange import HttpRequest

router = Router("Cohere")

_CURRENT, _FIRST = JsonDecoder(RankingRequest), JsonDecoder(RankingRequestV1)
_EXAMPLE = {"query": "What is a T4?", "documents": ["A teapot.", "A graphics card."], "top_n": 1}


@router.hot("/v2/rerank", Docs(RankingRequest, RankingReply, _EXAMPLE, of_task("rerank")))
async def rerank(api: Api, http: HttpRequest) -> HttpReply:
    """Order documents, in Cohere's shape."""
    message = await http.json(_CURRENT, api.turn)
    return await _rank(api, http, message, message.documents, "2")


@router.hot("/v1/rerank", Docs(RankingRequestV1, RankingReply, _EXAMPLE, of_task("rerank")))
async def rerank_v1(api: Api, http: HttpRequest) -> HttpReply:
    """Order documents, in Cohere's shape."""
    message = await http.json(_FIRST, api.turn)
    texts = [value if isinstance(value, str) else value.text for value in message.documents]
    return await _rank(api, http, message, texts, "1", repeat=message.return_documents)


async def _rank(
    api: Api,
    http: HttpRequest,
    message: RankingRequest | RankingRequestV1,
    documents: list[str],
    version: str,
    *,
    repeat: bool = False,
) -> HttpReply:
    """Orders documents.

    Args:
        api: What answers.
        http: The request.
        message: Its message.
        documents: The texts in it.
        version: Of Cohere's API.
        repeat: Whether each document stands beside its score.
    """
    if message.top_n is not None and message.top_n < 1:
        raise InvalidRequest(f"`top_n` is {message.top_n}; at least 1 is given")
    name = api.repository.named_or_only(message.model, "rerank")
    longest = api.repository.find(name, task="rerank").manifest.max_length
    if message.max_tokens_per_doc is not None and message.max_tokens_per_doc < longest:
        raise InvalidRequest(f"`max_tokens_per_doc` is below the model's own {longest}, at which documents are cut")
    outcome = await api.pipeline.infer(
        api.request(
            http,
            [(message.query, document) for document in documents],
            RerankOptions(),
            max_inputs=api.settings.max_openai_batch_size,
            model=name,
        )
    )
    ranks = [
        Ranked(index, score, Document(documents[index]) if repeat else None)
        for index, score in enumerate(outcome.answer)
    ]
    ranks.sort(key=lambda rank: -rank.relevance_score)
    meta = RankingMeta(ApiVersion(version), TokenCount(outcome.tokens))
    reply = json_reply(RankingReply(http.request_id, ranks[: message.top_n], outcome.model, meta))
    reply.head = outcome_head(outcome)
    return reply
