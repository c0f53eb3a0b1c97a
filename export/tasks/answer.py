"""The task answer: a head with two logits for each token.

The reference is a Transformers model with the question answering pipeline of Transformers 4, reimplemented here because
Transformers 5 has none.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bertserve.export.tasks import metrics
from bertserve.export.tasks.accuracy import Examples, Reader, encoded
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import DecisionComparator
from bertserve.export.tasks.libraries.answers import MANY, Variant, span
from bertserve.export.tasks.libraries.library import BESIDE, tokens
from bertserve.export.tasks.libraries.pipelines import Transformers, surely
from bertserve.export.tasks.limits import limits_for
from bertserve.serving.tasks.answer import AnswerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Encoding

    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.tasks.libraries.pipelines import Shake
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.records import Array, EncodedText, Row

    Numbers = NDArray[np.float64]


LONGEST_SPAN = 30
"""Maximum tokens of an answer."""


@dataclass(slots=True, frozen=True)
class _Comparator(DecisionComparator):
    """The best span.

    A different span counts as the same if PyTorch's scores for the two differ by at most one fp16 step in each logit:
    PyTorch itself does not separate them.
    """

    directed: ClassVar[bool] = True

    def agreement(self, actual: Sequence[Row], expected: Sequence[Row], texts: Sequence[EncodedText]) -> float:
        return float(np.mean([self._same_span(*pair) for pair in zip(actual, expected, texts, strict=True)]))

    def _same_span(self, actual: Row, expected: Row, text: EncodedText) -> bool:
        first, last = self.context(text)
        starts, ends = (side[first:last] for side in expected)
        if not len(starts):
            return True
        best, other = best_span(starts, ends), best_span(actual[0][first:last], actual[1][first:last])
        logits, others = (np.array([starts[span[0]], ends[span[1]]], np.float64) for span in (best, other))
        return bool(logits.sum() - others.sum() <= np.spacing(np.abs(logits).astype(np.float16)).sum(dtype=np.float64))

    def context(self, text: EncodedText) -> tuple[int, int]:
        """The range of the second text of a pair: its first token, and one past its last."""
        separator = self.special_ids["sep"]
        first = text.ids.index(separator) + 1
        # RoBERTa separates the texts of a pair by two separator tokens.
        while first < len(text.ids) - 1 and text.ids[first] == separator:
            first += 1
        return first, len(text.ids) - 1


def best_span(start: Array, end: Array, longest: int = LONGEST_SPAN) -> tuple[int, int]:
    """The span with the largest sum of its first token's start logit and its last token's end logit.

    Args:
        start: Start logits of the context's tokens.
        end: End logits of the same tokens.
        longest: Maximum tokens of a span.

    Returns:
        Its first and last token; (0, 0) for an empty context.
    """
    if not len(start):
        return 0, 0
    sums = start[:, None].astype(np.float64) + end[None, :]
    indices = np.arange(len(start))
    lengths = indices[None, :] - indices[:, None]
    sums[(lengths < 0) | (lengths >= longest)] = -np.inf
    first, last = np.unravel_index(int(sums.argmax()), sums.shape)
    return int(first), int(last)


@dataclass(slots=True, frozen=True)
class _Reader(Reader):
    """SQuAD 1.1 in JSON; exact match and F1."""

    def examples(self, path: Path, content: str) -> Examples:
        questions = [
            (question["question"], paragraph["context"], [answer["text"] for answer in question["answers"]])
            for article in json.loads(content)["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
        encodings = self._offsets([(question, context) for question, context, _ in questions], "only_second")
        contexts = [context for _, context, _ in questions]

        def score(answers: Sequence[Row]) -> dict[str, float]:
            actual = [_found(*each) for each in zip(answers, encodings, contexts, strict=True)]
            exact, shared = metrics.answers(actual, [options for *_, options in questions])
            return {"exact_match": exact, "f1": shared}

        return Examples(path.name, len(questions), [encoded(encoding) for encoding in encodings], score)


def _found(row: Row, encoding: Encoding, context: str) -> str:
    indices = [index for index, part in enumerate(encoding.sequence_ids) if part == 1]
    if not indices:
        return ""
    first, last = best_span(row[0][indices[0] : indices[-1] + 1], row[1][indices[0] : indices[-1] + 1])
    return context[encoding.offsets[indices[0] + first][0] : encoding.offsets[indices[0] + last][1]]


class Questions(Transformers):
    _kind = "AutoModelForQuestionAnswering"

    def variants(self) -> list[Variant]:
        return [
            Variant(AnswerOptions()),
            Variant(AnswerOptions(no_answer=True), "with no answer allowed", most=MANY),
            Variant(AnswerOptions(whole_words=False), "in tokens", most=MANY, exact=True),
        ]

    @property
    def _length(self) -> int:
        return min(self.longest, AnswerOptions().window_tokens)

    def asked(self, text: Text) -> Text | None:
        return text if isinstance(text, tuple) and reads_as_a_server(self.tokenizer, text, self._length) else None

    def _windows(self, text: Text) -> Any:  # noqa: ANN401  a type of Transformers
        return _windows(self.tokenizer, text, self._length)

    def encode(self, text: Text) -> list[Tokens]:
        windows = self._windows(text)
        return [tokens(windows, row) for row in range(len(windows["input_ids"]))]

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        options = variant.options
        return [self._sure_answer(text, options) for text in texts if isinstance(options, AnswerOptions)]

    def _sure_answer(self, text: Text, options: AnswerOptions) -> Answer:
        windows = self._windows(text)
        return surely(lambda shake: self._answer(windows, text[1], options, shake))

    def _answer(self, windows: Any, context: str, options: AnswerOptions, shake: Shake) -> Answer:  # noqa: ANN401
        found: dict[str, list[Any]] = {}
        null = 1.0
        for row, ids in enumerate(windows["input_ids"]):
            output = self._output(windows, row)
            allowed = np.array([part == 1 for part in windows.sequence_ids(row)])
            allowed |= np.array(ids) == self.tokenizer.cls_token_id
            starts, ends = (
                _softmax(np.where(allowed, shake(logits)[0].numpy(), np.float32(-10000.0)))
                for logits in (output.start_logits, output.end_logits)
            )
            null = min(null, float(starts[0] * ends[0]))
            starts[0] = ends[0] = 0
            for start, end, number in _spans(starts, ends, allowed, options):
                first, last = self._places(windows, row, start, end, options)
                known = found.setdefault(context[first:last].lower(), [0.0, first, last])
                known[0] += number
        answers = [(context[first:last], number, first, last) for number, first, last in found.values()]
        if options.no_answer:
            answers.append(("", null, 0, 0))
        return span(*max(answers, key=lambda answer: answer[1]))

    def _output(self, windows: Any, row: int) -> Any:  # noqa: ANN401  both types of Transformers
        key = str(windows["input_ids"][row])
        if key not in self.raw:
            import torch  # noqa: PLC0415  slow to import

            named = {name: torch.tensor([windows[name][row]]) for name in ("input_ids", *BESIDE) if name in windows}
            with torch.inference_mode():
                self.raw[key] = self.model(**named)
        return self.raw[key]

    @staticmethod
    def _places(windows: Any, row: int, start: int, end: int, options: AnswerOptions) -> tuple[int, int]:  # noqa: ANN401
        offsets = windows["offset_mapping"][row]
        words = windows.word_ids(row)
        if not options.whole_words or words[start] is None or words[end] is None:
            return offsets[start][0], offsets[end][1]
        first = windows.word_to_chars(row, words[start], sequence_index=1)
        return first.start, windows.word_to_chars(row, words[end], sequence_index=1).end


def reads_as_a_server(tokenizer: Any, text: tuple[str, str], length: int) -> bool:  # noqa: ANN401  of Transformers
    """Whether the pipeline accepts a question and its context, and splits them into the same windows as the server.

    The pipeline rejects an empty context, and a question that leaves no room, which the server truncates. If a context
    has little room, the server's windows overlap less. If a window ends inside a word, the server answers with the
    whole word and the pipeline with a part of it.
    """
    length = min(length, AnswerOptions().window_tokens)
    used = len(tokenizer(text[0], add_special_tokens=False)["input_ids"])
    used += tokenizer.num_special_tokens_to_add(pair=True)
    step = length - used - _stride(length)
    if not text[1] or used > length // 2 or step < length // 6:
        return False
    whole = Counter(tokenizer(text[1], add_special_tokens=False).word_ids())
    windows = _windows(tokenizer, text, length)
    for row in range(len(windows["input_ids"])):
        places = zip(windows.word_ids(row), windows.sequence_ids(row), strict=True)
        seen = Counter(word for word, part in places if part == 1)
        if any(count < whole[word] for word, count in seen.items()):
            return False
    return True


def _stride(length: int) -> int:
    return min(length // 2, 128)


def _windows(tokenizer: Any, text: Text, length: int) -> Any:  # noqa: ANN401  a type of Transformers
    return tokenizer(
        *text,
        truncation="only_second",
        max_length=length,
        stride=_stride(length),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def _softmax(logits: Numbers) -> Numbers:
    scaled = np.exp(logits - logits.max())
    probabilities: Numbers = scaled / scaled.sum()
    return probabilities


def _spans(
    starts: Numbers, ends: Numbers, allowed: NDArray[np.bool_], options: AnswerOptions
) -> Iterator[tuple[int, int, float]]:
    """The best spans of a window, in tokens, that start and end at allowed tokens."""
    scores = np.tril(np.triu(np.outer(starts, ends)), options.max_answer_tokens - 1)
    wanted = 2 * options.top_k + 10 if options.whole_words else options.top_k
    for index in np.argsort(-scores, axis=None, kind="stable")[:wanted].tolist():
        start, end = divmod(index, scores.shape[1])
        if allowed[start] and allowed[end]:
            yield start, end, float(scores[start, end])


def _forward(own: Any, common: Any, _: object) -> tuple[Any, ...]:  # noqa: ANN401  see `TaskExport`
    found = own.model(**common)
    return found.start_logits, found.end_logits


EXPORT = TaskExport(
    forward=_forward,
    limits=limits_for(int8={"cosine_mean": 0.98, "metric_loss": 1}),
    comparator=_Comparator,
    reader=_Reader,
    library=Questions,
    read=lambda answer, _: span(answer[0].answer, answer[0].score, answer[0].start, answer[0].end),
)
