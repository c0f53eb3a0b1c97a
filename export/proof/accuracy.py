"""A task's own metric over a file of labelled text: what to run, and what the raw answers are worth."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from export.errors import ExportError
from export.proof import metrics
from export.proof.decisions import best_span
from export.texts import corpus
from serving.records import EncodedText, Row

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Encoding

    from export.checkpoint.vocabulary import Vocabulary
    from serving.models.manifest import Task

Score = Callable[[Sequence[Row]], dict[str, float]]
"""The metrics, times 100 and by name, of raw answers in the order of the examples' texts."""


@dataclass(slots=True, frozen=True)
class Examples:
    """A file of labelled text, ready to run.

    Attributes:
        name: The file's name.
        count: Labelled examples.
        texts: What to run; not always one for each example.
        score: Judges the answers.
    """

    name: str
    count: int
    texts: Sequence[EncodedText]
    score: Score


@dataclass(slots=True, frozen=True)
class Reader:
    """Reads labelled text for one model.

    Attributes:
        task: The model's task.
        vocabulary: Its tokenizer.
        max_length: Its longest input in tokens; what is longer is cut.
        labels: Names of its classes or tags.
        multi_label: Whether each label is decided for itself.
        regression: Whether the labels are values.
        prompt: What stands before each text that is embedded.
    """

    task: Task
    vocabulary: Vocabulary
    max_length: int
    labels: Sequence[str]
    multi_label: bool
    regression: bool = False
    prompt: str = ""

    def read(self, path: Path) -> Examples:
        """Reads a file, in the format that the task's data sets have.

        embed_tokens   nothing: it has no metric of its own
        embed, rerank  CSV or TSV: sentence, sentence, score; Spearman of cosine or score
        regression     CSV or TSV: sentence, perhaps a second one, value; Spearman, of one value
        classify       CSV or TSV: sentence, perhaps a second one, label (name or number); accuracy
        answer         SQuAD 1.1 JSON; exact match and F1
        tag            CoNLL: word, tab, BIO tag, an empty line after each sentence; entity F1
        fill_mask      CSV or TSV: text with one mask token, the word; accuracy

        Raises:
            ExportError: The file cannot be read as such, or does not fit the model's labels.
        """
        try:
            content = path.read_text(encoding="utf-8-sig")
            examples = self._examples(path, content)
        except OSError as error:
            raise ExportError(f"{path}: {error.strerror or error}") from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ExportError(f"{path}: not labelled text for the task {self.task}: {error!r}") from error
        if not examples.count:
            raise ExportError(f"{path}: holds no example for the task {self.task}")
        return examples

    def _examples(self, path: Path, content: str) -> Examples:
        if self.task == "embed_tokens":
            raise ValueError("this task has no metric of its own")
        if self.task == "answer":
            return self._questions(path.name, json.loads(content))
        if self.task == "tag":
            return self._sentences(path.name, content)
        rows = corpus.table(content, path.suffix)
        if self.task == "embed":
            return self._similar(path.name, rows)
        if self.task == "rerank" or self.regression:
            return self._scored(path.name, rows)
        return self._filled(path.name, rows) if self.task == "fill_mask" else self._labelled(path.name, rows)

    def _encode(self, texts: Sequence[corpus.Text]) -> list[EncodedText]:
        return self.vocabulary.encode(texts, self.max_length)

    def _similar(self, name: str, rows: list[list[str]]) -> Examples:
        indices = {text: index for index, text in enumerate(dict.fromkeys(text for row in rows for text in row[:2]))}
        pairs = [(indices[row[0]], indices[row[1]], float(row[2])) for row in rows]

        def score(answers: Sequence[Row]) -> dict[str, float]:
            vectors = np.stack([row[0] for row in answers]).astype(np.float64)
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
            actual = [float(vectors[one] @ vectors[other]) for one, other, _ in pairs]
            return {"spearman": metrics.spearman(actual, [expected for *_, expected in pairs])}

        return Examples(name, len(pairs), self._encode([self.prompt + text for text in indices]), score)

    def _scored(self, name: str, rows: list[list[str]]) -> Examples:
        if self.regression and len(self.labels) != 1:
            raise ValueError("a table gives one value, the model answers several")
        expected = [float(row[-1 if self.regression else 2]) for row in rows]
        texts = self._encode([self._inputs(row) for row in rows])
        return Examples(
            name,
            len(rows),
            texts,
            lambda answers: {"spearman": metrics.spearman([float(row[0][0]) for row in answers], expected)},
        )

    def _labelled(self, name: str, rows: list[list[str]]) -> Examples:
        if self.multi_label:
            raise ValueError("several labels for a text are not read from a table")
        expected = [self._label(row[-1]) for row in rows]
        texts = self._encode([self._inputs(row) for row in rows])
        return Examples(
            name,
            len(rows),
            texts,
            lambda answers: {"accuracy": metrics.accuracy([int(row[0].argmax()) for row in answers], expected)},
        )

    @staticmethod
    def _inputs(row: list[str]) -> corpus.Text:
        return row[0] if len(row) < 3 else (row[0], row[1])  # noqa: PLR2004  columns

    def _label(self, word: str) -> int:
        if word in self.labels:
            return self.labels.index(word)
        if not word.isdigit() or int(word) >= len(self.labels):
            raise ValueError(f"the model has no label {word!r}")
        return int(word)

    def _filled(self, name: str, rows: list[list[str]]) -> Examples:
        tokenizer = Tokenizer.from_str(self.vocabulary.content.decode())
        # A byte-level vocabulary knows a word in the middle of a text by the space before it.
        expected = [tokenizer.encode(f" {row[1]}", add_special_tokens=False).ids[0] for row in rows]
        texts = self._encode([row[0] for row in rows])
        if any(text.ids.count(self.vocabulary.special_ids["mask"]) != 1 for text in texts):
            raise ValueError("a text must hold the mask token once")
        return Examples(
            name,
            len(rows),
            texts,
            lambda answers: {"accuracy": metrics.accuracy([int(row[0][0, 0]) for row in answers], expected)},
        )

    def _questions(self, name: str, document: Any) -> Examples:  # noqa: ANN401  any JSON value
        questions = [
            (question["question"], paragraph["context"], [answer["text"] for answer in question["answers"]])
            for article in document["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
        encodings = self._offsets([(question, context) for question, context, _ in questions])
        contexts = [context for _, context, _ in questions]

        def score(answers: Sequence[Row]) -> dict[str, float]:
            actual = [_answer(*each) for each in zip(answers, encodings, contexts, strict=True)]
            exact, shared = metrics.answers(actual, [options for *_, options in questions])
            return {"exact_match": exact, "f1": shared}

        return Examples(name, len(questions), [_encoded(encoding) for encoding in encodings], score)

    def _sentences(self, name: str, content: str) -> Examples:
        sentences = _read_conll(content)
        if unknown := {tag for _, tags in sentences for tag in tags} - {"O", *self.labels}:
            raise ValueError(f"the model has no tag {min(unknown)!r}")
        encodings = self._offsets([" ".join(words) for words, _ in sentences])

        def score(answers: Sequence[Row]) -> dict[str, float]:
            actual = [
                _word_tags(row, encoding, words, self.labels)
                for row, encoding, (words, _) in zip(answers, encodings, sentences, strict=True)
            ]
            return {"entity_f1": metrics.entity_f1(actual, [tags for _, tags in sentences])}

        return Examples(name, len(sentences), [_encoded(encoding) for encoding in encodings], score)

    def _offsets(self, texts: Sequence[corpus.Text]) -> list[Encoding]:
        tokenizer = Tokenizer.from_str(self.vocabulary.content.decode())
        strategy = "only_second" if self.task == "answer" else "longest_first"
        tokenizer.enable_truncation(self.max_length, strategy=strategy, direction=self.vocabulary.truncation_side)
        encodings: list[Encoding] = tokenizer.encode_batch(texts)
        return encodings


def _encoded(encoding: Encoding) -> EncodedText:
    types = array("i", encoding.type_ids) if any(encoding.type_ids) else None
    return EncodedText(array("i", encoding.ids), types)


def _answer(row: Row, encoding: Encoding, context: str) -> str:
    indices = [index for index, part in enumerate(encoding.sequence_ids) if part == 1]
    if not indices:
        return ""
    first, last = best_span(row[0][indices[0] : indices[-1] + 1], row[1][indices[0] : indices[-1] + 1])
    return context[encoding.offsets[indices[0] + first][0] : encoding.offsets[indices[0] + last][1]]


def _word_tags(row: Row, encoding: Encoding, words: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The tag of each word's first token; a word that was cut off has none."""
    starts = dict[int, int]()
    for index, (part, (_, end)) in enumerate(zip(encoding.sequence_ids, encoding.offsets, strict=True)):
        if part == 0:
            starts.setdefault(_word_at(end, words), index)
    best = row[0].argmax(axis=-1)
    return [labels[int(best[starts[index]])] if index in starts else "O" for index in range(len(words))]


def _word_at(end: int, words: Sequence[str]) -> int:
    """The word in which the character before `end` lies, of words with one space between them."""
    for index, word in enumerate(words):
        end -= len(word) + 1
        if end <= 0:
            return index
    return len(words)


def _read_conll(content: str) -> list[tuple[list[str], list[str]]]:
    sentences: list[tuple[list[str], list[str]]] = [([], [])]
    for line in content.splitlines():
        if not line.strip():
            sentences.append(([], []))
            continue
        word, tag, *_ = line.split("\t")
        sentences[-1][0].append(word)
        # Where annotators disagreed a field holds several tags: the first counts.
        sentences[-1][1].append(tag.split(",")[0].strip())
    return [sentence for sentence in sentences if sentence[0]]
