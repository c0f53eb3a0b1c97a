"""The task `answer`: extractive question answering, with the scores of Transformers' pipeline.

A context that does not fit beside its question is read in overlapping windows. In each window, start and end get a
probability over the context's tokens and the first token, which stands for no answer. A span's score is the product of
the two. Spans of the same characters, in one window or several, are one answer, and their scores are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest, empty_input, quote
from bertserve.serving.tasks import replies
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Route,
    Task,
    TaskInputs,
    TaskOptions,
    TaskRoute,
    check_top_k,
    each,
    floats,
    go_on,
    pairs_of,
    softmax,
    with_checks,
)
from bertserve.serving.tasks.windows import (
    USUAL_OVERLAP,
    Options,
    by_input,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.records import AlignedText, Array, EncodedText, Row, TextInput, Truncate
    from bertserve.serving.tasks.base import Check, Facts, Tokenizer, Work


class AnswerSpan(msgspec.Struct, frozen=True):
    """A part of a context that answers a question; empty if the context holds no answer.

    Attributes:
        answer: The characters of the context.
        score: Probability that the answer starts and ends there, in its window. It is the sum if the same words are an
            answer several times.
        start: Position of its first character, in Unicode code points.
        end: Position after its last character.
    """

    answer: str
    score: float
    start: int
    end: int


class AnswerOptions(TaskOptions[list[list[AnswerSpan]]], frozen=True):
    """Options whose answer is, for each pair of question and context, the answers with the best first.

    Attributes:
        top_k: Maximum answers. A short context has fewer.
        no_answer: Let "the context holds no answer" compete with the answers.
        overlap_tokens: Tokens that neighboring windows of a long context share; None means half a window, at most 128.
        window_tokens: Tokens of a window, question included; at most the model's limit.
        whole_words: Answers start and end at word boundaries.
    """

    top_k: int = 1
    max_answer_tokens: int = 15
    no_answer: bool = False
    overlap_tokens: int | None = None
    window_tokens: int = 384
    whole_words: bool = True


_FREE_ANSWERS, _MAX_SPANS = 100, 100_000
"""Up to so many answers are sought in any context. For more, the candidate spans of all windows are limited: 100,000
take half a second."""

_MIN_WINDOW = 128

_SPANS_AT_ONCE = 1 << 18
"""Spans of a window that are compared at once: all of a window of 8,192 tokens take a gigabyte."""

_MORE_SPANS, _SPARE_SPANS = 2, 10
"""Candidate spans of tokens in each window: the wanted answers times `_MORE_SPANS`, plus `_SPARE_SPANS`. Several of
them can be the same span of words."""

Span = tuple[int, int]


def check(options: AnswerOptions, manifest: Facts) -> None:
    check_top_k(options.top_k)
    if options.max_answer_tokens < 1:
        raise InvalidRequest(f"an answer must have at least 1 token, not {quote(options.max_answer_tokens)}")
    if options.overlap_tokens is not None and options.overlap_tokens < 0:
        raise InvalidRequest(f"windows must overlap by at least 0 tokens, not {quote(options.overlap_tokens)}")
    if options.window_tokens < (least := min(_MIN_WINDOW, manifest.max_length)):
        raise InvalidRequest(f"a window must have at least {least} tokens, not {quote(options.window_tokens)}")


def sizes_bytes(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], _: AnswerOptions, *, truncate: Truncate
) -> list[int]:
    return tokenizer.windows_sizes_bytes(pairs_of(inputs), truncate=truncate)


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: AnswerOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    length = min(options.window_tokens, tokenizer.max_length)
    overlap = options.overlap_tokens
    if overlap is None:
        overlap = min(length // 2, USUAL_OVERLAP)
    windows = tokenizer.encode_windows(
        pairs_of(inputs), length=length, overlap=overlap, whole_words=options.whole_words, truncate=truncate
    )
    if options.top_k > _FREE_ANSWERS:
        longest = options.max_answer_tokens
        spans = sum([min(_wanted(options), len(one.ids) * min(longest, len(one.ids))) for one in windows])
        if spans > _MAX_SPANS:
            raise InvalidRequest(
                f"`top_k` is {options.top_k}, which compares {spans} spans in {len(windows)} windows; the maximum is"
                f" {_MAX_SPANS}: send at most {_FREE_ANSWERS}, or shorter contexts"
            )
    return windows


def finish(
    context: str, windows: Sequence[AlignedText], rows: Sequence[Row], options: AnswerOptions, check: Check = go_on
) -> list[AnswerSpan]:
    """The answers to one question, best first, from the graph's `start_logits` and `end_logits`.

    Args:
        context: The text that holds the answers.
        windows: The windows of the context; at least one.
        rows: `start_logits` and `end_logits` of each window, float32 [tokens or more].
        options: Limits of the answers.
        check: Called between windows.

    Returns:
        At least one answer. It is empty if there is nothing to choose from.
    """
    answers: dict[str, AnswerSpan] = {}
    null = 1.0
    for window, row in with_checks(zip(windows, rows, strict=True), check, 1):
        starts, ends = (_probabilities(window, part) for part in row)
        null = min(null, float(starts[0] * ends[0]))
        starts[0] = ends[0] = 0.0
        for (start, end), score in _best_spans(window, starts, ends, options, check):
            text = context[start:end]
            known = answers.get(text.lower())
            if known is None:
                answers[text.lower()] = AnswerSpan(text, score, start, end)
            else:
                answers[text.lower()] = AnswerSpan(known.answer, known.score + score, known.start, known.end)
    found = list(answers.values())
    if options.no_answer:
        found.append(AnswerSpan("", null, 0, 0))
    found.sort(key=lambda span: -span.score)
    return found[: options.top_k] or [AnswerSpan("", 0.0, 0, 0)]


def _probabilities(window: AlignedText, logits: Array) -> NDArray[np.float64]:
    """Softmax over the first token of a window and the tokens of its context; 0 for other tokens."""
    allowed = window.words >= 0
    allowed[0] = True
    return softmax(np.where(allowed, logits[: len(allowed)].astype(np.float64), -np.inf))


def _best_spans(
    window: AlignedText, starts: NDArray[np.float64], ends: NDArray[np.float64], options: AnswerOptions, check: Check
) -> Iterator[tuple[Span, float]]:
    """The most likely spans of one window, in characters, each with its score, best first."""
    length = min(options.max_answer_tokens, len(ends))
    further = np.lib.stride_tricks.sliding_window_view(np.append(ends, np.zeros(length - 1)), length)
    wanted = _wanted(options)
    step = max(1, _SPANS_AT_ONCE // length)
    found = [
        _largest((starts[at : at + step, None] * further[at : at + step]).ravel(), wanted, at * length)
        for at in with_checks(range(0, len(starts), step), check, 1)
    ]
    indices, scores = (np.concatenate(parts) for parts in zip(*found, strict=True))
    best, _ = _largest(scores, wanted) if len(found) > 1 else (np.arange(len(scores)), scores)
    for place in best[np.argsort(-scores[best], kind="stable")].tolist():
        if scores[place] > 0:
            first, more = divmod(int(indices[place]), length)
            yield (int(window.spans[first, 0]), int(window.spans[first + more, 1])), float(scores[place])


def _largest(scores: NDArray[np.float64], wanted: int, first: int = 0) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """The indices of the largest scores, from `first`, in no order, and the scores."""
    best = np.argpartition(-scores, wanted)[:wanted] if wanted < len(scores) else np.arange(len(scores))
    return best + first, scores[best]


def _wanted(options: AnswerOptions) -> int:
    """Maximum spans of a window to compare."""
    return _MORE_SPANS * options.top_k + _SPARE_SPANS if options.whole_words else options.top_k


def _finish(work: Work[AnswerOptions]) -> list[list[AnswerSpan]]:
    contexts = [context for _, context in pairs_of(work.inputs)]
    return [
        finish(contexts[source], windows, rows, work.options, work.check)
        for source, windows, rows in by_input(work.texts, work.rows)
    ]


def _after(_: Sequence[TextInput], lengths: Sequence[int], options: AnswerOptions, __: Facts) -> int:
    """The spans that are compared."""
    return sum([length * min(options.max_answer_tokens, length) for length in lengths])


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """A question and the context that should hold its answer, of any length."""

    question: str
    context: str


class AnswerParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to answer.

    Attributes:
        top_k: Maximum answers. The reply is a list if this is more than 1.
        max_answer_len: Maximum tokens of an answer.
        handle_impossible_answer: Return an empty answer if it is more likely than every other.
        doc_stride: Tokens that neighboring windows of a long context share; null means half a window, at most 128.
        max_seq_len: Tokens of a window, question included; at most the model's limit.
        max_question_len: Ignored. A question may take up half a window.
        align_to_words: Answers start and end at word boundaries.
        truncate: Truncate a question that is too long; null means the server's default. A context is never truncated.
    """

    top_k: int = 1
    max_answer_len: int = 15
    handle_impossible_answer: bool = False
    doc_stride: int | None = None
    max_seq_len: int = 384
    max_question_len: int | None = None
    align_to_words: bool = True
    truncate: bool | None = None


class AnswerRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Questions to answer."""

    inputs: Question | list[Question]
    parameters: AnswerParameters = AnswerParameters()
    options: Options | None = None


def _read(message: AnswerRequest, _: bool) -> TaskInputs:  # noqa: FBT001  see `Route`
    given = message.parameters
    questions = message.inputs if isinstance(message.inputs, list) else [message.inputs]
    for index, question in enumerate(questions):
        if not (question.question and question.context):
            raise empty_input("context" if question.question else "question", index, len(questions))
    options = AnswerOptions(
        given.top_k,
        given.max_answer_len,
        given.handle_impossible_answer,
        given.doc_stride,
        given.max_seq_len,
        given.align_to_words,
    )
    return TaskInputs([(question.question, question.context) for question in questions], options, given.truncate)


def _reply(message: AnswerRequest, answer: list[list[AnswerSpan]]) -> object:
    results = [spans[0] for spans in answer] if message.parameters.top_k == 1 else answer
    return results if isinstance(message.inputs, list) else results[0]


def _write(answer: Sequence[Sequence[AnswerSpan]], _: Facts) -> Sequence[Any]:
    best = [spans[0] for spans in answer]
    sides = [np.array([getattr(span, side) for span in best], np.int64) for side in ("start", "end")]
    return [span.answer for span in best], floats([span.score for span in best]), *sides


def _check(found: Any) -> int:  # noqa: ANN401  any JSON
    replies.number(found["score"])
    if replies.place(found) != len(replies.words(found["answer"])):
        raise replies.WrongError("an answer that is not as long as its place")
    return 0


_WAY: TaskRoute[AnswerOptions, list[list[AnswerSpan]]] = TaskRoute(
    AnswerOptions,
    "answer",
    _finish,
    check,
    sizes_bytes,
    encode=encode,
    token_outputs=True,
    after=_after,
    windows=lambda _: True,
)

TASK = Task(
    way=_WAY,
    graph=(GraphOutput("start_logits", (-1,)), GraphOutput("end_logits", (-1,))),
    head="ForQuestionAnswering",
    texts=(2,),
    served_agreement=0.92,  # the reasons are in docs/design/int8.md
    path="/answer",
    example={"inputs": {"question": "What is a T4?", "context": "A T4 is a graphics card for servers."}},
    route=Route(
        AnswerRequest,
        AnswerSpan | list[AnswerSpan | list[AnswerSpan]],
        _read,
        _reply,
        "Answer a question with a part of a text; a long text is read in overlapping windows.",
    ),
    outputs=(Output("answer", "BYTES"), Output("score", "FP32"), Output("start", "INT64"), Output("end", "INT64")),
    write=_write,
    recorded=each([AnswerSpan("a graphics card", 0.8713, 8, 23)]),
    column=lambda _, __: ("answers", [AnswerSpan]),
    load=LoadFormat(
        fields=("question", "context"),
        item=lambda text: {"question": "What is this about?", "context": text},
        body=lambda item: {"inputs": {"question": item["question"], "context": item["context"]}},
        tensors=lambda item: {"text": [item["question"]], "text_pair": [item["context"]]},
        answers=lambda found: [found],
        row=lambda text, score, start, end: {"answer": text, "score": score, "start": start, "end": end},
        check=_check,
    ),
)
