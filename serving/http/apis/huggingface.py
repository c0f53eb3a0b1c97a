"""The tasks in the shapes of Hugging Face's inference API: `/classify`, `/answer`, `/tag`, `/fill-mask`.

A request is `{"inputs": ..., "parameters": {...}}`. One input is answered by its own result, a list of
inputs by a list of results. `/` and `/models/{model}` answer as the model's task does, for clients that know a
server by its address alone; so do SageMaker's `/invocations` and Vertex AI's `/vertex`.
"""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any

import msgspec

from serving.errors import InvalidRequest, setting_of
from serving.http.apis import tei
from serving.http.apis.huggingface_messages import (
    AnswerRequest,
    ClassifyParameters,
    ClassifyRequest,
    FeatureRequest,
    FillMaskRequest,
    TagRequest,
    TextPair,
    VertexReply,
    VertexRequest,
)
from serving.http.apis.tei_messages import (
    Compared,
    EmbedRequest,
    SimilarityParameters,
    SimilarityRequest,
)
from serving.http.exchange import HttpReply, JsonDecoder, outcome_head
from serving.http.routes import Docs, Router, all_models
from serving.inference.pipeline import check_not_empty, empty_input
from serving.records import (
    AnswerOptions,
    AnswerSpan,
    ClassifyOptions,
    FilledMask,
    FillMaskOptions,
    LabelScore,
    TagOptions,
    Windows,
    ZeroShotOptions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serving.http.api import Api, Endpoint
    from serving.http.exchange import HttpRequest
    from serving.models.manifest import Task
    from serving.records import A, Aggregation, Outcome, TaskOptions, TextInput

router = Router("Tasks")

_CLASSIFY, _ANSWER = JsonDecoder(ClassifyRequest), JsonDecoder(AnswerRequest)
_TAG, _FILL_MASK = JsonDecoder(TagRequest), JsonDecoder(FillMaskRequest)
_FEATURES, _VERTEX = JsonDecoder(FeatureRequest), JsonDecoder(VertexRequest)

_Filled = FilledMask | list[FilledMask]
_Tagged = dict[str, Any]
"""`Entity`, or `TaggedToken` where tokens are not grouped: a union of two objects has no schema of its own."""

# Examples for the document.
_CLASSIFIED = {"inputs": "What a card!", "parameters": {"top_k": 1}}
_ANSWERED = {"inputs": {"question": "What is a T4?", "context": "A T4 is a graphics card for servers."}}
_TAGGED = {"inputs": "The T4 was made by Nvidia in Santa Clara."}
_FILLED = {"inputs": "A T4 is a graphics [MASK].", "parameters": {"top_k": 3}}


@router.infer("/classify", "classify", ClassifyRequest, list[list[LabelScore]], _CLASSIFIED)
async def classify(api: Api, http: HttpRequest) -> HttpReply:
    """Classify texts; for each its classes, best first."""
    return await _classify(api, http, empty=True)


async def _classify(api: Api, http: HttpRequest, *, empty: bool) -> HttpReply:
    message = await http.json(_CLASSIFY, api.turn)
    parameters = message.parameters
    listed = message.inputs if isinstance(message.inputs, list) else [message.inputs]
    inputs: list[TextInput] = [_text(value) for value in listed]
    if not empty:
        check_not_empty(inputs)
    if parameters.candidate_labels is not None:
        if parameters.windows is not None:
            raise InvalidRequest("`candidate_labels` are not scored in windows: leave out `long`")
        return await _classify_by(api, http, inputs, parameters, alone=not isinstance(message.inputs, list))
    options = ClassifyOptions(parameters.function_to_apply, parameters.top_k, parameters.windows)
    outcome = await _infer(api, http, inputs, options, truncate=parameters.truncate)
    # This task's API answers one input with a list of one, and its clients take that apart.
    return _reply(outcome.answer, outcome)


async def _classify_by(
    api: Api, http: HttpRequest, inputs: Sequence[TextInput], parameters: ClassifyParameters, *, alone: bool
) -> HttpReply:
    """Zero-shot classification; a text alone is answered by a list of its labels."""
    labels = parameters.candidate_labels or []
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    count, most = len(inputs) * len(labels), api.settings.max_client_batch_size
    if count > most:
        raise InvalidRequest(
            f"{len(inputs)} texts with {len(labels)} `candidate_labels` each are {count} inputs;"
            f" at most {most} are taken{setting_of(most)}"
        )
    options = ZeroShotOptions(tuple(labels), parameters.hypothesis_template, parameters.multi_label)
    outcome = await _infer(api, http, inputs, options, truncate=parameters.truncate)
    return _reply(outcome.answer[0] if alone else outcome.answer, outcome)


@router.infer("/answer", "answer", AnswerRequest, AnswerSpan | list[AnswerSpan | list[AnswerSpan]], _ANSWERED)
async def answer(api: Api, http: HttpRequest) -> HttpReply:
    """Answer a question with a part of a text; a long text is read in overlapping windows."""
    message = await http.json(_ANSWER, api.turn)
    parameters = message.parameters
    options = AnswerOptions(
        parameters.top_k,
        parameters.max_answer_len,
        parameters.handle_impossible_answer,
        parameters.doc_stride,
        parameters.max_seq_len,
        parameters.align_to_words,
    )
    questions = message.inputs if isinstance(message.inputs, list) else [message.inputs]
    for index, question in enumerate(questions):
        if not (question.question and question.context):
            field = "context" if question.question else "question"
            raise empty_input(field, index, len(questions))
    pairs = [(question.question, question.context) for question in questions]
    outcome = await _infer(api, http, pairs, options, truncate=parameters.truncate)
    results = [spans[0] for spans in outcome.answer] if parameters.top_k == 1 else outcome.answer
    return _reply(results if isinstance(message.inputs, list) else results[0], outcome)


@router.infer("/tag", "tag", TagRequest, list[_Tagged | list[_Tagged]], _TAGGED)
async def tag(api: Api, http: HttpRequest) -> HttpReply:
    """Find entities in a text."""
    return await _tag(api, http, "first")


async def _tag(api: Api, http: HttpRequest, usual: Aggregation) -> HttpReply:
    message = await http.json(_TAG, api.turn)
    parameters = message.parameters
    by_window = parameters.stride is not None
    if by_window and parameters.windows is not None:
        raise InvalidRequest("`stride` and `long` both choose windows: send one of them")
    options = TagOptions(
        parameters.aggregation_strategy or usual,
        parameters.ignore_labels,
        Windows(overlap_tokens=parameters.stride) if by_window else parameters.windows,
        by_window,
    )
    outcome = await _infer(api, http, _listed(message.inputs), options, truncate=parameters.truncate)
    return _reply(outcome.answer[0] if isinstance(message.inputs, str) else outcome.answer, outcome)


@router.infer(
    "/fill-mask", "fill_mask", FillMaskRequest, list[FilledMask | list[FilledMask | list[FilledMask]]], _FILLED
)
async def fill_mask(api: Api, http: HttpRequest) -> HttpReply:
    """The likeliest tokens for each mask in a text."""
    message = await http.json(_FILL_MASK, api.turn)
    parameters = message.parameters
    targets = [parameters.targets] if isinstance(parameters.targets, str) else parameters.targets
    options = FillMaskOptions(parameters.top_k, None if targets is None else tuple(targets))
    outcome = await _infer(api, http, _listed(message.inputs), options, truncate=parameters.truncate)
    results = [masks[0] if len(masks) == 1 else masks for masks in outcome.answer]
    return _reply(results[0] if isinstance(message.inputs, str) else results, outcome)


async def _features(api: Api, http: HttpRequest) -> HttpReply:
    """Vectors of texts, or cosines of sentences with one."""
    message = await http.json(_FEATURES, api.turn)
    inputs, given = message.inputs, message.parameters
    beside = {name: getattr(message, name) for name in given.__struct_fields__}
    given = msgspec.structs.replace(given, **{name: value for name, value in beside.items() if value is not None})
    if isinstance(inputs, Compared):
        parameters = SimilarityParameters(
            given.truncate, given.truncation_direction, given.prompt_name, given.input_type
        )
        return await tei.compare(api, http, SimilarityRequest(inputs, parameters))
    texts = EmbedRequest(
        inputs,
        given.truncate,
        given.truncation_direction,
        given.prompt_name,
        given.input_type,
        given.normalize,
        given.dimensions,
    )
    return await tei.embed_texts(api, http, texts)


_RUN: Mapping[Task, tuple[Endpoint, object]] = {
    "embed": (_features, {"inputs": ["What is a T4?", "A graphics card."]}),
    "embed_tokens": (tei.embed_all, {"inputs": "What is a T4?"}),
    "classify": (lambda api, http: _classify(api, http, empty=False), _CLASSIFIED),
    "rerank": (tei.rerank, {"query": "What is a T4?", "texts": ["A teapot.", "A graphics card."]}),
    "answer": (answer, _ANSWERED),
    "tag": (lambda api, http: _tag(api, http, "simple"), _TAGGED),
    "fill_mask": (fill_mask, _FILLED),
}
"""What answers on the routes that name no task, and an example for the document."""

_WITHOUT_PARAMETERS = frozenset({"embed_tokens", "rerank"})
"""Tasks whose requests have all fields side by side."""


def _only_model(api: Api) -> Sequence[str]:
    names = all_models(api)
    return names if len(names) == 1 else []


def _example(api: Api) -> object:
    return _RUN[api.repository.models[0].manifest.task][1]


def _instances(api: Api) -> object:
    return {"instances": [_example(api)]}


_run_docs = Docs(dict[str, Any], Any, _example, _only_model)


@router.hot("/", _run_docs, summary="Answer as the only model's task does.")
@router.hot("/invocations", _run_docs, summary="Answer as the only model's task does, for SageMaker.")
@router.hot("/models/{model}", Docs(dict[str, Any], Any, _example, all_models))
async def run(api: Api, http: HttpRequest) -> HttpReply:
    """Answer as a model's task does."""
    model = api.repository.find(http.parameters.get("model"))
    http.parameters = {"model": model.name}
    return await _RUN[model.manifest.task][0](api, http)


@router.post("/vertex", Docs(VertexRequest, VertexReply, _instances, _only_model))
async def vertex(api: Api, http: HttpRequest) -> HttpReply:
    """Answer several requests as the only model's task does, for Vertex AI."""
    message = await http.json(_VERTEX, api.turn)
    model = api.repository.find(None)
    api.tei.check_count(len(message.instances), "instances")
    endpoint, _ = _RUN[model.manifest.task]

    async def one(index: int, fields: Mapping[str, object]) -> bytes:
        body = msgspec.json.encode(fields)
        instance = msgspec.structs.replace(http, body=body, parameters={"model": model.name}, ignored=None)
        try:
            reply = await endpoint(api, instance)
        except InvalidRequest as error:
            named = copy.copy(error)
            named.message = f"instance {index}: {error.message}"
            raise named from None
        if instance.ignored is not None:
            http.pass_over(instance.ignored)
        return reply.body

    shared: dict[str, object] = {}
    if message.parameters:
        beside = model.manifest.task in _WITHOUT_PARAMETERS
        shared = {**message.parameters} if beside else {"parameters": message.parameters}
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(index, shared | instance)) for index, instance in enumerate(message.instances)
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return HttpReply(b'{"predictions":[%b]}' % b",".join([task.result() for task in tasks]))


async def _infer(
    api: Api, http: HttpRequest, inputs: Sequence[TextInput], options: TaskOptions[A], *, truncate: bool | None
) -> Outcome[A]:
    most, model = api.settings.max_client_batch_size, http.parameters.get("model")
    return await api.pipeline.infer(api.request(http, inputs, options, max_inputs=most, model=model, truncate=truncate))


def _text(value: str | TextPair) -> TextInput:
    if isinstance(value, str):
        return value
    return value.text if value.text_pair is None else (value.text, value.text_pair)


def _listed(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def _reply(result: Any, outcome: Outcome[Any]) -> HttpReply:  # noqa: ANN401  whatever the route documents
    return HttpReply(msgspec.json.encode(result), head=outcome_head(outcome))
