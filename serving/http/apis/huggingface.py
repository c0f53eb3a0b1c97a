"""The tasks in the format of Hugging Face's inference API: `/classify`, `/answer`, `/tag`, `/fill-mask`.

A request is `{"inputs": ..., "parameters": {...}}`. One input returns its own result; a list of inputs returns a list
of results. `/` and `/models/{model}` answer by the model's task, for clients that know only a server's address. So do
SageMaker's `/invocations` and Vertex AI's `/vertex`.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from bertserve.serving.errors import InvalidRequest, setting_of
from bertserve.serving.http.apis import tei
from bertserve.serving.http.apis.tei_messages import (
    TEI_ERRORS,
    Compared,
    Direction,
    EmbedRequest,
    SimilarityParameters,
    SimilarityRequest,
)
from bertserve.serving.http.decoding import JsonDecoder
from bertserve.serving.http.exchange import HttpReply, outcome_head
from bertserve.serving.http.routes import Docs, Router, all_models
from bertserve.serving.inference.pipeline import check_count, check_not_empty
from bertserve.serving.inference.requests import (
    InferRequest,
    InputType,
)
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.base import with_checks
from bertserve.serving.tasks.classify import ClassifyOptions, LabelScore
from bertserve.serving.tasks.windows import LongScored, Options
from bertserve.serving.tasks.zero_shot import ZeroShotOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.http.app_context import AppContext, Endpoint
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.inference.requests import Outcome
    from bertserve.serving.records import TextInput
    from bertserve.serving.tasks.base import A, Check, Route, Task, TaskOptions


class FeatureParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Embedding options.

    Attributes:
        normalize: Scale vectors to length 1; null: as the model's folder says.
        truncate: Truncate long inputs; null: the server's default.
        truncation_direction: End at which inputs are cut; null: the model's own.
        prompt_name: Name of the model's prompt to prepend to each text.
        input_type: Purpose of the texts, which selects a prompt instead of its name.
        dimensions: Number of leading components to keep.
        outputs: Return several embeddings of each text, as `/embed` does; null: the dense vector alone.
    """

    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: str | None = None
    input_type: InputType | None = None
    dimensions: int | None = None
    outputs: list[str] | None = None


