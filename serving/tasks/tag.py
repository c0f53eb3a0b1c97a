"""The task `tag`: named entities in a text, from a tag for each token (token classification).

Tags follow BIO: `B-x` begins an entity of type x, `I-x` continues one, and `O` is none. A tag without such a prefix
continues an entity. Words, groups and scores match Transformers' pipeline.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.tasks import replies, windows
from bertserve.serving.tasks.base import (
    GraphOutput,
    LoadFormat,
    Output,
    Route,
    Task,
    TaskInputs,
    TaskOptions,
    TaskRoute,
    all_tokens,
    each,
    go_on,
    size_of,
    texts_of,
    with_checks,
)
from bertserve.serving.tasks.parts import present
from bertserve.serving.tasks.windows import LongText, Options, Windows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.records import AlignedText, EncodedText, Row, TextInput, Truncate
    from bertserve.serving.tasks.base import Check, Facts, Tokenizer, Work

    Probabilities = NDArray[np.float32]
    Indices = NDArray[np.intp]


class Entity(msgspec.Struct, frozen=True):
    """A part of a text that has a tag.

    Attributes:
        entity_group: The tag, without the prefix that marks the beginning of an entity.
        score: Mean probability of the tag over the entity's words.
        word: The characters of the text.
        start: Position of its first character, in Unicode code points.
        end: Position after its last character.
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
        index: The token's position, special tokens included.
        word: The token's name in the vocabulary; the characters of the text if it has none.
        start: Position of its first character, in Unicode code points.
        end: Position after its last character.
    """

    entity: str
    score: float
    index: int
    word: str
    start: int
    end: int


Aggregation = Literal["none", "simple", "first", "average", "max"]
"""How the tag of a word is chosen: by its `first` token, as models are trained; by the `average` of its tokens'
probabilities; or by the token with the highest probability (`max`). With `simple` each token has its own tag; with
`none` tokens are not grouped."""


class TagOptions(TaskOptions[list[list[Entity | TaggedToken]]], frozen=True):
    """Options whose answer is, for each text, its entities in order, or its tokens if they are not grouped.

    Attributes:
        aggregation: How tokens become entities.
        ignore_labels: Tags that are not entities.
        windows: None truncates texts that are too long. Otherwise a token is tagged in the window with the most context
            around it.
        by_window: Find entities in each window instead. The longest of overlapping entities is kept, as in
            Transformers.
    """

    aggregation: Aggregation = "first"
    ignore_labels: tuple[str, ...] = ("O",)
    windows: Windows | None = None
    by_window: bool = False


class Tokens(Protocol):
    """What tagging asks of a vocabulary. `Tokenizer` implements it."""

    @property
    def marks_subwords(self) -> bool: ...

    def name(self, token: int) -> str: ...


def check(options: TagOptions, manifest: Facts) -> None:
    windows.check(options, manifest, stride=options.by_window)
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
    check: Check = go_on,
) -> list[Entity | TaggedToken]:
    """The entities or tokens of one text.

    Args:
        text: The text.
        aligned: Its tokens.
        row: Its `logits`, float32 [tokens or more, labels].
        options: How tokens become entities.
        labels: The model's tags.
        tokens: The model's vocabulary.
        unknown: The unknown token, which is shown as the characters of the text.
        check: Called between blocks of tokens.
    """
    positions = np.flatnonzero(aligned.words >= 0)
    if not len(positions):
        return []
    spans = aligned.spans[positions]
    probabilities = _probabilities(row[0][positions].astype(np.float32, copy=False))
    ids = [aligned.ids[position] for position in positions.tolist()]
    if options.aggregation in _OF_WORDS:
        begins = np.array(list(_word_begins(text, ids, with_checks(spans.tolist(), check), tokens, unknown)), np.intp)
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
                tags, scores.tolist(), positions.tolist(), ids, with_checks(spans.tolist(), check), strict=True
            )
            if tag not in options.ignore_labels
        ]
    return [
        Entity(tag, score, text[start:end], start, end)
        for tag, score, start, end in with_checks(_group(tags, scores, spans), check)
        if tag not in options.ignore_labels
    ]


def _probabilities(logits: NDArray[np.float32]) -> Probabilities:
    """Softmax in fp32, as in the pipeline: if fp32 cannot tell two tokens apart, the first one counts."""
    scaled = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: Probabilities = scaled / scaled.sum(axis=-1, keepdims=True)
    return probabilities


def _word_begins(
    text: str, ids: Sequence[int], spans: Iterable[Sequence[int]], tokens: Tokens, unknown: int | None
) -> Iterator[int]:
    """The positions where words begin, by the pipeline's rules.

    If a vocabulary marks subwords with a prefix, their names are longer than their characters. In other vocabularies, a
    token continues a word unless it follows a space or begins with one. An unknown token always begins a word.
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
"""Functions that reduce probabilities [tokens, labels] to [words, labels], given where words begin and their numbers of
tokens."""


