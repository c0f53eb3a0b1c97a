"""Text to token ids, with the demo model's own tokenizer."""

from __future__ import annotations

import functools
import itertools
import json
from typing import TYPE_CHECKING

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer, SentencePieceUnigramTokenizer, Tokenizer

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models.bundle import open_bundle
from tests.support.expected import tokenizer as library
from tests.support.expected import words
from tests.support.models import MAX_LENGTH, NAME

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers.implementations import BaseTokenizer

    from bertserve.serving.records import Side, Truncate

CLS, SEP = 101, 102


@pytest.fixture(scope="module")
def tokenizer(models: Path) -> TextTokenizer:
    path = models / NAME / "1"
    return TextTokenizer.open(path, open_bundle(path).manifest)


@pytest.mark.parametrize(
    "given_input", ["What is a T4?", "[CLS] a [SEP] b", ("a question", "its context")], ids=["text", "special", "pair"]
)
def test_ids_are_the_librarys(tokenizer: TextTokenizer, models: Path, given_input: str | tuple[str, str]) -> None:
    """Special tokens included, and what looks like one; the second part of a pair has segment 1."""
    (encoded,) = tokenizer.encode([given_input], truncate=True)
    pair = isinstance(given_input, tuple)
    expected = library(models).encode(*(given_input if isinstance(given_input, tuple) else (given_input,)))
    assert list(encoded.ids) == expected.ids
    assert (encoded.ids[0], encoded.ids[-1], encoded.truncated) == (CLS, SEP, 0)
    assert encoded.type_ids is None or list(encoded.type_ids) == expected.type_ids
    assert (encoded.type_ids is not None) == (1 in expected.type_ids) == pair


def test_several_inputs(tokenizer: TextTokenizer) -> None:
    """Inputs of every kind stand beside one another and keep their order."""
    encoded = tokenizer.encode(["one", ("a", "b"), [CLS, 2051, SEP], ""], truncate=True)
    assert [list(text.ids)[1:-1] != [] for text in encoded] == [True, True, True, False]
    assert list(encoded[2].ids) == [CLS, 2051, SEP]
    assert list(encoded[3].ids) == [CLS, SEP]


@pytest.mark.parametrize(("tokens", "cut"), [(MAX_LENGTH - 1, 0), (MAX_LENGTH, 0), (MAX_LENGTH + 1, 1), (1000, 744)])
def test_truncation(tokenizer: TextTokenizer, models: Path, tokens: int, cut: int) -> None:
    """A long text keeps its beginning and both special tokens; the number of tokens cut is exact."""
    text = words(models, tokens)
    (encoded,) = tokenizer.encode([text], truncate=True)
    whole = library(models).encode(text).ids
    assert encoded.truncated == cut
    assert list(encoded.ids) == [*whole[: min(tokens, MAX_LENGTH) - 1], SEP]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (300, 300, (127, 126)),
        (600, 10, (243, 10)),
        (10, 600, (10, 243)),
        (126, 127, (126, 127)),
        (127, 127, (126, 127)),
    ],
)
def test_truncation_of_pairs(
    tokenizer: TextTokenizer, models: Path, first: int, second: int, kept: tuple[int, int]
) -> None:
    """Of a pair the longer part is cut first, until both are equal; three special tokens stay."""
    pair = (words(models, first + 2), words(models, second + 2))
    (encoded,) = tokenizer.encode([pair], truncate=True)
    segments = list(encoded.type_ids or ())
    assert len(encoded.ids) == min(MAX_LENGTH, first + second + 3)
    assert encoded.truncated == first + second + 3 - len(encoded.ids)
    assert sorted((segments.count(0) - 2, segments.count(1) - 1)) == sorted(kept)
    assert [encoded.ids[0], list(encoded.ids).count(SEP), encoded.ids[-1]] == [CLS, 2, SEP]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pairs_are_cut_as_transformers_cuts_them(models: Path, side: Side) -> None:
    """Whatever the lengths of both parts and the room: the same tokens are left, and the odd one to the longer part."""
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library(models), truncation_side=side)
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    pairs = [(" ".join(names[:one]), " ".join(names[:two])) for one in range(10) for two in range(10)]
    for length in range(3, 22):
        ours = TextTokenizer(library(models), length, 30_522, truncation_side=side)
        columns = map(list, zip(*pairs, strict=True))
        wanted = theirs(*columns, truncation="longest_first", max_length=length, return_token_type_ids=True)
        for truncate in (True, side):
            found = ours.encode(pairs, truncate=truncate)
            assert [list(text.ids) for text in found] == wanted["input_ids"], length
            assert [list(text.type_ids or ()) for text in found] == wanted["token_type_ids"], length


