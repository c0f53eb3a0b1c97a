"""OpenAI's API for embeddings: `/v1/embeddings`, and `/v1/models`."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

from serving.errors import ForeignTokenIds
from serving.http.apis.openai_messages import EmbeddingsReply, EmbeddingsRequest, ModelCard, ModelList
from serving.http.apis.tei import text_inputs
from serving.http.exchange import HttpReply, JsonDecoder, json_reply, outcome_head
from serving.http.routes import Docs, Router, all_models, of_task
from serving.records import EmbedOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from serving.http.api import Api
    from serving.http.exchange import HttpRequest
    from serving.inference.served_models import ServedModel
    from serving.records import Outcome

router = Router("OpenAI")

_EMBEDDINGS = JsonDecoder(EmbeddingsRequest)
_embed_models = of_task("embed")


def _example(api: Api) -> dict[str, str]:
    return {"model": _embed_models(api)[0], "input": "What is a T4?"}


@router.get("/v1/models", Docs(gives=ModelList))
async def models(api: Api, _: HttpRequest) -> HttpReply:
    """The models of this server."""
    repository = api.repository
    served = [_card(model) for model in repository.models if repository.serves(model.name)]
    return json_reply(ModelList("list", served))


@router.get("/v1/models/{model}", Docs(gives=ModelCard, models=all_models))
async def model(api: Api, http: HttpRequest) -> HttpReply:
    """One of them."""
    return json_reply(_card(api.repository.find(http.parameters["model"])))


@router.hot("/v1/embeddings", Docs(EmbeddingsRequest, EmbeddingsReply, _example, _embed_models))
async def embeddings(api: Api, http: HttpRequest) -> HttpReply:
    """Embed texts, in OpenAI's shape."""
    message = await http.json(_EMBEDDINGS, api.turn)
    name = api.repository.named_or_only(message.model, "embed")
    inputs = [text if isinstance(text, str) else _own_ids(api, name, text) for text in text_inputs(message.input)]
    outcome = await api.pipeline.infer(
        api.request(
            http,
            inputs,
            EmbedOptions(dimensions=message.dimensions),
            max_inputs=api.settings.max_openai_batch_size,
            model=name,
            prompt_name=message.prompt_name,
            input_type=message.input_type,
        )
    )
    body = orjson.dumps(_reply(outcome, message.encoding_format), option=orjson.OPT_SERIALIZE_NUMPY)
    return HttpReply(body, head=outcome_head(outcome))


def _own_ids(api: Api, name: str | None, ids: list[int]) -> list[int]:
    """Token ids as the model reads them.

    Clients of OpenAI's own server send its tokenizer's ids, which would be embedded as other words than were meant.

    Raises:
        ForeignTokenIds: They may be such.
    """
    tokenizer = api.repository.find(name, task="embed").tokenizer
    if api.settings.accept_bare_ids:
        return tokenizer.framed(ids)
    if ids and not tokenizer.is_framed(ids):
        raise ForeignTokenIds(
            "`input` holds token ids that do not stand between the special tokens of this model; they may be of"
            " another tokenizer. Send strings (LangChain: OpenAIEmbeddings(check_embedding_ctx_length=False));"
            " the server takes ids without special tokens with --accept-bare-ids"
        )
    return ids


def _card(model: ServedModel) -> ModelCard:
    manifest = model.manifest
    created = round(datetime.fromisoformat(manifest.created).timestamp())
    return ModelCard(model.name, "model", created, manifest.source.name, manifest.prompts, manifest.default_prompt)


def _reply(outcome: Outcome[NDArray[np.float32]], encoding: str) -> dict[str, Any]:
    rows = [base64.b64encode(row.tobytes()).decode() if encoding == "base64" else row for row in outcome.answer]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
        "model": outcome.model,
        "usage": {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens},
    }
