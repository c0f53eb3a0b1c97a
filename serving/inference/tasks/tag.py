"""The task `tag`: entities in a text, from a tag for each token.

Tags follow BIO: `B-x` begins an entity of x, `I-x` continues one, `O` is none; a tag without such a prefix
continues. Words are what the tokenizer splits a text into before it looks for sub-words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.inference.tasks.base import Task, softmax, texts_of
from serving.records import AlignedText, Entity

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from serving.inference.tasks.base import Work
    from serving.inference.tokenizer import TextTokenizer
    from serving.records import EncodedText, Row, TagOptions, TextInput, Truncate


def encode(
    tokenizer: TextTokenizer, inputs: Sequence[TextInput], _: TagOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    return tokenizer.encode_aligned(texts_of(inputs), truncate=truncate)


def finish(text: str, aligned: AlignedText, row: Row, options: TagOptions, labels: Sequence[str]) -> list[Entity]:
    """One text's entities from its `logits`, float32 [tokens or more, labels].

    Training teaches a model the tag of each word's first token alone, so by default that token decides.
    """
    positions = np.flatnonzero(aligned.words >= 0)
    if not len(positions):
        return []
    if options.aggregation == "first":
        words = aligned.words[positions]
        begins = np.flatnonzero(np.diff(words, prepend=-1))
    else:
        begins = np.arange(len(positions))
    ends = np.append(begins[1:], len(positions)) - 1
    probabilities = softmax(row[0][positions[begins]].astype(np.float32, copy=False))
    spans = np.stack([aligned.spans[positions[begins], 0], aligned.spans[positions[ends], 1]], axis=1)
    tags = [labels[index] for index in probabilities.argmax(axis=1).tolist()]
    return [
        Entity(tag, score, text[start:end], start, end)
        for tag, score, start, end in _grouped(tags, probabilities.max(axis=1), spans)
        if tag not in options.ignore_labels
    ]


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


def _finish(work: Work[TagOptions]) -> list[list[Entity]]:
    return [
        finish(text, aligned, row, work.options, work.manifest.labels)
        for text, aligned, row in zip(texts_of(work.inputs), work.texts, work.rows, strict=True)
        if isinstance(aligned, AlignedText)
    ]


TASK = Task("tag", _finish, encode=encode, token_outputs=True)
