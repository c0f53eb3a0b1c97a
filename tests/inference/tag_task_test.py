"""The task `tag`: from a tag for each token to entities in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from serving.errors import InvalidRequest
from serving.inference.tasks import tag
from serving.inference.tokenizer import TextTokenizer
from serving.records import TagOptions
from tests.support.checkpoints import stripped_tokenizer, vocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

LABELS = ("O", "B-place", "I-place", "B-thing", "I-thing", "bare")
SURE = 8.0
OF_SIX = float(np.exp(SURE) / (np.exp(SURE) + len(LABELS) - 1))
"""The probability of a tag whose logit is `SURE` beside zeros."""


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """Known words are one token, others one for each character."""
    return TextTokenizer(Tokenizer.from_str(stripped_tokenizer()), 24, len(vocabulary()))


def entities(tokenizer: TextTokenizer, text: str, tags: Sequence[str], options: TagOptions | None = None) -> list[Any]:
    """The entities of a text whose tokens, special ones left out, have these tags."""
    (aligned,) = tokenizer.encode_aligned([text], truncate=True)
    assert len(aligned.ids) == len(tags) + 2
    logits = np.zeros((len(aligned.ids) + 3, len(LABELS)), np.float32)  # and three tokens of padding
    for place, name in enumerate(["B-thing", *tags, "B-thing"]):
        logits[place, LABELS.index(name)] = SURE
    logits[len(aligned.ids) :, 3] = SURE
    return tag.finish(text, aligned, (logits,), options or TagOptions(), LABELS, tokenizer.name)


CASES = {
    "nothing": ("the server is", ["O", "O", "O"], []),
    "one word": ("the server is", ["O", "B-thing", "O"], [("thing", "server")]),
    "words that go on": (
        "the server, text is",
        ["B-thing", "I-thing", "I-thing", "I-thing", "O"],
        [("thing", "the server, text")],
    ),
    "a new beginning": ("server text", ["B-thing", "B-thing"], [("thing", "server"), ("thing", "text")]),
    "another entity": ("server text", ["B-thing", "I-place"], [("thing", "server"), ("place", "text")]),
    "a continuation without a beginning": ("the server", ["O", "I-thing"], [("thing", "server")]),
    "a gap": ("server is text", ["B-thing", "O", "I-thing"], [("thing", "server"), ("thing", "text")]),
    "tags without prefix": ("the server is", ["bare", "bare", "O"], [("bare", "the server")]),
    "the end": ("is the server", ["O", "B-place", "I-place"], [("place", "the server")]),
    "sub-words follow the first": ("is xyz it", ["O", "B-place", "O", "B-thing", "O"], [("place", "xyz")]),
    "sub-words alone are none": ("is xyz it", ["O", "O", "B-place", "B-thing", "O"], []),
    "characters beyond ASCII": ("é → server", ["B-place", "O", "B-thing"], [("place", "é"), ("thing", "server")]),
    "an empty text": ("", [], []),
}


@pytest.mark.parametrize("case", CASES)
def test_entities(tokenizer: TextTokenizer, case: str) -> None:
    """Neighbouring words of one tag are one entity, in the text's own characters and at their places."""
    text, tags, expected = CASES[case]
    found = entities(tokenizer, text, tags)
    assert [(entity.entity_group, entity.word) for entity in found] == expected
    assert all(text[entity.start : entity.end] == entity.word for entity in found)


def test_each_token_by_itself_where_asked(tokenizer: TextTokenizer) -> None:
    """`simple` lets every token have its own tag, also inside of a word."""
    found = entities(tokenizer, "is xyz", ["O", "O", "B-place", "B-thing"], TagOptions("simple"))
    assert [(entity.entity_group, entity.word) for entity in found] == [("place", "y"), ("thing", "z")]


WORDS = {
    # The tags of `x`, `y` and `z`, each with a logit: what the word `xyz` is called.
    "first": ([("B-thing", 1.0), ("B-place", 9.0), ("I-place", 9.0)], "thing"),
    "average": ([("B-thing", 3.0), ("B-place", 2.5), ("B-place", 2.5)], "place"),
    "max": ([("B-thing", 3.0), ("B-place", 2.5), ("B-place", 2.5)], "thing"),
}


@pytest.mark.parametrize("aggregation", WORDS)
def test_what_decides_the_tag_of_a_word(tokenizer: TextTokenizer, aggregation: Any) -> None:
    """Its first token, the mean over its tokens, or the surest of them; its score is the probability that decided."""
    tags, expected = WORDS[aggregation]
    (aligned,) = tokenizer.encode_aligned(["is xyz"], truncate=True)
    logits = np.zeros((len(aligned.ids), len(LABELS)), np.float32)
    for row, (name, logit) in zip(logits[2:], tags, strict=False):
        row[LABELS.index(name)] = logit
    options = TagOptions(aggregation)
    (found,) = tag.finish("is xyz", aligned, (logits,), options, LABELS, tokenizer.name)
    probabilities = np.exp(logits[2:5]) / np.exp(logits[2:5]).sum(axis=1, keepdims=True)
    decided = {
        "first": probabilities[0],
        "average": probabilities.mean(axis=0),
        "max": probabilities[int(probabilities.max(axis=1).argmax())],
    }
    assert (found.entity_group, found.word, found.start, found.end) == (expected, "xyz", 3, 6)
    assert found.score == pytest.approx(float(decided[aggregation].max()))


def test_ungrouped_tokens(tokenizer: TextTokenizer) -> None:
    """`none` gives each token by the vocabulary's name, with its whole tag, place and characters."""
    options = TagOptions("none")
    found = entities(tokenizer, "is xy →", ["O", "B-thing", "I-thing", "B-place"], options)
    assert [(one.entity, one.index, one.word, one.start, one.end) for one in found] == [
        ("B-thing", 2, "x", 3, 4),
        ("I-thing", 3, "##y", 4, 5),
        ("B-place", 4, tokenizer.name(vocabulary()["[UNK]"]), 6, 7),
    ]


def test_ignored_tags(tokenizer: TextTokenizer) -> None:
    """A request says which tags are no entities: none of them, or others."""
    tags = ["O", "B-thing"]
    everything = entities(tokenizer, "the server", tags, TagOptions(ignore_labels=()))
    assert [entity.entity_group for entity in everything] == ["O", "thing"]
    assert entities(tokenizer, "the server", tags, TagOptions(ignore_labels=("O", "thing"))) == []


def test_an_entitys_score_is_the_mean_of_its_words(tokenizer: TextTokenizer) -> None:
    """Each word counts with the probability of its tag."""
    (found,) = entities(tokenizer, "the server", ["B-thing", "I-thing"])
    assert found.score == pytest.approx(OF_SIX)


def test_a_long_text_is_cut_and_says_so(tokenizer: TextTokenizer) -> None:
    """What is cut off is counted, or the text is refused."""
    text = " ".join(["server"] * 40)
    (aligned,) = tokenizer.encode_aligned([text], truncate=True)
    assert (len(aligned.ids), aligned.truncated) == (24, 18)
    with pytest.raises(InvalidRequest, match="input 0 has 42 tokens"):
        tokenizer.encode_aligned([text], truncate=False)


def test_a_pair_has_no_places(tokenizer: TextTokenizer) -> None:
    """Only texts can be tagged."""
    with pytest.raises(InvalidRequest, match="one text"):
        tag.encode(tokenizer, [("a", "b")], TagOptions(), truncate=True)
