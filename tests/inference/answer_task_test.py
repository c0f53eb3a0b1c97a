"""The task `answer`: from start and end logits to parts of a context."""

from __future__ import annotations

import re
from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.inference.tokenizer import CONTEXT_LIMIT_BYTES, TextTokenizer
from bertserve.serving.records import AlignedText
from bertserve.serving.tasks import answer
from bertserve.serving.tasks.answer import AnswerOptions
from tests.support.checkpoints import stripped_tokenizer, vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import Row
    from bertserve.serving.tasks.answer import AnswerSpan

NULL = 1.0
"""Both logits of the first token, where a test does not say."""

HEAD, TAIL = 3, 1  # [CLS], a question of one token, [SEP]; [SEP]
LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """A tokenizer whose words are one token each, or one for each character."""
    return TextTokenizer(Tokenizer.from_str(stripped_tokenizer()), LENGTH, len(vocabulary()))


def window(words: Sequence[int], *, first: int = 0) -> AlignedText:
    """A window of a context whose word number `n` is the two characters from 3n on."""
    numbers = np.array([-1] * HEAD + [first + word for word in words] + [-1] * TAIL, np.int32)
    spans = np.stack([3 * numbers, 3 * numbers + 2], axis=1).astype(np.int32)
    return AlignedText(ids=array("i", [0] * len(numbers)), source=0, spans=spans, words=numbers)


def row(starts: Sequence[float], ends: Sequence[float], *, null: tuple[float, float] = (NULL, NULL)) -> Row:
    """Logits for the context's tokens; what stands around them would win if it were looked at."""
    around = [np.array([side, 50.0, 50.0]) for side in null]
    tail = np.array([50.0, 50.0])  # [SEP] and padding
    parts = [np.concatenate([head, values, tail]) for head, values in zip(around, (starts, ends), strict=True)]
    return tuple(part.astype(np.float32) for part in parts)


CONTEXT = "".join(f"{number:02d} " for number in range(40))


def expected(
    logits: Sequence[tuple[int, Sequence[float], Sequence[float]]], options: AnswerOptions
) -> dict[str, float]:
    """Every allowed span of words with its score, from the definition: (first word, start logits, end logits) a window.

    The first token, whose logits are `NULL`, has a share of the probability. Words are one token each.
    """
    found: dict[str, float] = {}
    for first, *sides in logits:
        starts, ends = ([NULL, *map(float, np.float32(side))] for side in sides)
        total = sum(np.exp(starts)) * sum(np.exp(ends))
        spans = [
            (float(np.exp(starts[i] + ends[j]) / total), 3 * (first + i - 1), 3 * (first + j - 1) + 2)
            for i in range(1, len(starts))
            for j in range(i, min(len(ends), i + options.max_answer_tokens))
        ]
        for score, start, end in sorted(spans, reverse=True)[: 2 * options.top_k + 10]:
            text = CONTEXT[start:end]
            found[text] = found.get(text, 0.0) + score
    return found


numbers = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12)


