"""The cache of words against the tokenizer that it learns from."""

from __future__ import annotations

import json
import string
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bertserve.serving.inference import wordpiece_cache
from bertserve.serving.inference.wordpiece_cache import LONGEST_WORD, WordpieceCache, wordpiece_cache_for
from tests.support.models import NAME
from tests.support.texts import mixed, sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Variant = dict[str, Any]


@pytest.fixture(scope="module")
def config(models: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((models / NAME / "1" / "tokenizer.json").read_text(encoding="utf-8"))
    return parsed


@pytest.fixture(scope="module")
def demo(config: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(config))


@pytest.fixture(scope="module")
def shared(demo: Tokenizer) -> WordpieceCache:
    """A cache that goes on from text to text, as a server's does: making one reads the whole vocabulary."""
    return _cache(demo)


def _cache(tokenizer: Tokenizer) -> WordpieceCache:
    cache = wordpiece_cache_for(tokenizer)
    assert cache is not None
    return cache


@given(text=st.text(st.sampled_from(string.printable + "éß日\x00\x7f\u2019\u00a0")))
def test_any_text_is_encoded_as_by_the_tokenizer_or_not_at_all(
    demo: Tokenizer, shared: WordpieceCache, text: str
) -> None:
    """Blanks, marks, capitals and characters beyond ASCII in any order."""
    ids = shared.encode(text)
    assert ids is None or list(ids) == demo.encode(text).ids


@given(text=st.text(st.sampled_from(string.ascii_letters + string.digits + string.punctuation.replace("[", "") + " ")))
def test_plain_text_needs_no_tokenizer(demo: Tokenizer, shared: WordpieceCache, text: str) -> None:
    """All of ASCII but the first character of the added tokens."""
    ids = shared.encode(text)
    assert ids is not None
    assert list(ids) == demo.encode(text).ids


def test_known_words_are_as_new_ones(demo: Tokenizer) -> None:
    """What was learnt is what the tokenizer would say again."""
    cache = _cache(demo)
    texts = [text for text in (*sample(), *mixed(200)) if text.isascii() and "[" not in text]
    assert len(texts) > 100
    for _ in range(2):
        for text in texts:
            ids = cache.encode(text)
            assert ids is not None
            assert list(ids) == demo.encode(text).ids


@pytest.mark.parametrize(
    "text", ["[MASK]", "a [SEP] b", "[", "caf\u00e9", "\u65e5\u672c", "a\x00b", "a\x7fb", "a\u00adb"]
)
def test_other_text_is_left_to_the_tokenizer(demo: Tokenizer, text: str) -> None:
    """Added tokens, accents, scripts without blanks, control characters."""
    assert _cache(demo).encode(text) is None


def test_an_added_token_of_letters_is_found_by_the_tokenizer(config: dict[str, Any]) -> None:
    """It may stand inside a word, and in capitals where it is normalised: its first letter is not plain."""
    added = {**config["added_tokens"][0], "id": 30522, "content": "zorgon", "special": False, "normalized": True}
    tokenizer = Tokenizer.from_str(json.dumps({**config, "added_tokens": [*config["added_tokens"], added]}))
    cache = _cache(tokenizer)
    assert 30522 in tokenizer.encode("a ZORGON card").ids
    assert cache.encode("a ZORGON card") is None
    assert cache.encode("an xzorgon card") is None
    assert cache.encode("a card") is not None


def _cased(config: Variant) -> Variant:
    return {**config, "normalizer": {**config["normalizer"], "lowercase": False}}


def test_a_cased_model_keeps_its_capitals(config: dict[str, Any]) -> None:
    """The cache looks words up as the tokenizer reads them."""
    tokenizer = Tokenizer.from_str(json.dumps(_cased(config)))
    ids = _cache(tokenizer).encode("What is a Tesla?")
    assert ids is not None
    assert list(ids) == tokenizer.encode("What is a Tesla?").ids
    assert list(ids) != list(_cache(Tokenizer.from_str(json.dumps(config))).encode("What is a Tesla?") or ())


@pytest.mark.parametrize(
    "change",
    [
        lambda config: {**config, "pre_tokenizer": {"type": "Whitespace"}},
        lambda config: {**config, "normalizer": {"type": "Lowercase"}},
        lambda config: {**config, "normalizer": None},
        lambda config: {**config, "post_processor": None},
    ],
    ids=["splits otherwise", "normalises otherwise", "normalises nothing", "frames nothing"],
)
def test_another_kind_of_tokenizer_gets_no_cache(config: dict[str, Any], change: Callable[[Variant], Variant]) -> None:
    """Whoever does not treat each word by itself is asked every time."""
    assert wordpiece_cache_for(Tokenizer.from_str(json.dumps(change(config)))) is None


def test_the_cache_is_bounded(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many words nor long ones make it grow, and all are still encoded right."""
    monkeypatch.setattr(wordpiece_cache, "MAX_WORDS", 10)
    cache = _cache(demo)
    for text in [*(f"w{number} x{number}" for number in range(30)), "a" * (LONGEST_WORD + 1), "b" * 8000]:
        ids = cache.encode(text)
        assert ids is not None
        assert list(ids) == demo.encode(text).ids
        assert len(cache._tokens_of) <= 10
        assert all(len(word) <= LONGEST_WORD for word in cache._tokens_of)
