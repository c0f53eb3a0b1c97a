"""The text API of text-embeddings-inference: `/embed`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec
import orjson

from serving.errors import InvalidRequest
from serving.records import EmbedOptions, InferRequest
from serving.transport.http.decoding import JsonDecoder
from serving.transport.http.exchange import HttpReply, Operation, outcome_headers

if TYPE_CHECKING:
    from serving.pipeline import Pipeline
    from serving.settings import Settings
    from serving.transport.http.exchange import HttpRequest


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


def operations(pipeline: Pipeline, settings: Settings) -> list[Operation]:
    """The routes of this protocol."""
    decoder = JsonDecoder(EmbedRequest)

    async def embed(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = decoder.decode(http.body)
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
            )
        )
        body = orjson.dumps(outcome.vectors, option=orjson.OPT_SERIALIZE_NUMPY)
        return HttpReply(body, headers=outcome_headers(outcome))

    return [
        Operation(
            "POST",
            "/embed",
            embed,
            "Embed texts; one vector an input.",
            "TEI",
            EmbedRequest,
            list[list[float]],
            {"inputs": ["What is a T4?", "A graphics card."]},
        )
    ]
