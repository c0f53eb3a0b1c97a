"""A task's own metric over a file of labeled text: the inputs, and the score of raw answers."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from bertserve.export.errors import ExportError
from bertserve.export.tasks import metrics
from bertserve.export.texts import corpus
from bertserve.serving.records import EncodedText, Row

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Encoding

    from bertserve.export.checkpoint.vocabulary import Vocabulary
    from bertserve.serving.tasks.parts import Labels, MultiVector

Score = Callable[[Sequence[Row]], dict[str, float]]
"""Computes the metrics, times 100 and by name, from raw answers in the order of the examples' texts."""


@dataclass(slots=True, frozen=True)
class Examples:
    """A file of labeled text, ready to run.

    Attributes:
        texts: The inputs; not always one for each example.
    """

    name: str
    count: int
    texts: Sequence[EncodedText]
    score: Score


@dataclass(slots=True, frozen=True)
class Reader:
    """Reads labeled text for one model; each task with a metric has its own subclass.

    Attributes:
        max_length: Maximum tokens of an input; longer ones are truncated.
        labels: Its classes or tags; no names for other tasks.
        prompt: The prefix of each text that is embedded.
    """

    task: str
    vocabulary: Vocabulary
    max_length: int
    labels: Labels
    prompt: str = ""
    multi_vector: MultiVector | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)

    def read(self, path: Path) -> Examples:
        """Reads a file in the usual format of the task's datasets: CSV or TSV, unless the task has another one.

        Raises:
            ExportError: The file cannot be read in this format, or does not fit the model's labels.
        """
        try:
            content = path.read_text(encoding="utf-8-sig")
            examples = self.examples(path, content)
        except OSError as error:
            raise ExportError(f"{path}: {error.strerror or error}") from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ExportError(f"{path}: not labeled texts for the task {self.task}: {error!r}") from error
        if not examples.count:
            raise ExportError(f"{path}: has no examples for the task {self.task}")
        return examples

    def examples(self, path: Path, content: str) -> Examples:
        return self.rows(path.name, corpus.table(content, path.suffix))

    def rows(self, name: str, rows: list[list[str]]) -> Examples:  # noqa: ARG002  see the tasks
        raise ValueError("this task has no metric")

    def _encode(self, texts: Sequence[corpus.Text]) -> list[EncodedText]:
        return self.vocabulary.encode(texts, self.max_length)

    @staticmethod
    def inputs(row: list[str]) -> corpus.Text:
        return row[0] if len(row) < 3 else (row[0], row[1])  # noqa: PLR2004  columns

    def _offsets(self, texts: Sequence[corpus.Text], strategy: str = "longest_first") -> list[Encoding]:
        tokenizer = self.vocabulary.tokenizer_for(texts)
        tokenizer.enable_truncation(self.max_length, strategy=strategy, direction=self.vocabulary.truncation_side)
        encodings: list[Encoding] = tokenizer.encode_batch(texts)
        return encodings


@dataclass(slots=True, frozen=True)
class PairReader(Reader):
    """Sentence, sentence, score; Spearman of the similarity of their embeddings."""

    def rows(self, name: str, rows: list[list[str]]) -> Examples:
        indices = {text: index for index, text in enumerate(dict.fromkeys(text for row in rows for text in row[:2]))}
        pairs = [(indices[row[0]], indices[row[1]]) for row in rows]
        expected = [float(row[2]) for row in rows]
        return Examples(
            name,
            len(pairs),
            self._encode([self.prompt + text for text in indices]),
            lambda answers: {"spearman": metrics.spearman(self.similarities(answers, pairs), expected)},
        )

    @staticmethod
    def similarities(answers: Sequence[Row], pairs: Sequence[tuple[int, int]]) -> list[float]:
        """The similarity of each pair, given by the indices of its answers."""
        raise NotImplementedError


def encoded(encoding: Encoding) -> EncodedText:
    types = array("i", encoding.type_ids) if any(encoding.type_ids) else None
    return EncodedText(array("i", encoding.ids), types)


@dataclass(slots=True, frozen=True)
class ScoreReader(Reader):
    """Sentence, optional second sentence, and a score; Spearman."""

    score_column: ClassVar[int] = 2

    def rows(self, name: str, rows: list[list[str]]) -> Examples:
        expected = [float(row[self.score_column]) for row in rows]
        texts = self._encode([self.inputs(row) for row in rows])
        return Examples(
            name,
            len(rows),
            texts,
            lambda answers: {"spearman": metrics.spearman([float(row[0][0]) for row in answers], expected)},
        )
