"""What text-embeddings-inference answers for each token: `/embed_all`, and `/embed_sparse`, for which none here is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import orjson

from serving.errors import WrongTask
from serving.http.apis.tei import TAG, asked, times_head
from serving.http.apis.tei_messages import EmbedAllRequest, text_inputs
from serving.http.decoding import JsonDecoder
from serving.http.exchange import HttpReply
from serving.http.naming import Named
from serving.records import EmbedTokensOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from serving.http.exchange import HttpRequest, Operation
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository
    from serving.settings import Settings

_NUMBERS_AT_ONCE = 8192
_INLINE_NUMBERS = 4 * _NUMBERS_AT_ONCE
"""What is written on the event loop takes well below a millisecond."""

_HOW = "`bertserve export MODEL --task embed_tokens` makes one"


def operations(pipeline: Pipeline, repository: Repository, settings: Settings) -> list[Operation]:
    """The routes."""
    decoder = JsonDecoder(EmbedAllRequest)

    async def embed_all(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = decoder.decode(http.body)
        inputs = text_inputs(message.inputs)
        try:
            outcome = await pipeline.infer(
                asked(settings, http, inputs, EmbedTokensOptions(), message, message.prompt_name)
            )
        except WrongTask as error:
            raise WrongTask(
                f"{error.message}; `bertserve export MODEL --task embed_tokens` makes such a model"
            ) from None
        if sum([tokens.size for tokens in outcome.answer]) > _INLINE_NUMBERS:
            body = await asyncio.to_thread(_ragged, outcome.answer)
        else:
            body = _ragged(outcome.answer)
        return HttpReply(body, head=times_head(outcome, inputs))

    async def embed_sparse(http: HttpRequest) -> HttpReply:
        http.require_json()
        decoder.decode(http.body)
        repository.find(http.parameters.get("model"), task="embed")
        raise WrongTask("no model here makes sparse vectors (TEI's pooling `splade`)")

    named = Named(repository, TAG)
    return [
        *named.routes(
            "embed_tokens",
            "/embed_all",
            embed_all,
            "Embed the tokens of texts; one vector a token, those of special tokens included.",
            EmbedAllRequest,
            list[list[list[float]]],
            {"inputs": "What is a T4?"},
        ),
        *named.of_models((), "POST", "/embed_sparse", embed_sparse, "No model here gives sparse vectors."),
    ]


def _ragged(answer: Sequence[NDArray[np.float32]]) -> bytes:
    """The vectors as JSON, some at a time: nothing else runs in Python while such a piece is written."""
    texts = []
    for vectors in answer:
        step = max(1, _NUMBERS_AT_ONCE // vectors.shape[1])
        pieces = [vectors[at : at + step] for at in range(0, len(vectors), step)]
        texts.append(b",".join([orjson.dumps(piece, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1] for piece in pieces]))
    return b"[[" + b"],[".join(texts) + b"]]"
