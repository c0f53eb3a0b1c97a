"""The tasks in the shapes of Hugging Face's inference API: `/classify`, `/answer`, `/tag`, `/fill-mask`.

A request is `{"inputs": ..., "parameters": {...}}`. One input is answered by its own result, a list of
inputs by a list of results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from serving.http.decoding import JsonDecoder
from serving.http.exchange import HttpReply, outcome_head
from serving.http.naming import Named
from serving.records import (
    AnswerOptions,
    AnswerSpan,
    ClassifyOptions,
    Entity,
    FilledMask,
    FillMaskOptions,
    InferRequest,
    LabelScore,
    TagOptions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.exchange import HttpRequest, Operation
    from serving.inference.pipeline import Pipeline
    from serving.inference.served_models import Repository
    from serving.records import A, Outcome, TaskOptions, TextInput
    from serving.settings import Settings

TAG = "Tasks"


class ClassifyParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to classify.

    Attributes:
        function_to_apply: What makes scores of logits; null means the model's own.
        top_k: Keep only the best so many classes.
        truncate: Cut inputs that are too long; null means the server's default.
    """

    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    top_k: int | None = None
    truncate: bool | None = None


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to classify."""

    inputs: str | list[str]
    parameters: ClassifyParameters = ClassifyParameters()


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """A question and the text that should hold its answer, of any length."""

    question: str
    context: str


class AnswerParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to answer.

    Attributes:
        top_k: Answers wanted; more than one are answered as a list.
        max_answer_len: Tokens of the longest answer.
        handle_impossible_answer: Answer nothing where that is likelier than every answer.
        doc_stride: Tokens that neighbouring windows of a long context share; half a window at most.
        truncate: Cut a question that is too long; null means the server's default. A context is never cut.
    """

    top_k: int = 1
    max_answer_len: int = 30
    handle_impossible_answer: bool = False
    doc_stride: int = 128
    truncate: bool | None = None


class AnswerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Questions to answer."""

    inputs: Question | list[Question]
    parameters: AnswerParameters = AnswerParameters()


class TagParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to tag.

    Attributes:
        aggregation_strategy: `first`: a word's first token decides its tag; `simple`: each token has its own.
        ignore_labels: Tags that are no entities.
        truncate: Cut inputs that are too long; null means the server's default.
    """

    aggregation_strategy: Literal["first", "simple"] = "first"
    ignore_labels: tuple[str, ...] = ("O",)
    truncate: bool | None = None


class TagRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to find entities in."""

    inputs: str | list[str]
    parameters: TagParameters = TagParameters()


class FillMaskParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to fill masks.

    Attributes:
        top_k: Tokens wanted for each mask.
        truncate: Cut inputs that are too long; null means the server's default.
    """

    top_k: int = 5
    truncate: bool | None = None


class FillMaskRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts with one or more masks, written `[MASK]` or as the model's own token."""

    inputs: str | list[str]
    parameters: FillMaskParameters = FillMaskParameters()


def operations(pipeline: Pipeline, repository: Repository, settings: Settings) -> list[Operation]:
    """The routes of these tasks; the documentation shows those that a model here answers."""

    async def infer(
        http: HttpRequest, inputs: Sequence[TextInput], options: TaskOptions[A], *, truncate: bool | None
    ) -> Outcome[A]:
        return await pipeline.infer(
            InferRequest(
                inputs=inputs,
                options=options,
                arrival=http.arrival,
                request_id=http.request_id,
                max_inputs=settings.max_client_batch_size,
                truncate=truncate,
                model=http.parameters.get("model"),
                timeout_ms=http.timeout_ms(),
                priority=http.priority(),
                trace=http.trace,
            )
        )

    classify_decoder = JsonDecoder(ClassifyRequest)
    answer_decoder = JsonDecoder(AnswerRequest)
    tag_decoder = JsonDecoder(TagRequest)
    fill_mask_decoder = JsonDecoder(FillMaskRequest)

    async def classify(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = classify_decoder.decode(http.body)
        given = message.parameters
        options = ClassifyOptions(given.function_to_apply, given.top_k)
        outcome = await infer(http, _listed(message.inputs), options, truncate=given.truncate)
        # This task's API answers one input with a list of one, and its clients take that apart.
        return _reply(outcome.answer, outcome)

    async def answer(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = answer_decoder.decode(http.body)
        given = message.parameters
        options = AnswerOptions(given.top_k, given.max_answer_len, given.handle_impossible_answer, given.doc_stride)
        questions = message.inputs if isinstance(message.inputs, list) else [message.inputs]
        pairs = [(question.question, question.context) for question in questions]
        outcome = await infer(http, pairs, options, truncate=given.truncate)
        results = [spans[0] for spans in outcome.answer] if given.top_k == 1 else outcome.answer
        return _reply(results if isinstance(message.inputs, list) else results[0], outcome)

    async def tag(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = tag_decoder.decode(http.body)
        given = message.parameters
        options = TagOptions(given.aggregation_strategy, given.ignore_labels)
        outcome = await infer(http, _listed(message.inputs), options, truncate=given.truncate)
        return _reply(outcome.answer[0] if isinstance(message.inputs, str) else outcome.answer, outcome)

    async def fill_mask(http: HttpRequest) -> HttpReply:
        http.require_json()
        message = fill_mask_decoder.decode(http.body)
        given = message.parameters
        options = FillMaskOptions(given.top_k)
        outcome = await infer(http, _listed(message.inputs), options, truncate=given.truncate)
        results = [masks[0] if len(masks) == 1 else masks for masks in outcome.answer]
        return _reply(results[0] if isinstance(message.inputs, str) else results, outcome)

    named = Named(repository, TAG)
    return [
        *named.routes(
            "classify",
            "/classify",
            classify,
            "Classify texts; for each its classes, best first.",
            ClassifyRequest,
            list[list[LabelScore]],
            {"inputs": "What a card!", "parameters": {"top_k": 1}},
        ),
        *named.routes(
            "answer",
            "/answer",
            answer,
            "Answer a question with a part of a text; a long text is read in overlapping windows.",
            AnswerRequest,
            AnswerSpan | list[AnswerSpan | list[AnswerSpan]],
            {"inputs": {"question": "What is a T4?", "context": "A T4 is a graphics card for servers."}},
        ),
        *named.routes(
            "tag",
            "/tag",
            tag,
            "Find entities in a text.",
            TagRequest,
            list[Entity | list[Entity]],
            {"inputs": "The T4 was made by Nvidia in Santa Clara."},
        ),
        *named.routes(
            "fill_mask",
            "/fill-mask",
            fill_mask,
            "The likeliest tokens for each mask in a text.",
            FillMaskRequest,
            list[FilledMask | list[FilledMask | list[FilledMask]]],
            {"inputs": "A T4 is a graphics [MASK].", "parameters": {"top_k": 3}},
        ),
    ]


def _listed(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def _reply(result: Any, outcome: Outcome[Any]) -> HttpReply:  # noqa: ANN401  whatever the route documents
    return HttpReply(msgspec.json.encode(result), head=outcome_head(outcome))