@pytest.mark.parametrize("side", ["left", "right"])
def test_first_texts_are_cut_as_transformers_cuts_them(models: Path, side: Side) -> None:
    """Where the second text stays whole, the first is cut alone and keeps a token, or the pair is refused by name."""
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library(models), truncation_side=side)
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    made = {length: TextTokenizer(library(models), length, 30_522, truncation_side=side) for length in (5, 12, 20)}
    for (length, ours), one, two in itertools.product(made.items(), range(10), range(1, 10)):
        pair = (" ".join(names[:one]), " ".join(names[:two]))
        try:
            wanted = theirs(*pair, truncation="only_first", max_length=length)["input_ids"]
        except Exception:  # noqa: BLE001  the binding's "Sequence to truncate too short" is a bare Exception
            with pytest.raises(InvalidRequest, match=f"a label has {two} tokens; at most {length - 4} fit"):
                ours.encode([pair], truncate=True, whole="a label")
        else:
            (found,) = ours.encode([pair], truncate=True, whole="a label")
            assert list(found.ids) == wanted


def test_a_model_has_an_end_of_its_own_that_is_cut(models: Path) -> None:
    """It counts wherever no other is named: for texts, aligned texts, first parts before windows, fewer tokens."""
    text = "one two three four five six seven eight nine"
    own = TextTokenizer(library(models), 6, 30_522, truncation_side="left")
    other = TextTokenizer(library(models), 6, 30_522)
    assert own.encode([text], truncate=True) == other.encode([text], truncate="left")
    assert own.encode([text], truncate="right") == other.encode([text], truncate=True)
    ((aligned,), (plain,)) = (made.encode_aligned([text], truncate=True) for made in (own, other))
    assert [text[slice(*made.spans[1])] for made in (aligned, plain)] == ["six", "one"]
    assert own.shortened(text, 2) == ("eight nine", 7)
    assert own.shortened(text, 2, truncate="right") == ("one two", 7)
    windows = [
        made.encode_windows([(text, "zero " * 40)], length=16, overlap=0, truncate=True)[0] for made in (own, other)
    ]
    assert [made.decode(window.ids[1:6]) for made, window in zip((own, other), windows, strict=True)] == [
        "five six seven eight nine",
        "one two three four five",
    ]


def test_types_of_a_lone_text_are_the_tokenizers(models: Path) -> None:
    """A tokenizer may say of a lone text that it is of the second segment."""
    document = json.loads(library(models).to_str())
    for piece in document["post_processor"]["single"]:
        for part in piece.values():
            part["type_id"] = 1
    made = TextTokenizer(Tokenizer.from_str(json.dumps(document)), 8, 30_522)
    long = "one two three four five six seven eight"
    for encoded in [*made.encode(["one", long], truncate=True), *made.encode_aligned([long], truncate=True)]:
        assert list(encoded.type_ids or ()) == [1] * len(encoded.ids)
    for window in made.encode_windows([long], length=6, overlap=0, truncate=True):
        assert list(window.type_ids or ()) == [1] * len(window.ids)


@pytest.mark.parametrize(("truncate", "kept"), [(True, slice(MAX_LENGTH)), ("left", slice(44, None))])
def test_texts_without_special_tokens(tokenizer: TextTokenizer, models: Path, truncate: Truncate, kept: slice) -> None:
    """They may have as many tokens of their own as others with special ones."""
    long = words(models, 302)
    encoded = tokenizer.encode_bare(["What is a T4?", "", long], truncate=truncate)
    expected = [library(models).encode(text, add_special_tokens=False).ids for text in ("What is a T4?", "", long)]
    assert [list(text.ids) for text in encoded] == [*expected[:2], expected[2][kept]]
    assert [text.truncated for text in encoded] == [0, 0, 300 - MAX_LENGTH]
    with pytest.raises(InvalidRequest, match=f"input 1 has 300 tokens; the model takes {MAX_LENGTH}"):
        tokenizer.encode_bare(["a", long], truncate=False)


def test_truncation_refused(tokenizer: TextTokenizer, models: Path) -> None:
    """With truncation off, the first input that is too long is named with its length."""
    with pytest.raises(InvalidRequest, match=r"input 1 has 257 tokens.* 256"):
        tokenizer.encode(["short", words(models, MAX_LENGTH + 1)], truncate=False)


