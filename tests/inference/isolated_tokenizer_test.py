"""Tokenizers with rules of their own: what is tried before they are served, and what a text can cost."""

from __future__ import annotations

import base64
import json
import os
import signal
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from bertserve.serving.errors import BundleError, DeadlineExceeded, InvalidRequest
from bertserve.serving.inference.tokenizer import IsolatedTokenizer, TextTokenizer, opened_tokenizer
from bertserve.serving.inference.tokenizer_process import PROBE, OverLimitError, TokenizerProcess
from bertserve.serving.inference.tokenizer_rules import KNOWN, foreign_rules, letters_of
from bertserve.serving.models.manifest import TOKENIZER
from tests.support.models import MAX_LENGTH, NAME
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.serving.records import TextInput

CLS, SEP, MASK = 101, 102, 103
VOCAB = 3000
QUADRATIC = " +▁"
"""Of one of Transformers' own tokenizers; on n blanks it takes n * n / 2 steps."""

PUBLISHED = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
"""As the files of GPT-2, CLIP and Llama 3 have them."""


def replace(pattern: str, content: str = "", kind: str = "Regex") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(name: str, *rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(rules)}


@pytest.fixture(scope="module")
def content(models: Path) -> dict[str, Any]:
    """The demo model's tokenizer.json with the first of its words, which has no rule of its own."""
    decoded: dict[str, Any] = json.loads((models / NAME / "1" / TOKENIZER).read_bytes())
    decoded["model"]["vocab"] = {word: at for word, at in decoded["model"]["vocab"].items() if at < VOCAB}
    assert foreign_rules(decoded) == {}
    return decoded


def opened(content: dict[str, Any], **changes: Any) -> TextTokenizer:
    return opened_tokenizer(json.dumps(content | changes), MAX_LENGTH, VOCAB, MASK, "right")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"normalizer": replace("(x+x+)+y")}, "normalizer cannot be used on a text of 4096 letters"),
        (
            {"pre_tokenizer": sequence("pretokenizers", {"type": "Whitespace"}, split("(a|aa)+$"))},
            "pre_tokenizer.pretokenizers[1] cannot be used",
        ),
        (
            {"normalizer": sequence("normalizers", {"type": "NFC"}, replace("q", "z" * 100_000, "String"))},
            "normalizer.normalizers[1] makes a text more than 16 times as long",
        ),
        ({"normalizer": replace("q+", "z" * 1_000_000)}, "normalizer cannot be used"),
        (
            {"normalizer": sequence("normalizers", *[replace("a", "aa", "String")] * 20)},
            "normalizer.normalizers[2] with normalizer.normalizers[5] with normalizer.normalizers[8] takes more than",
        ),
        ({"decoder": replace("(x+x+)+y")}, "decoder cannot be used"),
        ({"normalizer": replace("(((a")}, "normalizer cannot be used"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 10**9}, "unk_token": "a"}}, "has the token ID 1000000000; the"),
    ],
    ids=["exponential", "alternation", "string", "grows", "multiplies", "decoder", "broken", "gigabytes"],
)
def test_a_rule_that_hurts_is_refused_with_its_place(
    content: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    """Before anything is served, and by a process that is not the server's."""
    with pytest.raises(BundleError) as refused:
        opened(content, **changes)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        ({"normalizer": replace("[0-9]{4}")}, ["normalizer"]),
        ({"normalizer": replace("a", "a" * 5, "String")}, ["normalizer"]),
        ({"normalizer": replace(" ", "▁", "String")}, []),
        ({"normalizer": replace(" {2,}", "▁")}, []),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 100}}, ["normalizer"]),
        ({"pre_tokenizer": split("a+")}, ["pre_tokenizer"]),
        *(({"pre_tokenizer": split(pattern)}, []) for pattern in PUBLISHED),
        ({"decoder": sequence("decoders", {"type": "Fuse"}, replace("b+"))}, ["decoder.decoders[1]"]),
        ({"model": {"type": "WordLevel", "vocab": {"x" * 2000: 0}}}, ["model"]),
        ({"model": {"type": "WordPiece", "vocab": {"x": 0}, "max_input_chars_per_word": 10_000}}, ["model"]),
        ({"post_processor": {"type": "TemplateProcessing", "single": [{}] * 100}}, ["post_processor"]),
        *(
            (
                {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(compiled).decode()}},
                places,
            )
            for compiled, places in (
                (b"\x08\0\0\0" + bytes(8) + b"fi\0" + b"x" * 33 + b"\0", []),
                (b"\x08\0\0\0" + bytes(8) + b"fi\0" + b"x" * 5000 + b"\0", ["normalizer"]),
                (b"\x08", []),
            )
        ),
    ],
)
def test_what_is_known_to_be_bounded(changes: dict[str, Any], places: list[str]) -> None:
    """Everything else is the tokenizer's own, and named by its place."""
    assert list(foreign_rules(changes)) == places


