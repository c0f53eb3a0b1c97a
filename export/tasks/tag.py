"""The task tag: a head with a logit of each tag for each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from bertserve.export.tasks import metrics
from bertserve.export.tasks.accuracy import Examples, Reader, encoded
from bertserve.export.tasks.base import TaskExport
from bertserve.export.tasks.decisions import DecisionComparator
from bertserve.export.tasks.libraries.answers import FEW, MANY, Variant, entities, tagged
from bertserve.export.tasks.libraries.library import tokens
from bertserve.export.tasks.libraries.pipelines import Transformers, surely
from bertserve.export.tasks.limits import limits_for
from bertserve.serving.tasks.tag import Entity, TagOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Encoding

    from bertserve.export.tasks.libraries.answers import Answer
    from bertserve.export.tasks.libraries.library import Tokens
    from bertserve.export.tasks.libraries.pipelines import Shake
    from bertserve.export.texts.corpus import Text
    from bertserve.serving.records import EncodedText, Row


@dataclass(slots=True, frozen=True)
class _Comparator(DecisionComparator):
    """The tag of each token of the text."""

    directed: ClassVar[bool] = True

    def decisions(self, row: Row, text: EncodedText) -> NDArray[np.int64]:
        frame = {self.special_ids[role] for role in ("cls", "sep", "pad")}
        spoken = np.array([token not in frame for token in text.ids])
        tags: NDArray[np.int64] = row[0].argmax(axis=-1)[spoken]
        return tags


@dataclass(slots=True, frozen=True)
class _Reader(Reader):
    """CoNLL: word, tab, BIO tag, an empty line after each sentence; entity F1."""

    def examples(self, path: Path, content: str) -> Examples:
        sentences = _read_conll(content)
        if unknown := {tag for _, tags in sentences for tag in tags} - {"O", *self.labels.names}:
            raise ValueError(f"the model has no tag {min(unknown)!r}")
        encodings = self._offsets([" ".join(words) for words, _ in sentences])

        def score(answers: Sequence[Row]) -> dict[str, float]:
            actual = [
                _word_tags(row, encoding, words, self.labels.names)
                for row, encoding, (words, _) in zip(answers, encodings, sentences, strict=True)
            ]
            return {"entity_f1": metrics.entity_f1(actual, [tags for _, tags in sentences])}

        return Examples(path.name, len(sentences), [encoded(encoding) for encoding in encodings], score)


def _word_tags(row: Row, encoding: Encoding, words: Sequence[str], labels: Sequence[str]) -> list[str]:
    """The tag of each word's first token; O for a word that was truncated."""
    starts = dict[int, int]()
    for index, (part, (_, end)) in enumerate(zip(encoding.sequence_ids, encoding.offsets, strict=True)):
        if part == 0:
            starts.setdefault(_word_at(end, words), index)
    best = row[0].argmax(axis=-1)
    return [labels[int(best[starts[index]])] if index in starts else "O" for index in range(len(words))]


def _word_at(end: int, words: Sequence[str]) -> int:
    """The index of the word with the character before `end`; words are separated by one space."""
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
        # If annotators disagreed, a field holds several tags: the first one counts.
        sentences[-1][1].append(tag.split(",")[0].strip())
    return [sentence for sentence in sentences if sentence[0]]


class Tagger(Transformers):
    _kind, _pipeline = "AutoModelForTokenClassification", "token-classification"

    def variants(self) -> list[Variant]:
        grouped = [
            Variant(TagOptions(name, ignore_labels=()), f"aggregated by {name!r}", most=MANY, exact=True)
            for name in ("simple", "first", "average", "max")
        ]
        return [Variant(TagOptions("none", ignore_labels=())), *grouped, Variant(TagOptions(), most=FEW, exact=True)]

    def encode(self, text: Text) -> list[Tokens]:
        return [tokens(one) for one in self._pipe.preprocess(text, is_split_into_words=False)]

    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        options = variant.options
        return [self._answer(str(text), options) for text in texts if isinstance(options, TagOptions)]

    def _answer(self, text: str, options: TagOptions) -> Answer:
        pipe = self._pipe
        raw = self.raw.get(text)
        if raw is None:
            raw = [pipe.forward(one) for one in pipe.preprocess(text, is_split_into_words=False)]
            self.raw[text] = raw
        return surely(lambda shake: self._read(raw, options, shake))

    def _read(self, raw: Sequence[dict[str, Any]], options: TagOptions, shake: Shake) -> Answer:
        from transformers.pipelines import token_classification  # noqa: PLC0415  slow to import

        strategy = token_classification.AggregationStrategy(options.aggregation)
        shaken = [{**one, "logits": shake(one["logits"])} for one in raw]
        found = self._pipe.postprocess(shaken, aggregation_strategy=strategy, ignore_labels=list(options.ignore_labels))
        if options.aggregation == "none":
            return tagged(
                (str(one["entity"]), one["score"], one["index"], one["word"], one["start"], one["end"]) for one in found
            )
        return entities((one["entity_group"], one["score"], one["start"], one["end"]) for one in found)


def _read(answer: Any, _: object) -> Answer:  # noqa: ANN401  see `TaskExport`
    if any(isinstance(one, Entity) for one in answer):
        return entities((one.entity_group, one.score, one.start, one.end) for one in answer)
    return tagged((one.entity, one.score, one.index, one.word, one.start, one.end) for one in answer)


EXPORT = TaskExport(
    limits=limits_for(int8={"cosine_mean": 0.98, "agreement": 0.97, "metric_loss": 1}),
    comparator=_Comparator,
    reader=_Reader,
    library=Tagger,
    read=_read,
)
