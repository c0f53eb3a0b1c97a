"""The task `tag`: entities in a text, from a tag for each token.

Tags follow BIO: `B-x` begins an entity of x, `I-x` continues one, `O` is none; a tag without such a prefix
continues. Words, groups and scores are those of Transformers' pipeline.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec
import numpy as np

from serving.errors import InvalidRequest
from serving.fields.owners import TAG, Owners
from serving.tasks import replies, windows
from serving.tasks.base import Asked, GraphOutput, LoadFormat, Output, Route, Task, TaskOptions, Way, each, texts_of
from serving.tasks.windows import LongText, Options, Windows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from serving.records import AlignedText, EncodedText, Row, TextInput, Truncate
    from serving.tasks.base import Facts, Tokenizer, Work

    Probabilities = NDArray[np.float32]
    Indices = NDArray[np.intp]


class Entity(msgspec.Struct, frozen=True):
    """A part of a text that has a tag.

    Attributes:
        entity_group: The tag, without the prefix that says where an entity begins.
        score: Mean probability of the tag over the entity's words.
        word: The characters of the text.
        start: Its first character, counted in Unicode code points.
        end: The character behind its last.
    """

    entity_group: str
    score: float
    word: str
    start: int
    end: int


class TaggedToken(msgspec.Struct, frozen=True):
    """A token and its tag, prefix included.

    Attributes:
        entity: The tag.
        score: Its probability.
        index: The token's place, special tokens counted.
        word: The token's name in the vocabulary; the characters of the text where it has none.
        start: Its first character, counted in Unicode code points.
        end: The character behind its last.
    """

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


Aggregation = Literal["none", "simple", "first", "average", "max"]
"""What decides the tag of a word: its `first` token, as models are trained; the `average` of its tokens' probabilities;
the token with the highest one (`max`). With `simple` each token has its own tag; with `none` tokens are not grouped."""


class TagOptions(TaskOptions[list[list[Entity | TaggedToken]]], frozen=True):
    """The answer is, for each text, its entities in the order of the text, or its tokens where they are not grouped.

    Attributes:
        aggregation: How tokens become entities.
        ignore_labels: Tags that are no entities.
        windows: None cuts texts that are too long. In windows, a token is tagged in the one that shows most around it.
        by_window: Find entities in each window instead; of those that overlap the longest is kept, as in Transformers.
    """

    aggregation: Aggregation = "first"
    ignore_labels: tuple[str, ...] = ("O",)
    windows: Windows | None = None
    by_window: bool = False


class Tokens(Protocol):
    """What is asked of a vocabulary; `Tokenizer` is one."""

    @property
    def marks_subwords(self) -> bool: ...

    def name(self, token: int) -> str: ...


def check(options: TagOptions, manifest: Facts) -> None:
    windows.check(options, manifest)
    if options.by_window and options.aggregation == "none":
        raise InvalidRequest("`stride` merges entities: send an `aggregation_strategy` other than `none`")


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: TagOptions, *, truncate: Truncate
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
    tokens: Tokens,
    unknown: int | None = None,
) -> list[Entity | TaggedToken]:
    """One text's entities or tokens.

    Args:
        text: The text.
        aligned: Its tokens.
        row: Its `logits`, float32 [tokens or more, labels].
        options: How tokens become entities.
        labels: The model's tags.
        tokens: The model's vocabulary.
        unknown: The token that stands for what the vocabulary lacks; the text's own characters stand for it.
    """
    positions = np.flatnonzero(aligned.words >= 0)
    if not len(positions):
        return []
    spans = aligned.spans[positions]
    probabilities = _probabilities(row[0][positions].astype(np.float32, copy=False))
    ids = [aligned.ids[position] for position in positions.tolist()]
    if options.aggregation in _OF_WORDS:
        begins = np.array(list(_word_begins(text, ids, spans.tolist(), tokens, unknown)), np.intp)
        ends = np.append(begins[1:], len(positions))
        spans = np.stack([spans[begins, 0], spans[ends - 1, 1]], axis=1)
        probabilities = _OF_WORDS[options.aggregation](probabilities, begins, ends - begins)
    scores = probabilities.max(axis=1)
    tags = [labels[index] for index in probabilities.argmax(axis=1).tolist()]
    if options.aggregation == "none":
        return [
            TaggedToken(
                tag, score, index, ("" if token == unknown else tokens.name(token)) or text[start:end], start, end
            )
            for tag, score, index, token, (start, end) in zip(
                tags, scores.tolist(), positions.tolist(), ids, spans.tolist(), strict=True
            )
            if tag not in options.ignore_labels
        ]
    return [
        Entity(tag, score, text[start:end], start, end)
        for tag, score, start, end in _grouped(tags, scores, spans)
        if tag not in options.ignore_labels
    ]


def _probabilities(logits: NDArray[np.float32]) -> Probabilities:
    """In fp32, as the pipeline: where two tokens are as sure as fp32 can say, the first one of them counts."""
    scaled = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Probabilities = scaled / scaled.sum(axis=-1, keepdims=True)
    return probabilities


def _word_begins(
    text: str, ids: Sequence[int], spans: Sequence[Sequence[int]], tokens: Tokens, unknown: int | None
) -> Iterator[int]:
    """Where words begin, by the pipeline's rules.

    A vocabulary with a prefix for tokens inside of words gives them longer names than their characters. With any other
    a token continues a word unless it follows or begins with a space. An unknown token begins one in any case.
    """
    marked = tokens.marks_subwords
    for index, (token, (start, end)) in enumerate(zip(ids, spans, strict=True)):
        if marked:
            continues = len(tokens.name(token)) != len(text[start:end])
        else:
            continues = start > 0 and " " not in text[start - 1 : start + 1]
        if index == 0 or token == unknown or not continues:
            yield index


def _first(probabilities: Probabilities, begins: Indices, _: Indices) -> Probabilities:
    return probabilities[begins]


def _average(probabilities: Probabilities, begins: Indices, sizes: Indices) -> Probabilities:
    sums = np.add.reduceat(probabilities, begins, axis=0)
    means: Probabilities = (sums / sizes[:, None]).astype(np.float32)
    return means


def _highest(probabilities: Probabilities, begins: Indices, sizes: Indices) -> Probabilities:
    word = np.repeat(np.arange(len(begins)), sizes)
    best_first = np.lexsort((-probabilities.max(axis=1), word))
    return probabilities[best_first[begins]]


_OF_WORDS = {"first": _first, "average": _average, "max": _highest}
"""Probabilities [words, labels] of those [tokens, labels], given where words begin and how many tokens each has."""


def _grouped(
    tags: Sequence[str], scores: Probabilities, spans: NDArray[np.int32]
) -> Iterator[tuple[str, float, int, int]]:
    """Neighbours of one entity together: (tag without prefix, mean score, start, end)."""
    begin = 0
    for index in range(1, len(tags) + 1):
        if index < len(tags) and _bare(tags[index]) == _bare(tags[index - 1]) and not tags[index].startswith("B-"):
            continue
        # Whatever stands before the first hyphen goes, as in `S-place`; only `B-` and `I-` count in comparisons.
        name = tags[begin].split("-", 1)[-1]
        yield name, float(scores[begin:index].mean()), int(spans[begin, 0]), int(spans[index - 1, 1])
        begin = index


def _bare(tag: str) -> str:
    return tag[2:] if tag.startswith(("B-", "I-")) else tag


def _finish(work: Work[TagOptions]) -> list[list[Entity | TaggedToken]]:
    unknown = work.manifest.special_ids.get("unk")
    texts = texts_of(work.inputs)
    answers = []
    for source, own, rows in windows.by_input(work.texts, work.rows):

        def found(part: AlignedText, row: Row, text: str = texts[source]) -> list[Entity | TaggedToken]:
            return finish(text, part, row, work.options, work.manifest.labels, work.tokenizer, unknown)

        if work.options.by_window and len(own) > 1:
            parts = [one for part, row in zip(own, rows, strict=True) for one in found(part, row)]
            answers.append(longest(parts))
        else:
            whole, logits = windows.merged(own, [row[0] for row in rows])
            answers.append(found(whole, (logits,)))
    return answers


def longest(found: Sequence[Entity | TaggedToken]) -> list[Entity | TaggedToken]:
    """Of entities that overlap the longest one, or the surest of equally long ones; by the pipeline's rule."""
    kept: list[Entity | TaggedToken] = []
    for entity in sorted(found, key=lambda one: one.start):
        last = kept[-1] if kept else None
        if last is None or not last.start <= entity.start < last.end:
            kept.append(entity)
        elif (entity.end - entity.start, entity.score) > (last.end - last.start, last.score):
            kept[-1] = entity
    return kept