@pytest.mark.slow
def test_known_regexes_take_linear_time() -> None:
    """Eight times the length that rules of a bundle's own are tried on fits into the same CPU time."""
    process = TokenizerProcess("", ())
    for pattern in sorted(KNOWN):
        process.call(PROBE, "pre_tokenizer", split(pattern), letters_of(split(pattern)), 32_768)
    with pytest.raises(OverLimitError):
        process.call(PROBE, "pre_tokenizer", split(QUADRATIC), letters_of(split(QUADRATIC)), 32_768)


YEAR = replace("(19|20)[0-9]{2}", "year")
"""A harmless rule that no known tokenizer has."""


@pytest.fixture(scope="module")
def both(content: dict[str, Any]) -> tuple[IsolatedTokenizer, TextTokenizer]:
    """The same tokenizer, in a process of its own and in this one."""
    changed = content | {"normalizer": sequence("normalizers", YEAR, content["normalizer"])}
    isolated = opened(changed)
    assert isinstance(isolated, IsolatedTokenizer)
    here = TextTokenizer(Tokenizer.from_str(json.dumps(changed)), MAX_LENGTH, VOCAB, MASK, "right")
    return isolated, here


TEXTS = ["In 1984 and 2001.", "", "Ünïcode 東京 \U0001f600", "a " * 3000]
PAIRS = [("Who wrote 1984?", "Orwell wrote it in 1948. " * 60), ("a", "b")]


def test_it_answers_as_the_library_does(both: tuple[IsolatedTokenizer, TextTokenizer]) -> None:
    """Its own rule works: both numbers become the same word."""
    (encoded,) = both[0].encode(["In 1984"], truncate=True)
    (same,) = both[0].encode(["in year"], truncate=True)
    assert list(encoded.ids) == list(same.ids) == both[1]._tokenizer.encode("In 1984").ids


@pytest.mark.parametrize(
    ("method", "args", "options"),
    [
        ("encode", ([*TEXTS, *PAIRS, [CLS, 2051, SEP]],), {"truncate": True}),
        ("encode", ([*TEXTS, *PAIRS],), {"truncate": "left"}),
        ("encode_bare", (TEXTS,), {"truncate": True}),
        ("encode_aligned", (TEXTS,), {"truncate": True}),
        ("encode_windows", ([*TEXTS, *PAIRS],), {"length": 64, "overlap": 8, "truncate": True}),
        ("encode_chunks", (PAIRS,), {"tokens": 40, "overlap": 4, "most": 100}),
        ("shortened", (TEXTS[0], 4), {}),
        ("decode", ([CLS, 2051, 2020, SEP],), {"bare": True}),
        ("first_id", ("1984",), {}),
        ("tokens", (TEXTS[0],), {"special": True}),
    ],
)
def test_every_method_answers_as_it_does_here(
    both: tuple[IsolatedTokenizer, TextTokenizer], method: str, args: Any, options: Any
) -> None:
    """With the same kinds of objects, arrays included."""
    isolated, here = (getattr(tokenizer, method)(*args, **options) for tokenizer in both)
    if not isinstance(here, list):
        assert isinstance(isolated, list | str | int)
        assert (tuple(isolated) if isinstance(here, tuple) else isolated) == here
        return
    assert len(isolated) == len(here)
    for ours, theirs in zip(isolated, here, strict=True):
        assert type(ours) is type(theirs)
        for name, value in msgspec.structs.asdict(theirs).items():
            found = getattr(ours, name)
            assert type(found) is type(value)
            if isinstance(value, np.ndarray):
                assert found.dtype == value.dtype
            np.testing.assert_array_equal(found, value)


def test_errors_come_back(both: tuple[IsolatedTokenizer, TextTokenizer]) -> None:
    """In the words and of the kinds that they have here."""
    inputs: list[list[TextInput]] = [["a " * 3000], [[1 << 20]], [[CLS, SEP], "a " * 3000]]
    for each in inputs:
        sentences = []
        for tokenizer in both:
            with pytest.raises(InvalidRequest) as refused:
                tokenizer.encode(each, truncate=False)
            sentences.append(str(refused.value))
        assert sentences[0] == sentences[1]


def test_a_process_that_was_killed_costs_no_request(content: dict[str, Any]) -> None:
    """As a kernel without memory kills one: the next text starts another."""
    tokenizer = opened(content, normalizer=YEAR)
    assert isinstance(tokenizer, IsolatedTokenizer)
    os.kill(tokenizer.process.pid, signal.SIGKILL)
    wait_for(tokenizer.process._pipe.poll, "the end of the process", 10)  # type: ignore[union-attr]
    assert len(tokenizer.encode(["a text"], truncate=True)) == 1


def test_a_regex_that_gives_up_is_told_from_a_fault(content: dict[str, Any]) -> None:
    """Texts to try are made from a rule's letters and do not find all that hurts."""
    tokenizer = opened(content, normalizer=replace("VW(Y+Y+)+Z"))
    with pytest.raises(DeadlineExceeded):
        tokenizer.encode(["VW" + "Y" * 5000], truncate=True)