def _group(
    tags: Sequence[str], scores: Probabilities, spans: NDArray[np.int32]
) -> Iterator[tuple[str, float, int, int]]:
    """Groups neighboring tokens of one entity: (tag without prefix, mean score, start, end)."""
    begin = 0
    for index in range(1, len(tags) + 1):
        if index < len(tags) and _bare(tags[index]) == _bare(tags[index - 1]) and not tags[index].startswith("B-"):
            continue
        # Everything before the first hyphen is removed, as in `S-place`. Only `B-` and `I-` count in comparisons.
        name = tags[begin].split("-", 1)[-1]
        yield name, float(scores[begin:index].mean()), int(spans[begin, 0]), int(spans[index - 1, 1])
        begin = index


def _bare(tag: str) -> str:
    return tag[2:] if tag.startswith(("B-", "I-")) else tag


def _finish(work: Work[TagOptions]) -> list[list[Entity | TaggedToken]]:
    unknown, tags = work.manifest.special_ids.get("unk"), present(work.manifest.labels).names
    texts = texts_of(work.inputs)
    answers = []
    for source, own, rows in windows.by_input(work.texts, work.rows):

        def found(part: AlignedText, row: Row, text: str = texts[source]) -> list[Entity | TaggedToken]:
            work.check()
            return finish(text, part, row, work.options, tags, work.tokenizer, unknown, work.check)

        if work.options.by_window and len(own) > 1:
            parts = [one for part, row in zip(own, rows, strict=True) for one in found(part, row)]
            answers.append(longest(parts))
        else:
            whole, logits = windows.merge(own, [row[0] for row in rows], work.check)
            answers.append(found(whole, (logits,)))
    return answers


def longest(found: Sequence[Entity | TaggedToken]) -> list[Entity | TaggedToken]:
    """Keeps the longest of overlapping entities, as the pipeline does. Of equal lengths, the highest score wins."""
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
        aggregation_strategy: How the tag of a word is chosen: by its `first` token, by the `average` of its tokens, or
            by the token with the highest probability (`max`). With `simple` each token has its own tag; with `none`
            tokens are not grouped. Null means `first` on `/tag`, and `simple` on `/` and `/models/{model}`.
        ignore_labels: Tags that are not entities.
        truncate: Truncate inputs that are too long; null means the server's default.
        long: `window` reads long texts in windows, by `window_tokens` and `window_overlap`.
        stride: Tokens that neighboring windows of a long text share, in place of `long`. Entities are found in each
            window, and the longest of overlapping ones is kept, as in Transformers. Not allowed with the strategy
            `none`.
    """

    aggregation_strategy: Aggregation | None = None
    ignore_labels: tuple[str, ...] = ("O",)
    truncate: bool | None = None
    stride: int | None = None


class TagRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Texts in which to find entities."""

    inputs: str | list[str]
    parameters: TagParameters = TagParameters()
    options: Options | None = None


def _read(message: TagRequest, unnamed: bool) -> TaskInputs:  # noqa: FBT001  see `Route`
    given = message.parameters
    by_window = given.stride is not None
    if by_window and given.windows is not None:
        raise InvalidRequest("`stride` and `long` both set windows; send one of them")
    options = TagOptions(
        given.aggregation_strategy or ("simple" if unnamed else "first"),
        given.ignore_labels,
        Windows(overlap_tokens=given.stride) if by_window else given.windows,
        by_window,
    )
    return TaskInputs([message.inputs] if isinstance(message.inputs, str) else message.inputs, options, given.truncate)


def _check(found: Any) -> int:  # noqa: ANN401  any JSON
    for entity in replies.listed(found):
        replies.words(entity["entity_group"] if "entity_group" in entity else entity["entity"])
        replies.number(entity["score"])
        replies.place(entity)
    return 0


_WAY: TaskRoute[TagOptions, list[list[Entity | TaggedToken]]] = TaskRoute(
    TagOptions,
    "tag",
    _finish,
    check,
    windows.sizes_bytes,
    encode=encode,
    token_outputs=True,
    after=all_tokens,
    windows=windows.asked,
)

TASK = Task(
    way=_WAY,
    graph=(GraphOutput("logits", (-1, "labels")),),
    part="labels",
    head="ForTokenClassification",
    path="/tag",
    example={"inputs": "The T4 was made by Nvidia in Santa Clara."},
    route=Route(
        TagRequest,
        # `Entity`, or `TaggedToken` if tokens are not grouped. A union of two objects has no schema of its own.
        list[dict[str, Any] | list[dict[str, Any]]],
        _read,
        lambda message, answer: answer[0] if isinstance(message.inputs, str) else answer,
        "Find entities in a text.",
    ),
    outputs=(Output("entities", "BYTES"),),  # a JSON list for each text
    write=lambda answer, _: ([msgspec.json.encode(entities).decode() for entities in answer],),
    recorded=each([Entity("ORG", 0.9871, "Nvidia", 19, 25), Entity("LOC", 0.9926, "Santa Clara", 29, 40)]),
    column=lambda options, _: ("entities", [TaggedToken if options.aggregation == "none" else Entity]),
    summary=lambda facts: f"{size_of(facts, 'logits')} tags",
    load=LoadFormat(answers=lambda found: [found], row=json.loads, check=_check),
)