class TagParameters(LongText, frozen=True, forbid_unknown_fields=True):
    """How to tag.

    Attributes:
        aggregation_strategy: What decides the tag of a word: its `first` token, the `average` of its tokens, or the one
            with the highest probability (`max`). `simple`: each token has its own; `none`: tokens are not grouped.
            Null means `first` on `/tag`, and `simple` on `/` and `/models/{model}`.
        ignore_labels: Tags that are no entities.
        truncate: Cut inputs that are too long; null means the server's default.
        long: `window` reads long texts in windows, by `window_tokens` and `window_overlap`.
        stride: Tokens that neighbouring windows of a long text share, in place of `long`. Entities are found in each
            window, and of those that overlap the longest is kept, as in Transformers; not with the strategy `none`.
    """

    owners: ClassVar[Owners] = TAG

    aggregation_strategy: Aggregation | None = None
    ignore_labels: tuple[str, ...] = ("O",)
    truncate: bool | None = None
    stride: int | None = None


class TagRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts to find entities in."""

    inputs: str | list[str]
    parameters: TagParameters = TagParameters()
    options: Options | None = None


def _read(message: TagRequest, unnamed: bool) -> Asked:  # noqa: FBT001  see `Route`
    given = message.parameters
    by_window = given.stride is not None
    if by_window and given.windows is not None:
        raise InvalidRequest("`stride` and `long` both choose windows: send one of them")
    options = TagOptions(
        given.aggregation_strategy or ("simple" if unnamed else "first"),
        given.ignore_labels,
        Windows(overlap_tokens=given.stride) if by_window else given.windows,
        by_window,
    )
    return Asked([message.inputs] if isinstance(message.inputs, str) else message.inputs, options, given.truncate)


def _check(found: Any) -> int:  # noqa: ANN401  whatever JSON holds
    for entity in replies.listed(found):
        replies.words(entity["entity_group"] if "entity_group" in entity else entity["entity"])
        replies.number(entity["score"])
        replies.place(entity)
    return 0


_WAY: Way[TagOptions, list[list[Entity | TaggedToken]]] = Way(
    TagOptions,
    "tag",
    _finish,
    check,
    windows.sizes_bytes,
    encode=encode,
    token_outputs=True,
    windows=windows.asked,
)

TASK = Task(
    way=_WAY,
    graph=(GraphOutput("logits", (-1, "labels")),),
    facts=frozenset({"labels"}),
    head="ForTokenClassification",
    path="/tag",
    example={"inputs": "The T4 was made by Nvidia in Santa Clara."},
    route=Route(
        TagRequest,
        # `Entity`, or `TaggedToken` where tokens are not grouped: a union of two objects has no schema of its own.
        list[dict[str, Any] | list[dict[str, Any]]],
        _read,
        lambda message, answer: answer[0] if isinstance(message.inputs, str) else answer,
        "Find entities in a text.",
    ),
    outputs=(Output("entities", "BYTES"),),  # for each text a JSON list
    write=lambda answer, _: ([msgspec.json.encode(entities).decode() for entities in answer],),
    recorded=each([Entity("ORG", 0.9871, "Nvidia", 19, 25), Entity("LOC", 0.9926, "Santa Clara", 29, 40)]),
    column=lambda options, _: ("entities", [TaggedToken if options.aggregation == "none" else Entity]),
    owners=TAG,
    summary=lambda facts: f"{len(facts.labels)} tags",
    load=LoadFormat(answers=lambda found: [found], row=json.loads, check=_check),
)
