"""The tasks in the shapes of Hugging Face's inference API: `/classify`, `/answer`, `/tag`, `/fill-mask`.

A request is `{"inputs": ..., "parameters": {...}}`. One input is answered by its own result, a list of
inputs by a list of results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from serving.http.apis.huggingface_messages import AnswerRequest, ClassifyRequest, FillMaskRequest, TagRequest
from serving.http.exchange import HttpReply, JsonDecoder, outcome_head
from serving.http.routes import Router
from serving.records import (
    AnswerOptions,
    AnswerSpan,
    ClassifyOptions,
    Entity,
    FilledMask,
    FillMaskOptions,
    LabelScore,
    TagOptions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.api import Api
    from serving.http.exchange import HttpRequest
    from serving.records import A, Outcome, TaskOptions, TextInput

router = Router("Tasks")

_CLASSIFY, _ANSWER = JsonDecoder(ClassifyRequest), JsonDecoder(AnswerRequest)
_TAG, _FILL_MASK = JsonDecoder(TagRequest), JsonDecoder(FillMaskRequest)

_Filled = FilledMask | list[FilledMask]

# Examples for the document.
_CLASSIFIED = {"inputs": "What a card!", "parameters": {"top_k": 1}}
_ANSWERED = {"inputs": {"question": "What is a T4?", "context": "A T4 is a graphics card for servers."}}
_TAGGED = {"inputs": "The T4 was made by Nvidia in Santa Clara."}
_FILLED = {"inputs": "A T4 is a graphics [MASK].", "parameters": {"top_k": 3}}


@router.infer("/classify", "classify", ClassifyRequest, list[list[LabelScore]], _CLASSIFIED)
async def classify(api: Api, http: HttpRequest) -> HttpReply:
    """Classify texts; for each its classes, best first."""
    message = http.json(_CLASSIFY)
    parameters = message.parameters
    options = ClassifyOptions(parameters.function_to_apply, parameters.top_k)
    outcome = await _infer(api, http, _listed(message.inputs), options, truncate=parameters.truncate)
    # This task's API answers one input with a list of one, and its clients take that apart.
    return _reply(outcome.answer, outcome)


@router.infer("/answer", "answer", AnswerRequest, AnswerSpan | list[AnswerSpan | list[AnswerSpan]], _ANSWERED)
async def answer(api: Api, http: HttpRequest) -> HttpReply:
    """Answer a question with a part of a text; a long text is read in overlapping windows."""
    message = http.json(_ANSWER)
    parameters = message.parameters
    options = AnswerOptions(
        parameters.top_k, parameters.max_answer_len, parameters.handle_impossible_answer, parameters.doc_stride
    )
    questions = message.inputs if isinstance(message.inputs, list) else [message.inputs]
    pairs = [(question.question, question.context) for question in questions]
    outcome = await _infer(api, http, pairs, options, truncate=parameters.truncate)
    results = [spans[0] for spans in outcome.answer] if parameters.top_k == 1 else outcome.answer
    return _reply(results if isinstance(message.inputs, list) else results[0], outcome)


@router.infer("/tag", "tag", TagRequest, list[Entity | list[Entity]], _TAGGED)
async def tag(api: Api, http: HttpRequest) -> HttpReply:
    """Find entities in a text."""
    message = http.json(_TAG)
    parameters = message.parameters
    options = TagOptions(parameters.aggregation_strategy, parameters.ignore_labels)
    outcome = await _infer(api, http, _listed(message.inputs), options, truncate=parameters.truncate)
    return _reply(outcome.answer[0] if isinstance(message.inputs, str) else outcome.answer, outcome)


@router.infer(
    "/fill-mask", "fill_mask", FillMaskRequest, list[FilledMask | list[FilledMask | list[FilledMask]]], _FILLED
)
async def fill_mask(api: Api, http: HttpRequest) -> HttpReply:
    """The likeliest tokens for each mask in a text."""
    message = http.json(_FILL_MASK)
    parameters = message.parameters
    options = FillMaskOptions(parameters.top_k)
    outcome = await _infer(api, http, _listed(message.inputs), options, truncate=parameters.truncate)
    results = [masks[0] if len(masks) == 1 else masks for masks in outcome.answer]
    return _reply(results[0] if isinstance(message.inputs, str) else results, outcome)


async def _infer(
    api: Api, http: HttpRequest, inputs: Sequence[TextInput], options: TaskOptions[A], *, truncate: bool | None
) -> Outcome[A]:
    most, model = api.settings.max_client_batch_size, http.parameters.get("model")
    return await api.pipeline.infer(api.request(http, inputs, options, max_inputs=most, model=model, truncate=truncate))


def _listed(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def _reply(result: Any, outcome: Outcome[Any]) -> HttpReply:  # noqa: ANN401  whatever the route documents
    return HttpReply(msgspec.json.encode(result), head=outcome_head(outcome))
