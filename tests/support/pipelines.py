"""The question-answering pipeline of Transformers 4, which Transformers 5 no longer has, from its definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tests.support.tasks import TinyModel


def pipeline_answers(tiny: TinyModel, question: str, context: str, **options: Any) -> list[dict[str, Any]]:
    return answers_of(tiny.model, tiny.tokenizer, question, context, **options)


def answers_of(
    model: Any,
    tokenizer: Any,
    question: str,
    context: str,
    *,
    top_k: int = 1,
    max_answer_len: int = 15,
    doc_stride: int | None = None,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
) -> list[dict[str, Any]]:
    """The answers with `answer`, `start`, `end` and `score`, best first; compared with Transformers 4.57's own.

    In each window start and end have a softmax over the context and the first token; a span is worth the product. Of
    each window twice as many spans as are wanted, and ten, are looked at, and those of equal characters added up.
    """
    length = min(tokenizer.model_max_length, 384)
    encoded = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=length,
        stride=min(length // 2, 128) if doc_stride is None else doc_stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    answers: list[dict[str, Any]] = []
    nothing = 1.0
    for window in range(len(encoded["input_ids"])):
        given = {name: torch.tensor([encoded[name][window]]) for name in tokenizer.model_input_names}
        with torch.inference_mode():
            logits = model(**given)
        inside = np.array([part == 1 for part in encoded.sequence_ids(window)])
        inside[0] = True
        starts, ends = (
            torch.softmax(side[0].double().masked_fill(torch.tensor(~inside), -torch.inf), -1).numpy()
            for side in (logits.start_logits, logits.end_logits)
        )
        nothing = min(nothing, starts[0] * ends[0])
        spans = [
            (starts[i] * ends[j], i, j)
            for i in np.flatnonzero(inside)[1:]
            for j in np.flatnonzero(inside)[1:]
            if i <= j < i + max_answer_len
        ]
        spans.sort(key=lambda span: -span[0])
        for score, i, j in spans[: 2 * top_k + 10 if align_to_words else top_k]:
            (start, _), (_, end) = encoded["offset_mapping"][window][i], encoded["offset_mapping"][window][j]
            if align_to_words:
                words = encoded.word_ids(window)
                start = encoded.word_to_chars(window, words[i], sequence_index=1).start
                end = encoded.word_to_chars(window, words[j], sequence_index=1).end
            text = context[start:end]
            known = next((answer for answer in answers if answer["answer"].lower() == text.lower()), None)
            if known is None:
                answers.append({"answer": text, "start": start, "end": end, "score": float(score)})
            else:
                known["score"] += float(score)
    if handle_impossible_answer:
        answers.append({"answer": "", "start": 0, "end": 0, "score": float(nothing)})
    return sorted(answers, key=lambda answer: -answer["score"])[:top_k]
