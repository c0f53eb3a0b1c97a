"""LoadGen's sample library, and the requests and answers for its samples."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loadtest.errors import BenchError
from loadtest.generator.answers import Answers
from loadtest.generator.messages import batch_message
from loadtest.generator.texts import read_texts, texts_for
from loadtest.generator.workload import different_texts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadtest.generator.messages import Target
    from loadtest.generator.texts import Text
    from loadtest.generator.wire import Reply

TASKS = ("embed", "answer")
BUILT_IN = "1,024 built-in texts of 4 to 40 words"


@dataclass(frozen=True)
class Library:
    """A set of samples.

    Attributes:
        task: One of `TASKS`.
        source: Origin of the samples, in a few words.
        samples: The inputs, by LoadGen's index.
        gold: For the task `answer`: the reference answers to each question.
    """

    task: str
    source: str
    samples: tuple[Text, ...]
    gold: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def read(cls, task: str, file: Path | None) -> Library:
        """Reads the samples of a file.

        Args:
            task: One of `TASKS`.
            file: Texts for `embed` (None: built-in ones), SQuAD 1.1's JSON for `answer`.

        Raises:
            BenchError: The file is invalid, or missing for `answer`.
        """
        if task == "answer":
            if file is None:
                raise BenchError("the task answer needs --data FILE: questions in SQuAD 1.1's JSON")
            return _squad(file)
        if file is None:
            return cls(task, BUILT_IN, tuple(different_texts(4, 40, 1024)))
        texts = texts_for(task, file, read_texts(file))
        return cls(task, f"{len(texts):,} texts of {file.name}", texts)


def _squad(file: Path) -> Library:
    """The questions of a file in SQuAD's layout: https://rajpurkar.github.io/SQuAD-explorer/."""
    try:
        articles = json.loads(file.read_bytes())["data"]
        found = [
            ({"question": one["question"], "context": paragraph["context"]}, tuple(a["text"] for a in one["answers"]))
            for article in articles
            for paragraph in article["paragraphs"]
            for one in paragraph["qas"]
        ]
    except OSError as error:
        raise BenchError(f"--data {file}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"--data {file}: not SQuAD 1.1's JSON: {error!r}") from error
    if not found or not all(gold for _, gold in found):
        raise BenchError(f"--data {file}: every question needs at least one answer, and there must be one question")
    samples, gold = zip(*found, strict=True)
    return Library("answer", f"{len(samples):,} questions of {file.name}", samples, gold)


@dataclass
class Conversation:
    """Requests about a library's samples to one server, and the decoding of its replies.

    Every reply is decoded in both modes, as the rules require. LoadGen gets an embedding as little-endian float32, an
    answer as UTF-8.
    """

    target: Target
    library: Library
    _answers: Answers = field(init=False)
    _alone: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Builds the single-sample requests in advance."""
        self._answers = Answers(self.target.protocol, self.library.task)
        self._alone = [batch_message(self.target, self.library.task, [sample]) for sample in self.library.samples]

    def message(self, indices: Sequence[int]) -> bytes:
        """One request about these samples."""
        if len(indices) == 1:
            return self._alone[indices[0]]
        return batch_message(self.target, self.library.task, [self.library.samples[index] for index in indices])

    def data(self, reply: Reply, count: int) -> list[bytes]:
        """The data for LoadGen, for each of `count` samples.

        Raises:
            BenchError: The reply is invalid.
        """
        return [_data(self.library.task, value) for value in self._answers.values(reply, count)]


def _data(task: str, value: Any) -> bytes:  # noqa: ANN401  a vector, or an answer with its position
    return bytes(value["answer"].encode() if task == "answer" else value.astype("<f4").tobytes())
