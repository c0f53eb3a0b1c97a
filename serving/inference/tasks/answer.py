"""The task `answer`: the part of a context that answers a question, scored as Transformers' pipeline does.

A context that does not fit beside its question is read in overlapping windows. In each window start and end get a
probability over the context's tokens and the first one, which stands for there being no answer; a span's score is the
product of the two. Spans of the same characters, in one window or several, are one answer, and their scores add up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.errors import InvalidRequest
from serving.inference.tasks.base import Task, check_top_k, pairs_of, softmax
from serving.inference.tasks.windows import USUAL_OVERLAP, by_input
from serving.records import AnswerSpan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from serving.inference.tasks.base import Work
    from serving.inference.tokenizer import TextTokenizer
    from serving.models.manifest import Manifest
    from serving.records import AlignedText, AnswerOptions, Array, EncodedText, Row, TextInput, Truncate

MOST_ANSWERS = 100

_LEAST_WINDOW = 256

_MORE_SPANS, _SPARE_SPANS = 2, 10
"""Spans of tokens looked at in each window: so many times the answers wanted, and so many more. Several of them are the
same span of words."""

Span = tuple[int, int]


def check(options: AnswerOptions, manifest: Manifest) -> None:
    check_top_k(options.top_k, MOST_ANSWERS)
    if options.max_answer_tokens < 1:
        raise InvalidRequest(f"an answer has 1 token at least, not {options.max_answer_tokens}")
    if options.overlap_tokens is not None and options.overlap_tokens < 0:
        raise InvalidRequest(f"windows overlap by 0 tokens at least, not by {options.overlap_tokens}")
    if options.window_tokens < (least := min(_LEAST_WINDOW, manifest.max_length)):
        raise InvalidRequest(f"windows have {least} tokens at least, not {options.window_tokens}")


def sizes_bytes(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], _: AnswerOptions, *, truncate: Truncate
) -> list[int]:
    return tokenizer.windows_sizes_bytes(pairs_of(inputs), truncate=truncate)


def encode(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], options: AnswerOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    length = min(options.window_tokens, tokenizer.max_length)
    overlap = options.overlap_tokens
    if overlap is None:
        overlap = min(length // 2, USUAL_OVERLAP)
    return tokenizer.encode_windows(
        pairs_of(inputs), length=length, overlap=overlap, whole_words=options.whole_words, truncate=truncate
    )


def finish(
    context: str, windows: Sequence[AlignedText], rows: Sequence[Row], options: AnswerOptions
) -> list[AnswerSpan]:
    """The answers to one question, best first, from the graph's `start_logits` and `end_logits`.

    Args:
        context: Where the answers are.
        windows: At least one.
        rows: For each window `start_logits` and `end_logits`, float32 [tokens or more].
        options: Limits.

    Returns:
        At least one; an empty one where there is nothing to choose from.
    """
    answers: dict[str, AnswerSpan] = {}
    null = 1.0
    for window, row in zip(windows, rows, strict=True):
        starts, ends = (_probabilities(window, part) for part in row)
        null = min(null, float(starts[0] * ends[0]))
        starts[0] = ends[0] = 0.0
        for (start, end), score in _best_spans(window, starts, ends, options):
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
    """Of a window's tokens: a softmax over the first one and those of the context; 0 elsewhere."""
    allowed = window.words >= 0
    allowed[0] = True
    return softmax(np.where(allowed, logits[: len(allowed)].astype(np.float64), -np.inf))


def _best_spans(
    window: AlignedText, starts: NDArray[np.float64], ends: NDArray[np.float64], options: AnswerOptions
) -> Iterator[tuple[Span, float]]:
    """The likeliest spans of one window in characters, each with its score, best first."""
    length = min(options.max_answer_tokens, len(ends))
    padded = np.append(ends, np.zeros(length - 1))
    scores = (starts[:, None] * np.lib.stride_tricks.sliding_window_view(padded, length)).ravel()
    wanted = _MORE_SPANS * options.top_k + _SPARE_SPANS if options.whole_words else options.top_k
    best = np.argpartition(-scores, wanted)[:wanted] if wanted < len(scores) else np.arange(len(scores))
    for index in best[np.argsort(-scores[best], kind="stable")].tolist():
        if scores[index] > 0:
            first, further = divmod(index, length)
            yield (int(window.spans[first, 0]), int(window.spans[first + further, 1])), float(scores[index])


def _finish(work: Work[AnswerOptions]) -> list[list[AnswerSpan]]:
    contexts = [context for _, context in pairs_of(work.inputs)]
    return [
        finish(contexts[source], windows, rows, work.options)
        for source, windows, rows in by_input(work.texts, work.rows)
    ]


TASK = Task("answer", _finish, check, sizes_bytes, encode=encode, token_outputs=True, windows=lambda _: True)