class FeatureRequest(FeatureParameters, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts to embed, or sentences to compare. Fields beside `inputs` take precedence over `parameters`.

    Attributes:
        inputs: One input or a list of inputs; or a sentence and the sentences to compare it with.
        encoding_format: Vectors are lists of numbers here.
        parameters: The same fields, in the place where other tasks have them.
        options: Not used.
    """

    inputs: str | list[str | list[int] | int] | Compared
    encoding_format: Literal["float"] | None = None
    parameters: FeatureParameters = FeatureParameters()
    options: Options | None = None


class TextPair(msgspec.Struct, forbid_unknown_fields=True):
    """A text, and an optional second text of a pair."""

    text: str
    text_pair: str | None = None


class ClassifyParameters(LongScored, frozen=True, forbid_unknown_fields=True):
    """Classification options.

    Attributes:
        function_to_apply: Function from logits to scores; null: the model's own.
        top_k: Number of best classes to return.
        truncate: Truncate long inputs; null: the server's default.
        candidate_labels: Labels for zero-shot classification, as a list or separated by commas. Requires a model for
            natural language inference.
        hypothesis_template: A sentence with `{}` in place of a label of `candidate_labels`, as in `str.format`. It
            is never truncated.
        multi_label: Score each of `candidate_labels` independently; otherwise their scores add up to 1.
        long: `window` reads long texts in windows, by `window_tokens`, `window_overlap` and `window_scores`.
    """

    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    top_k: int | None = None
    truncate: bool | None = None
    candidate_labels: str | list[str] | None = None
    hypothesis_template: str = "This example is {}."
    multi_label: bool = False


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to classify, or pairs of texts."""

    inputs: str | TextPair | list[str | TextPair]
    parameters: ClassifyParameters = ClassifyParameters()
    options: Options | None = None


class VertexRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Requests that succeed or fail together.

    Attributes:
        instances: The requests, each as `/` takes it.
        parameters: Default `parameters` of the instances. Requests for rerankers and token vectors have none; for
            these, default fields.
    """

    instances: list[dict[str, Any]]
    parameters: dict[str, Any] | None = None


class VertexReply(msgspec.Struct):
    """The reply of `/` for each instance."""

    predictions: list[Any]


router = Router("Tasks")
any_task = Router("Tasks", replace(TEI_ERRORS, model_named="in the path: POST /models/NAME"))
"""The routes that answer by the model's task. Their clients read errors of text-embeddings-inference."""

_AT_ONCE = 1024
"""Results that are encoded at once."""

_CLASSIFY, _FEATURES, _VERTEX = JsonDecoder(ClassifyRequest), JsonDecoder(FeatureRequest), JsonDecoder(VertexRequest)


@router.infer("/classify", "classify", ClassifyRequest, list[list[LabelScore]], TASKS["classify"].example)
async def classify(context: AppContext, http: HttpRequest) -> HttpReply:
    """Classify texts, best class first."""
    return await _classify(context, http, empty=True)


async def _classify(context: AppContext, http: HttpRequest, *, empty: bool) -> HttpReply:
    message = await http.json(_CLASSIFY, context.large_body_lock)
    parameters = message.parameters
    listed = message.inputs if isinstance(message.inputs, list) else [message.inputs]
    inputs: list[TextInput] = [_text(value) for value in listed]
    if not empty or parameters.candidate_labels is not None:
        check_not_empty(inputs)  # as the pipeline of `candidate_labels` does
    if parameters.candidate_labels is not None:
        if parameters.windows is not None:
            raise InvalidRequest("`candidate_labels` cannot be combined with `long`; leave one out")
        return await _classify_by(context, http, inputs, parameters, alone=not isinstance(message.inputs, list))
    options = ClassifyOptions(parameters.function_to_apply, parameters.top_k, parameters.windows)
    outcome = await _run_task(context, http, inputs, options, truncate=parameters.truncate)
    # This task's API returns a list of one for one input, and its clients unwrap it.
    return await _reply(context, outcome.answer, outcome)


async def _classify_by(
    context: AppContext, http: HttpRequest, inputs: Sequence[TextInput], parameters: ClassifyParameters, *, alone: bool
) -> HttpReply:
    """Zero-shot classification. A single text that is not in a list returns a list of its labels."""
    labels = parameters.candidate_labels or []
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    count, most = len(inputs) * len(labels), context.settings.max_client_batch_size
    if count > most:
        raise InvalidRequest(
            f"{len(inputs)} texts with {len(labels)} `candidate_labels` each are {count} inputs;"
            f" the maximum is {most}{setting_of(most)}"
        )
    options = ZeroShotOptions(tuple(labels), parameters.hypothesis_template, parameters.multi_label)
    outcome = await _run_task(context, http, inputs, options, truncate=parameters.truncate)
    return await _reply(context, outcome.answer[0] if alone else outcome.answer, outcome)


def _own(route: Route, decoder: JsonDecoder[Any], *, unnamed: bool) -> Endpoint:
    """The endpoint of a task's own route, or of a route without a task (`unnamed`)."""

    async def answer(context: AppContext, http: HttpRequest) -> HttpReply:
        message = await http.json(decoder, context.large_body_lock)
        inputs, options, truncate = route.read(message, unnamed)
        outcome = await _run_task(context, http, inputs, options, truncate=truncate)
        return await _reply(context, route.write(message, outcome.answer), outcome)

    answer.__doc__ = route.summary
    return answer


_RUN: dict[str, Endpoint] = {}
"""The endpoints of the routes that name no task, by task."""


def _add(task: Task[Any, Any]) -> None:
    if (route := task.route) is not None:
        decoder = JsonDecoder(route.takes)
        add = router.infer(task.path, task.name, route.takes, route.gives, task.example)
        add(_own(route, decoder, unnamed=False))
        _RUN[task.name] = _own(route, decoder, unnamed=True)


for _task in TASKS.values():
    _add(_task)


async def _features(context: AppContext, http: HttpRequest) -> HttpReply:
    """Embeds texts, or compares sentences with one by cosine similarity."""
    message = await http.json(_FEATURES, context.large_body_lock)
    inputs, given = message.inputs, message.parameters
    beside = {name: getattr(message, name) for name in given.__struct_fields__}
    given = msgspec.structs.replace(given, **{name: value for name, value in beside.items() if value is not None})
    if isinstance(inputs, Compared):
        parameters = SimilarityParameters(
            given.truncate, given.truncation_direction, given.prompt_name, given.input_type
        )
        return await tei.compare(context, http, SimilarityRequest(inputs, parameters))
    texts = EmbedRequest(
        inputs,
        given.truncate,
        given.truncation_direction,
        given.prompt_name,
        given.input_type,
        given.normalize,
        given.dimensions,
        outputs=given.outputs,
    )
    return await tei.embed_texts(context, http, texts)


_RUN |= {
    "embed": _features,
    "embed_tokens": tei.embed_all,
    "embed_sparse": tei.embed_sparse,
    "classify": lambda context, http: _classify(context, http, empty=False),
    "rerank": tei.rerank,
}


def _only_model(context: AppContext) -> Sequence[str]:
    names = all_models(context)
    return names if len(names) == 1 else []


def _example(context: AppContext) -> object:
    return context.repository.models[0].task.example


def _instances(context: AppContext) -> object:
    return {"instances": [_example(context)]}


_run_docs = Docs(dict[str, Any], Any, _example, _only_model)


@any_task.post("/", _run_docs, summary="Run the only model's task.", infers=True)
@any_task.post("/invocations", _run_docs, summary="Run the only model's task (SageMaker).", infers=True)
@any_task.post("/models/{model}", Docs(dict[str, Any], Any, _example, all_models), infers=True)
async def run(context: AppContext, http: HttpRequest) -> HttpReply:
    """Run a model's task."""
    model = context.repository.find(http.parameters.get("model"))
    http.parameters = {"model": model.name}
    return await _RUN[model.manifest.task](context, http)


@any_task.post("/vertex", Docs(VertexRequest, VertexReply, _instances, _only_model))
async def vertex(context: AppContext, http: HttpRequest) -> HttpReply:
    """Run the only model's task on several requests (Vertex AI)."""
    message = await http.json(_VERTEX, context.large_body_lock)
    model = context.repository.find(None)
    check_count(len(message.instances), context.settings.max_client_batch_size, "`instances`")
    endpoint = _RUN[model.manifest.task]

    async def one(index: int, fields: Mapping[str, object]) -> bytes:
        body = msgspec.json.encode(fields)
        instance = msgspec.structs.replace(http, body=body, parameters={"model": model.name}, ignored=None)
        try:
            reply = await endpoint(context, instance)
        except InvalidRequest as error:
            named = copy.copy(error)
            named.message = f"instance {index}: {error.message}"
            raise named from None
        if instance.ignored is not None:
            http.pass_over(instance.ignored)
        return reply.body

    shared: dict[str, object] = {}
    if message.parameters:
        shared = {"parameters": message.parameters} if model.task.parameters else {**message.parameters}
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(one(index, shared | instance)) for index, instance in enumerate(message.instances)
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return HttpReply(b'{"predictions":[%b]}' % b",".join([task.result() for task in tasks]))


async def _run_task(
    context: AppContext,
    http: HttpRequest,
    inputs: Sequence[TextInput],
    options: TaskOptions[A],
    *,
    truncate: bool | None,
) -> Outcome[A]:
    request = InferRequest(inputs, options, http.parameters.get("model"), truncate=truncate)
    return await context.pipeline.infer(http.stamp(request))


def _text(value: str | TextPair) -> TextInput:
    if isinstance(value, str):
        return value
    return value.text if value.text_pair is None else (value.text, value.text_pair)


async def _reply(context: AppContext, result: Any, outcome: Outcome[Any]) -> HttpReply:  # noqa: ANN401  as documented
    body = await context.pipeline.write(outcome, outcome.tokens, partial(_json, result))
    return HttpReply(body, head=outcome_head(outcome))


def _json(result: Any, check: Check) -> bytes:  # noqa: ANN401  as documented
    """The result as JSON, encoded in pieces, because encoding holds the GIL."""
    check()
    if not isinstance(result, list) or not result:
        return msgspec.json.encode(result)
    if isinstance(result[0], list):
        return b"[%b]" % b",".join([_json(one, check) for one in result])
    pieces = [result[at : at + _AT_ONCE] for at in range(0, len(result), _AT_ONCE)]
    return b"[%b]" % b",".join([msgspec.json.encode(piece)[1:-1] for piece in with_checks(pieces, check, 1)])