@given(st.data(), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_the_best_spans_of_all_windows(data: st.DataObject, longest: int, top_k: int, count: int) -> None:
    """Answers are the likeliest spans inside the context, of the allowed length, start before end, best first.

    Each is worth the probability of its start times that of its end in its window, and the sum over the windows in
    which it is among the best.
    """
    options = AnswerOptions(top_k=top_k, max_answer_tokens=longest)
    logits = []
    for number in range(count):
        starts = data.draw(numbers)
        logits.append(
            (
                5 * number,
                starts,
                data.draw(st.lists(st.floats(-8, 8, width=32), min_size=len(starts), max_size=len(starts))),
            )
        )
    windows = [window(range(len(starts)), first=first) for first, starts, _ in logits]
    found = answer.finish(CONTEXT, windows, [row(starts, ends) for _, starts, ends in logits], options)
    wanted = expected(logits, options)
    best = sorted(wanted.values(), reverse=True)[:top_k]
    np.testing.assert_allclose([span.score for span in found], best, rtol=1e-9)
    for span in found:
        assert span.answer == CONTEXT[span.start : span.end]
        assert wanted[span.answer] == pytest.approx(span.score)


def one(found: list[AnswerSpan]) -> AnswerSpan:
    (span,) = found
    return span


def test_no_answer_competes_where_asked() -> None:
    """With `no_answer`, the first token stands for there being none, and is one answer among the others."""
    rows = [row([1, 0], [1, 0], null=(6.0, 6.0))]
    assert one(answer.finish(CONTEXT, [window([0, 1])], rows, AnswerOptions(no_answer=True))).answer == ""
    assert one(answer.finish(CONTEXT, [window([0, 1])], rows, AnswerOptions())).answer == "00"
    both = answer.finish(CONTEXT, [window([0, 1])], rows, AnswerOptions(top_k=2, no_answer=True))
    assert [span.answer for span in both] == ["", "00"]
    assert both[0].score == pytest.approx((np.exp(6) / (np.exp(6) + np.e + 1)) ** 2)
    windows = [window([0, 1]), window([0, 1], first=2)]
    rows += [row([1, 0], [1, 0], null=(0.0, 0.0))]
    found = answer.finish(CONTEXT, windows, rows, AnswerOptions(top_k=9, no_answer=True))
    (empty,) = [span for span in found if not span.answer]
    assert empty.score == pytest.approx((1 / (2 + np.e)) ** 2)


def test_one_window_with_an_answer_is_enough() -> None:
    """That the other windows are sure to hold nothing does not outweigh the one that holds it."""
    rows = [row([8, 0], [8, 0], null=(0.0, 0.0)), row([0, 0], [0, 0], null=(12.0, 12.0))]
    found = answer.finish(CONTEXT, [window([0, 1]), window([0, 1], first=2)], rows, AnswerOptions(no_answer=True))
    assert one(found).answer == "00"


@pytest.mark.parametrize("words", [0, 1, 19, 20, 21, 30, 38, 39, 200])
@pytest.mark.parametrize("overlap", [0, 3, 1000])
def test_windows_cover_the_context(tokenizer: TextTokenizer, words: int, overlap: int) -> None:
    """Every token of the context is in a window, in order; neighbours overlap as asked, by half at most."""
    context = " ".join(["server", "text", "is", "it"][number % 4] for number in range(words))
    windows = tokenizer.encode_windows([("the", context)], length=LENGTH, overlap=overlap, truncate=False)
    room = LENGTH - HEAD - TAIL
    places = [w.spans[w.words >= 0, 0].tolist() for w in windows]
    whole = [found.start() for found in re.finditer(r"\w+", context)]
    assert all(len(w.ids) <= LENGTH for w in windows)
    assert sorted({place for part in places for place in part}) == whole
    shared = min(overlap, room - LENGTH // 6)
    for left, right in pairwise(places):
        assert left[len(left) - shared :] == right[:shared]
    if words <= room:
        assert len(windows) == 1


def test_a_window_is_what_the_library_makes(tokenizer: TextTokenizer) -> None:
    """A pair that fits has the ids and segments of the plain encoding, and its tokens point into the context."""
    question, context = "is it the server", "a text, for 12"
    (aligned,) = tokenizer.encode_windows([(question, context)], length=LENGTH, overlap=4, truncate=True)
    (plain,) = tokenizer.encode([(question, context)], truncate=True)
    assert (aligned.ids, aligned.type_ids, aligned.truncated) == (plain.ids, plain.type_ids, 0)
    inside = aligned.words >= 0
    assert [context[start:end] for start, end in aligned.spans[inside]] == ["a", "text", ",", "for", "12", "12"]
    assert inside.sum() == 6


def test_a_long_question_is_cut_or_refused(tokenizer: TextTokenizer) -> None:
    """A question leaves half of the model to the context; what is cut off is counted once."""
    pair = (" ".join(["server"] * 15), " ".join(["text"] * 40))
    windows = tokenizer.encode_windows([pair], length=LENGTH, overlap=0, truncate=True)
    assert len(windows) > 1
    assert [w.truncated for w in windows] == [15 - (LENGTH // 2 - 3)] + [0] * (len(windows) - 1)
    with pytest.raises(InvalidRequest, match="question or query of input 0 has 15 tokens"):
        tokenizer.encode_windows([pair], length=LENGTH, overlap=0, truncate=False)


def test_a_model_too_short_for_questions() -> None:
    """Where not one token of a context fits, the request is refused; where one fits, it is read."""
    for length in range(3, 9):
        short = TextTokenizer(Tokenizer.from_str(stripped_tokenizer()), length, len(vocabulary()))
        if length == 3:
            with pytest.raises(InvalidRequest, match="no room for the context"):
                short.encode_windows([("the server", "a text")], length=length, overlap=4, truncate=True)
        else:
            windows = short.encode_windows([("the server", "a text")], length=length, overlap=4, truncate=True)
            assert max(len(window.ids) for window in windows) <= length
            assert windows[0].truncated == 2 - min(2, max(0, length // 2 - 3, length - 3 - 2))


def test_the_size_of_a_context_is_limited(tokenizer: TextTokenizer) -> None:
    """A context may be far longer than a text, but not endless; a question is a text."""
    assert tokenizer.windows_sizes_bytes([("a", "x" * CONTEXT_LIMIT_BYTES)]) == [CONTEXT_LIMIT_BYTES + 1]
    with pytest.raises(InvalidRequest, match=rf"context of input 1 has \d+ bytes; at most {CONTEXT_LIMIT_BYTES}"):
        tokenizer.windows_sizes_bytes([("a", "b"), ("a", "ä" * (CONTEXT_LIMIT_BYTES // 2 + 1))])
    with pytest.raises(InvalidRequest, match="input 0"):
        tokenizer.windows_sizes_bytes([("x" * (tokenizer.max_characters + 1), "b")])


@pytest.mark.parametrize("wrong", ["a text", [1, 2]], ids=["text", "ids"])
def test_a_question_needs_a_context(tokenizer: TextTokenizer, wrong: str | list[int]) -> None:
    """An input that is no pair is refused."""
    with pytest.raises(InvalidRequest, match="pair"):
        answer.sizes_bytes(tokenizer, [wrong], AnswerOptions(), truncate=True)
