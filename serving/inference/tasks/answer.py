"""The task `answer`: the part of a context that answers a question.

A context that does not fit beside its question is read in overlapping windows. Start and end each get one
probability over the tokens of all windows together, so that a window without an answer cannot outbid the
one that has it. (A softmax for each window by itself would make each window's best equally sure.)
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from serving.errors import InvalidRequest
from serving.inference.tasks.base import Task, check_top_k, pairs_of
from serving.records import AlignedText, AnswerSpan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from serving.inference.tasks.base import Work
    from serving.inference.tokenizer import TextTokenizer
    from serving.models.manifest import Manifest
    from serving.records import AnswerOptions, EncodedText, Row, TextInput, Truncate

MOST_ANSWERS = 100

_ALIASES = 16
"""Spans of tokens looked at for each answer wanted: several of them are the same span of words."""

Span = tuple[int, int]


def check(options: AnswerOptions, _: Manifest) -> None:
    check_top_k(options.top_k, MOST_ANSWERS)
    if options.max_answer_tokens < 1:
        raise InvalidRequest(f"an answer has 1 token at least, not {options.max_answer_tokens}")
    if options.overlap_tokens < 0:
        raise InvalidRequest(f"windows overlap by 0 tokens at least, not by {options.overlap_tokens}")


def sizes_bytes(tokenizer: TextTokenizer, inputs: Sequence[TextInput]) -> list[int]:
    return tokenizer.windows_sizes_bytes(pairs_of(inputs))


def encode(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], options: AnswerOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    return tokenizer.encode_windows(pairs_of(inputs), overlap=options.overlap_tokens, truncate=truncate)


def finish(
    context: str, windows: Sequence[AlignedText], rows: Sequence[Row], options: AnswerOptions
) -> list[AnswerSpan]:
    """The answers to one question, best first, from the graph's `start_logits` and `end_logits`.

    A span's score is the probability of its start times that of its end. Spans begin and end with words.

    Args:
        context: Where the answers are.
        windows: At least one.
        rows: For each window `start_logits` and `end_logits`, float32 [tokens or more].
        options: Limits.

    Returns:
        At least one; an empty one where there is nothing to choose from.
    """
    logits = [_context_logits(window, row) for window, row in zip(windows, rows, strict=True)]
    null = min(((row[0][0], row[1][0]) for row in rows), key=sum) if options.no_answer else (-np.inf, -np.inf)
    totals = [_logsumexp([null[side], *(pair[side] for pair in logits)]) for side in (0, 1)]
    total = sum(totals)
    scores: dict[Span, float] = {}
    for window, (starts, ends) in zip(windows, logits, strict=True):
        for span, logit in _best_spans(window, starts, ends, options):
            scores[span] = max(scores.get(span, 0.0), math.exp(logit - total))
    if options.no_answer:
        scores[0, 0] = math.exp(float(null[0]) + float(null[1]) - total)
    best = sorted(scores, key=lambda span: (-scores[span], span))[: options.top_k] or [(0, 0)]
    return [AnswerSpan(context[start:end], scores.get((start, end), 0.0), start, end) for start, end in best]


def _context_logits(window: AlignedText, row: Row) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Start and end logits of a window's tokens, minus infinity outside the context."""
    outside = window.words < 0
    starts, ends = (part[: len(outside)].astype(np.float64) for part in row)
    starts[outside] = ends[outside] = -np.inf
    return starts, ends


def _logsumexp(parts: Sequence[NDArray[np.float64] | float]) -> float:
    values = np.concatenate([np.atleast_1d(part) for part in parts])
    highest = float(values.max())
    if highest == -np.inf:
        return 0.0
    return highest + math.log(float(np.exp(values - highest).sum()))


def _best_spans(
    window: AlignedText, starts: NDArray[np.float64], ends: NDArray[np.float64], options: AnswerOptions
) -> Iterator[tuple[Span, float]]:
    """The likeliest spans of one window in characters, with the sum of their two logits."""
    length = min(options.max_answer_tokens, len(ends))
    padded = np.append(ends, np.full(length - 1, -np.inf))
    sums = (starts[:, None] + np.lib.stride_tricks.sliding_window_view(padded, length)).ravel()
    wanted = 1 if options.top_k == 1 else min(len(sums), options.top_k * _ALIASES)
    indices = [int(sums.argmax())] if wanted == 1 else np.argpartition(-sums, wanted - 1)[:wanted].tolist()
    for index in indices:
        if sums[index] > -np.inf:
            first, further = divmod(index, length)
            yield (int(window.spans[first, 0]), int(window.spans[first + further, 1])), float(sums[index])


def _finish(work: Work[AnswerOptions]) -> list[list[AnswerSpan]]:
    windows = [text for text in work.texts if isinstance(text, AlignedText)]
    contexts = [context for _, context in pairs_of(work.inputs)]
    answers = []
    pairs = zip(windows, work.rows, strict=True)
    for source, group in groupby(pairs, key=lambda pair: pair[0].source):
        own, rows = zip(*group, strict=True)
        answers.append(finish(contexts[source], own, rows, work.options))
    return answers


TASK = Task("answer", _finish, check, sizes_bytes, encode, token_outputs=True, windows=True)
