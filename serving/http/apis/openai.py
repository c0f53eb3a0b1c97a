"""OpenAI's embeddings API: `/v1/embeddings`, `/embeddings` and `/v1/models`."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgspec
import orjson

from serving.bulk.batches_api.lines import Answer
from serving.errors import ForeignTokenIds
from serving.http.apis.openai_messages import EmbeddingsReply, EmbeddingsRequest, ModelCard, ModelList, TextInput
from serving.http.apis.tei import text_inputs
from serving.http.apis.vectors import in_form
from serving.http.exchange import JSON, HttpReply, HttpRequest, JsonDecoder, json_reply, outcome_head
from serving.http.faults import error_body, status_of
from serving.http.routes import Docs, Router, all_models, of_task
from serving.inference.pipeline import check_not_empty
from serving.inference.requests import InferRequest
from serving.records import BULK
from serving.tasks.embed import EmbedOptions
from serving.tei.service import BYTES_PER_ID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from serving.bulk.batches_api.runner import Retry
    from serving.errors import BertserveError
    from serving.http.app_context import AppContext
    from serving.inference.requests import InputType, Outcome
    from serving.inference.served_models import ServedModel

router = Router("OpenAI")

_JINA_TASKS: Mapping[str | None, InputType] = {
    "retrieval.query": "query",
    "retrieval.passage": "passage",
    "classification": "classification",
    "separation": "clustering",
}

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


@router.hot("/v1/embeddings", _embeddings_docs)
@router.hot("/embeddings", _embeddings_docs, summary="Embed texts (OpenAI API, base URL without /v1).")
async def embeddings(context: AppContext, http: HttpRequest) -> HttpReply:
    """Embed texts (OpenAI API)."""
    message = await http.json(EMBEDDINGS, context.large_body_lock)
    name, inputs = await inputs_of(context, message)
    outcome = await embed_inputs(context, http, message, name, inputs)
    reply = {
        "object": "list",
        "data": embeddings_of(outcome, message),
        "model": outcome.model,
        "usage": usage_of([outcome]),
    }
    return HttpReply(orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY), head=outcome_head(outcome))


async def inputs_of(context: AppContext, message: EmbeddingsRequest) -> tuple[str | None, Sequence[str | list[int]]]:
    """The model's name and its inputs: texts, or token ids of the model's own tokenizer."""
    name = context.repository.named_or_only(message.model, "embed")
    model = context.repository.find(name, task="embed")
    inputs, read_ids = text_inputs(_plain(message.input)), context.read_ids
    check_not_empty(inputs, "input")
    rows = [value for value in inputs if not isinstance(value, str)]
    if read_ids is None or not rows:
        return name, [text if isinstance(text, str) else _own_ids(context, model, text) for text in inputs]
    return name, await context.pipeline.read(model, BYTES_PER_ID * sum(map(len, rows)), lambda _: read_ids(inputs))


async def embed_inputs(
    context: AppContext,
    http: HttpRequest,
    message: EmbeddingsRequest,
    name: str | None,
    inputs: Sequence[str | list[int]],
) -> Outcome[NDArray[np.float32]]:
    """Embeds all inputs of a message, or some of them."""
    request = InferRequest(
        inputs,
        EmbedOptions(message.normalized, message.dimensions),
        context.settings.max_openai_batch_size,
        name,
        truncate=message.truncate,
        prompt_name=message.prompt_name,
        input_type=message.input_type or _JINA_TASKS.get(message.task),
    )
    return await context.pipeline.infer(http.stamp(request))


def _plain(inputs: str | TextInput | list[str | TextInput | list[int] | int]) -> str | list[str | list[int] | int]:
    """The inputs with text objects replaced by their texts."""
    if isinstance(inputs, str):
        return inputs
    if isinstance(inputs, TextInput):
        return inputs.text
    if TextInput in set(map(type, inputs)):
        return [value.text if isinstance(value, TextInput) else value for value in inputs]
    return cast("list[str | list[int] | int]", inputs)


def _own_ids(context: AppContext, model: ServedModel, ids: list[int]) -> list[int]:
    """Token ids with the model's special tokens.

    Clients of OpenAI's own server send its tokenizer's ids, which this model would read as other words.

    Raises:
        ForeignTokenIds: The ids may be of another tokenizer.
    """
    tokenizer = model.tokenizer
    if context.settings.accept_bare_ids:
        return tokenizer.framed(ids)
    if ids and not tokenizer.is_framed(ids):
        raise ForeignTokenIds(
            "`input` has token IDs without this model's special tokens; they may come from another tokenizer. Send"
            " strings (LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False)). To accept OpenAI's token IDs,"
            " start the server with --accept-token-ids cl100k_base; for the model's own IDs without special tokens,"
            " with --accept-bare-ids"
        )
    return ids


def _card(model: ServedModel) -> ModelCard:
    manifest = model.manifest
    created = round(datetime.fromisoformat(manifest.created).timestamp())
    return ModelCard(model.name, "model", created, manifest.source.name, manifest.prompts, manifest.default_prompt)


def embeddings_of(
    outcome: Outcome[NDArray[np.float32]], message: EmbeddingsRequest, first: int = 0
) -> list[dict[str, Any]]:
    """The vectors in the message's format, with indexes from `first`."""
    rows = in_form(outcome.answer, message.embedding_type or message.encoding_format)
    return [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows, first)]