@pytest.mark.parametrize(("truncate", "kept"), [(True, "What is a T"), ("right", "What is a T"), ("left", "a T4?")])
def test_a_text_of_fewer_tokens(tokenizer: TextTokenizer, truncate: Truncate, kept: str) -> None:
    """It ends, or begins, with the characters of the tokens that are kept; one that is short enough is not touched."""
    text = "  What is a T4?"  # what is a t ##4 ?
    tokens = 4
    assert tokenizer.shortened(text, 6, truncate=truncate) == (text, 0)
    short, surplus = tokenizer.shortened(text, tokens, truncate=truncate)
    assert (short.strip(), surplus) == (kept, 2)


def test_a_text_of_fewer_tokens_than_are_read(tokenizer: TextTokenizer) -> None:
    """Of a long text the count is an estimate, and its end is its own."""
    text = "the server " * 20_000 + "and a text"
    cuts: list[tuple[Truncate, str]] = [(True, "the server the"), ("left", "and a text")]
    for truncate, kept in cuts:
        short, surplus = tokenizer.shortened(text, 3, truncate=truncate)
        assert short == kept
        assert surplus == pytest.approx(40_000, rel=0.01)


@pytest.mark.parametrize("ids", [[0], [30_521], [CLS] * MAX_LENGTH])
def test_token_ids(tokenizer: TextTokenizer, ids: list[int]) -> None:
    """Ids of the vocabulary are taken as they are, up to the model's length."""
    (encoded,) = tokenizer.encode([ids], truncate=True)
    assert list(encoded.ids) == ids


@pytest.mark.parametrize("ids", [[], [-1], [30_522], [10**30], [CLS] * (MAX_LENGTH + 1)], ids=lambda ids: str(ids)[:20])
@pytest.mark.parametrize("truncate", [True, False])
def test_bad_token_ids(tokenizer: TextTokenizer, ids: list[int], truncate: bool) -> None:  # noqa: FBT001
    """Ids that the model does not have, none, or too many are refused: they are never cut."""
    with pytest.raises(InvalidRequest, match="input 1"):
        tokenizer.encode(["fine", ids], truncate=truncate)


def test_size(tokenizer: TextTokenizer) -> None:
    """The size counts characters of texts and pairs, and four for each id; as many as the limit says are read."""
    assert tokenizer.sizes_bytes(["four", ("ab", "c"), [1, 2], "x" * 8192]) == [4, 3, 8, 8192]


@pytest.mark.parametrize("too_long", ["x" * 8193, ("x" * 8000, "y" * 193)], ids=["text", "pair"])
def test_size_limit(tokenizer: TextTokenizer, too_long: str | tuple[str, str]) -> None:
    """A text or pair of more than 32 characters for each of the model's tokens is refused where it may not be cut."""
    with pytest.raises(InvalidRequest, match=r"input 2 has 8193 characters.* 8192.* allow truncation"):
        tokenizer.sizes_bytes(["a", "b", too_long])
    assert tokenizer.sizes_bytes(["a", too_long], truncate=True) == [1, 8193]


@functools.cache
def short(models: Path, kind: str) -> TextTokenizer:
    """Ours for texts of 16 tokens, once for all examples: making one reads the whole vocabulary."""
    whole = library(models) if kind == "wordpiece" else trained(kind)
    return TextTokenizer(whole, max_length=16, vocab_size=30_522)


@given(st.lists(st.text(max_size=200), min_size=1, max_size=4))
def test_any_text(models: Path, texts: list[str]) -> None:
    """Whatever the text, it becomes at most the model's length of its vocabulary's ids, between [CLS] and [SEP]."""
    made = short(models, "wordpiece")
    encoded = made.encode(texts, truncate=True)
    for text, given_text in zip(encoded, texts, strict=True):
        assert 2 <= len(text.ids) <= 16
        assert (text.ids[0], text.ids[-1]) == (CLS, SEP)
        assert len(text.ids) + text.truncated == len(library(models).encode(given_text).ids)
        assert text == made.encode([given_text], truncate=True)[0], "neighbours change nothing"


_PIECES = st.sampled_from(
    [
        *("server", "été", "e\u0301\u0323", "\u0323\u0301", "日本語の文字", "한국어", "\u1100\u1161\u11a8", "don't"),
        *("x" * 120, "ab" * 300, " " * 40, "\n", "\t \n", "[SEP]", "[MASK", "👩\u200d👧", "\ufdfa", "\u0600"),
        *("1234567", "a-b_c", "."),
    ]
)
_LONG = st.lists(st.tuples(_PIECES, st.sampled_from(["", " ", "  "])), min_size=60, max_size=200).map(
    lambda pieces: "".join(word + blank for word, blank in pieces)
)


