"""The task `tag`: entities in a text, from a tag for each token.

Tags follow BIO: `B-x` begins an entity of x, `I-x` continues one, `O` is none; a tag without such a prefix
continues. Words are what the tokenizer splits a text into before it looks for sub-words. Groups and scores are those of
Transformers' pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.inference.tasks import windows
from serving.inference.tasks.base import Task, softmax, texts_of
from serving.records import Entity, TaggedToken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from serving.inference.tasks.base import Work
    from serving.inference.tokenizer import TextTokenizer
    from serving.records import AlignedText, EncodedText, Row, TagOptions, TextInput, Truncate

    Probabilities = NDArray[np.float64]
    Indices = NDArray[np.intp]


def encode(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], options: TagOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    texts = texts_of(inputs)
    if options.windows is None:
        return tokenizer.encode_aligned(texts, truncate=truncate)
    return windows.encode(tokenizer, texts, options, truncate=truncate)


def finish(
    text: str,
    aligned: AlignedText,
    row: Row,
    options: TagOptions,
    labels: Sequence[str],
    name: Callable[[int], str],
) -> list[Entity | TaggedToken]:
    """One text's entities or tokens.

    Args:
        text: The text.
        aligned: Its tokens.
        row: Its `logits`, float32 [tokens or more, labels].
        options: How tokens become entities.
        labels: The model's tags.
        name: What the vocabulary calls a token; empty where the text's own characters shall stand for it.
    """
    positions = np.flatnonzero(aligned.words >= 0)
    if not len(positions):
        return []
    spans = aligned.spans[positions]
    probabilities = softmax(row[0][positions].astype(np.float32, copy=False))
    if options.aggregation in _OF_WORDS:
        begins = np.flatnonzero(np.diff(aligned.words[positions], prepend=-1))
        ends = np.append(begins[1:], len(positions))
        spans = np.stack([spans[begins, 0], spans[ends - 1, 1]], axis=1)
        probabilities = _OF_WORDS[options.aggregation](probabilities, begins, ends - begins)
    scores = probabilities.max(axis=1)
    tags = [labels[index] for index in probabilities.argmax(axis=1).tolist()]
    if options.aggregation == "none":
        return [
            TaggedToken(tag, score, index, name(aligned.ids[index]) or text[start:end], start, end)
            for tag, score, index, (start, end) in zip(
                tags, scores.tolist(), positions.tolist(), spans.tolist(), strict=True
            )
            if tag not in options.ignore_labels
        ]
    return [
        Entity(tag, score, text[start:end], start, end)
        for tag, score, start, end in _grouped(tags, scores, spans)
        if tag not in options.ignore_labels
    ]


def _first(probabilities: Probabilities, begins: Indices, _: Indices) -> Probabilities:
    return probabilities[begins]


def _average(probabilities: Probabilities, begins: Indices, sizes: Indices) -> Probabilities:
    means: Probabilities = np.add.reduceat(probabilities, begins, axis=0) / sizes[:, None]
    return means


def _highest(probabilities: Probabilities, begins: Indices, sizes: Indices) -> Probabilities:
    word = np.repeat(np.arange(len(begins)), sizes)
    best_first = np.lexsort((-probabilities.max(axis=1), word))
    return probabilities[best_first[begins]]


_OF_WORDS = {"first": _first, "average": _average, "max": _highest}
"""Probabilities [words, labels] of those [tokens, labels], given where words begin and how many tokens each has."""


def _grouped(
    tags: Sequence[str], scores: NDArray[np.float64], spans: NDArray[np.int32]
) -> Iterator[tuple[str, float, int, int]]:
    """Neighbours of one entity together: (tag without prefix, mean score, start, end)."""
    begin = 0
    for index in range(1, len(tags) + 1):
        tag = _bare(tags[begin])
        if index < len(tags) and _bare(tags[index]) == tag and not tags[index].startswith("B-"):
            continue
        yield tag, float(scores[begin:index].mean()), int(spans[begin, 0]), int(spans[index - 1, 1])
        begin = index


def _bare(tag: str) -> str:
    return tag[2:] if tag.startswith(("B-", "I-")) else tag


def _finish(work: Work[TagOptions]) -> list[list[Entity | TaggedToken]]:
    tokenizer, unknown = work.tokenizer, work.manifest.special_ids.get("unk")

    def name(token: int) -> str:
        return "" if token == unknown else tokenizer.name(token)

    texts = texts_of(work.inputs)
    answers = []
    for source, own, rows in windows.by_input(work.texts, work.rows):
        whole, logits = windows.merged(own, [row[0] for row in rows])
        answers.append(finish(texts[source], whole, (logits,), work.options, work.manifest.labels, name))
    return answers


TASK = Task(
    "tag",
    _finish,
    windows.check,
    windows.sizes_bytes,
    encode=encode,
    token_outputs=True,
    windows=windows.asked,
)
