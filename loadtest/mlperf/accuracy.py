"""Accuracy gates: compare the server's answers to all samples with those of the same model in fp32.

Question answering is scored by F1 as in SQuAD 1.1's evaluation (https://rajpurkar.github.io/SQuAD-explorer/, v1.1),
which the reference's `accuracy-squad.py` runs too. The gate is 99% of fp32's F1. MLPerf has no embedding benchmark.
Ours requires a mean cosine similarity of 0.99 to fp32's vectors: users of embeddings rely on their angles, and the mean
over the data set corresponds to F1 over the data set. The minimum cosine is also shown.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadtest.errors import BenchError
from loadtest.generator.closed_loop import Lane, connect

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadtest.mlperf.library import Conversation, Library

    Figures = np.ndarray[tuple[int], np.dtype[np.float64]]
    """One figure per sample."""

GATE = 0.99

ERROR = "standard error of the difference"
"""Standard error of the difference to fp32's F1, over the questions of the file. The 1% of the gate must be judged
against it."""

_BATCH = 8
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(slots=True, frozen=True)
class Accuracy:
    """The result of an accuracy run.

    Attributes:
        name: Name of the metric.
        found: Measured value.
        least: Minimum of the gate.
        others: More figures, by name.
    """

    name: str
    found: float
    least: float
    others: dict[str, float]

    @property
    def held(self) -> bool:
        """Whether the gate passes."""
        return self.found >= self.least

    def text(self) -> str:
        """The terminal output."""
        others = "".join(f", {name} {value:.4f}" for name, value in self.others.items())
        word = "PASSED" if self.held else "FAILED"
        return f"{word}, {self.name} {self.found:.4f}, required: {self.least:.4f}{others}"


def reference(conversation: Conversation) -> list[bytes]:
    """A server's answers to all samples of the library, without LoadGen.

    Raises:
        BenchError: The server does not answer.
    """
    size = len(conversation.library.samples)
    found: list[bytes] = []
    with connect(*conversation.target.address()) as connection:
        lane = Lane(connection, conversation.target.wire(), lambda _: None)
        for start in range(0, size, _BATCH):
            indices = range(start, min(size, start + _BATCH))
            found += conversation.data(lane.exchange(conversation.message(indices)), len(indices))
    return found


def read_log(file: Path, size: int) -> list[bytes]:
    """The answers in LoadGen's log of an accuracy run, by sample.

    MultiStream fills its last query with samples that were already asked. The first answer counts: beside other texts,
    the last bits of a vector differ.

    Args:
        file: `mlperf_log_accuracy.json`.
        size: Samples of the library.

    Raises:
        BenchError: The log cannot be read, or a sample is missing or unknown.
    """
    try:
        entries = [(int(entry["qsl_idx"]), bytes.fromhex(entry["data"])) for entry in json.loads(file.read_bytes())]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"LoadGen's log {file} cannot be read: {error}") from error
    found: dict[int, bytes] = {}
    for index, data in entries:
        if index not in range(size):
            raise BenchError(f"{file} has an answer to sample {index}, of {size}")
        found.setdefault(index, data)
    if found.keys() != set(range(size)):
        raise BenchError(f"{file} has answers to {len(found)} samples of {size}")
    return [found[index] for index in range(size)]


def judge(library: Library, found: Sequence[bytes], fp32: Sequence[bytes]) -> Accuracy:
    """Applies the gate of the library's task.

    Args:
        library: The samples.
        found: The answers to judge, by sample.
        fp32: The answers of the same model in fp32.

    Raises:
        BenchError: The vectors differ in size, or fp32 has no correct answer.
    """
    if library.task == "answer":
        exact, f1s = squad(library.gold, [one.decode() for one in found])
        _, fulls = squad(library.gold, [one.decode() for one in fp32])
        full = float(fulls.mean())
        if not full:
            raise BenchError(
                "the reference answers no question correctly; check that the questions are in the model's language"
            )
        others = {
            "exact_match": float(exact.mean()),
            "fp32's f1": full,
            ERROR: float((f1s - fulls).std() / len(fulls) ** 0.5),
            "% of fp32's answers": 100 * float(np.mean([one == other for one, other in zip(found, fp32, strict=True)])),
        }
        return Accuracy("f1", float(f1s.mean()), GATE * full, others)
    cosines = _cosines(found, fp32)
    return Accuracy("mean cosine", float(cosines.mean()), GATE, {"least cosine": float(cosines.min())})


def squad(gold: Sequence[Sequence[str]], answers: Sequence[str]) -> tuple[Figures, Figures]:
    """Exact match and F1 of each answer in percent, each against the best of the question's reference answers."""
    exact, f1 = [], []
    for right, answer in zip(gold, answers, strict=True):
        words, others = _normal(answer), [_normal(one) for one in right]
        exact.append(float(words in others))
        f1.append(max(_f1(words, other) for other in others))
    return 100 * np.array(exact), 100 * np.array(f1)


def _normal(text: str) -> list[str]:
    """Lowercase words without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _f1(answer: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(answer) & Counter(right)).values())
    return 2 * common / (len(answer) + len(right)) if common else 0.0


def _cosines(found: Sequence[bytes], fp32: Sequence[bytes]) -> Figures:
    ours, theirs = (np.array([np.frombuffer(one, "<f4") for one in rows], np.float64) for rows in (found, fp32))
    if ours.shape != theirs.shape:
        raise BenchError(f"vectors of {ours.shape[1]} numbers, and the reference's of {theirs.shape[1]}")
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines: Figures = (ours * theirs).sum(axis=1) / norms
    return cosines