def usage_of(outcomes: Sequence[Outcome[Any]]) -> dict[str, int]:
    tokens = sum([outcome.tokens for outcome in outcomes])
    return {"prompt_tokens": tokens, "total_tokens": tokens}


PATH = "/v1/embeddings"

_PIECE_TEXTS = 32
_OK = 200
_BULK = str(BULK).encode()


class EmbeddingLines:
    """Answers a batch's lines through the pipeline, as bulk work."""

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._headers = {b"content-type": JSON, b"x-request-priority": _BULK}

    async def prepare(self, line_id: str, body: bytes) -> EmbeddingLine:
        """See `Endpoint`."""
        http = HttpRequest("POST", PATH, self._headers, body, line_id, time.perf_counter())
        http.refuses_unknown = self._context.refuses_unknown
        message = await http.json(EMBEDDINGS, self._context.large_body_lock)
        name, inputs = await inputs_of(self._context, message)
        http.body = b""
        # A line with too many inputs or none is sent in one piece, to get the pipeline's own error.
        size = _PIECE_TEXTS if len(inputs) <= self._context.settings.max_openai_batch_size else len(inputs)
        pieces = [inputs[at : at + size] for at in range(0, max(1, len(inputs)), max(1, size))]
        return EmbeddingLine(self._context, http, message, name, pieces)

    def refusal(self, line_id: str, error: BertserveError) -> Answer:
        """See `Endpoint`."""
        body = error_body(PATH, error, line_id)
        return Answer(status_of(PATH, error), lambda: [body])


@dataclass(frozen=True, slots=True)
class EmbeddingLine:
    """A parsed line."""

    context: AppContext
    http: HttpRequest
    message: EmbeddingsRequest
    model: str | None
    pieces: Sequence[Sequence[str | list[int]]]

    @property
    def texts(self) -> int:
        return sum(map(len, self.pieces))

    async def answer(self, retry: Retry) -> Answer:
        """See `Prepared`. Repeats the line if a new version took over in between: an answer never mixes versions."""
        while True:
            outcomes = await self._once(retry)
            if len({outcome.version for outcome in outcomes}) == 1:
                return Answer(_OK, partial(self._body, outcomes), self.http.ignored)

    async def _once(self, retry: Retry) -> Sequence[Outcome[NDArray[np.float32]]]:
        tasks = [asyncio.ensure_future(retry(partial(self._embed, piece), len(piece))) for piece in self.pieces]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _embed(self, piece: Sequence[str | list[int]]) -> Outcome[NDArray[np.float32]]:
        http = msgspec.structs.replace(self.http, arrival=time.perf_counter())
        return await embed_inputs(self.context, http, self.message, self.model, piece)

    def _body(self, outcomes: Sequence[Outcome[NDArray[np.float32]]]) -> Iterable[bytes]:
        """The body in pieces, each made after the previous one has been written."""
        yield b'{"object":"list","data":['
        first = 0
        for outcome in outcomes:
            rows = embeddings_of(outcome, self.message, first)
            first += len(rows)
            yield (b"," if first > len(rows) else b"") + orjson.dumps(rows, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield b"]," + orjson.dumps({"model": outcomes[0].model, "usage": usage_of(outcomes)})[1:]