@functools.cache
def trained(kind: str) -> Tokenizer:
    """A tokenizer of another kind than BERT's, trained on a few words."""
    made: BaseTokenizer
    if kind == "bpe":
        made = ByteLevelBPETokenizer(unicode_normalizer="nfc")
        made.train_from_iterator(["the server is in the text, don't 1234567 été"] * 4, vocab_size=400)
    else:
        made = SentencePieceUnigramTokenizer()
        made.train_from_iterator(
            ["the server is in the text, don't 1234567 été 日本語の文字"] * 4,
            vocab_size=120,
            special_tokens=["<unk>"],
            unk_token="<unk>",  # noqa: S106  no password
        )
    return Tokenizer.from_str(made.to_str())


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
@pytest.mark.parametrize("truncate", [True, "left"])
@settings(max_examples=25)
@given(text=_LONG)
def test_a_long_text_is_cut_as_if_it_were_read_whole(models: Path, kind: str, truncate: Truncate, text: str) -> None:
    """What is kept of it are the first, or last, tokens of the whole, though not all of it is read."""
    whole = library(models) if kind == "wordpiece" else trained(kind)
    made = short(models, kind)
    ids = whole.encode(text, add_special_tokens=False).ids
    room = 16 - len(made.frame)
    kept = ids[-room:] if truncate == "left" else ids[:room]
    (encoded,) = made.encode([text], truncate=truncate)
    assert list(encoded.ids)[len(made.frame) // 2 :][: len(kept)] == kept
    assert (encoded.truncated > 0) == (len(ids) > room)


def test_a_text_of_megabytes_is_cut(tokenizer: TextTokenizer) -> None:
    """Its first tokens stay; how many were cut is counted at the rate of what was read. Pairs are cut likewise."""
    text = "the server is in the text. " * 150_000
    (encoded,) = tokenizer.encode([text], truncate=True)
    (short,) = tokenizer.encode([text[:6000]], truncate=True)
    assert encoded.ids == short.ids
    assert encoded.truncated == pytest.approx(7 * 150_000, rel=0.01)
    pairs = [("is it in", text), (text, "is it in"), (text, text)]
    small = [tuple(part[:6000] for part in pair) for pair in pairs]
    for long, cut in zip(tokenizer.encode(pairs, truncate=True), tokenizer.encode(small, truncate=True), strict=True):
        assert (long.ids, long.type_ids) == (cut.ids, cut.type_ids)
        assert long.truncated > 1_000_000
    (aligned,) = tokenizer.encode_aligned([text], truncate=True)
    assert aligned.ids == encoded.ids
    assert text[slice(*aligned.spans[2])] == "server"
    (aligned,) = tokenizer.encode_aligned([text], truncate="left")
    assert [text[slice(*span)] for span in aligned.spans[-3:-1]] == ["text", "."]


@pytest.mark.parametrize("sparse", [" " * 4_000_000, "x" * 4_000_000], ids=["blanks", "word"])
def test_a_text_of_few_tokens_is_cut_too(tokenizer: TextTokenizer, sparse: str) -> None:
    """However few tokens it has, not more than `MAX_CHARACTERS` of it are read, and the rest counts as cut off."""
    (encoded,) = tokenizer.encode([sparse + " server"], truncate=True)
    assert len(encoded.ids) <= 3
    assert encoded.truncated >= 1


def test_truncation_at_the_beginning(tokenizer: TextTokenizer) -> None:
    """The end of a text stays, with the special tokens around it."""
    text = " ".join(["server"] * 300 + ["text"])
    (right,), (left,) = (tokenizer.encode([text], truncate=truncate) for truncate in (True, "left"))
    whole = tokenizer.encode(["server text"], truncate=True)[0].ids
    assert right.truncated == left.truncated == 303 - MAX_LENGTH
    assert right.ids[-2] == whole[1]
    assert list(left.ids[-2:]) == list(whole[-2:])
    assert left.ids[0] == right.ids[0]


def test_ids_that_are_turned_into_text(tokenizer: TextTokenizer) -> None:
    """They must be the vocabulary's, and not too many."""
    tokenizer.check_readable([])
    tokenizer.check_readable([0, 30_521])
    for ids in ([-1], [30_522], [0] * (tokenizer.max_characters + 1)):
        with pytest.raises(InvalidRequest):
            tokenizer.check_readable(ids)
