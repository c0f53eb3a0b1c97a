"""Finds the rules of a tokenizer.json that are not known to be linear in time and memory.

The rules that Transformers writes are linear. A bundle may contain any other regex, which may hang on some text, or
replacements that multiply each other. Such rules run in a process that can be killed (`tokenizer_process`).
"""

from __future__ import annotations

import base64
import binascii
import json
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SECTIONS = ("normalizer", "pre_tokenizer", "decoder")
"""The parts that rewrite and split texts."""

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN = frozenset(
    {
        *(" {2,}", r"\s+", r"\s{2,}|[\n\r\t]", r"\n", r"[\n\r\t]", r"^▁+$"),  # SentencePiece's and CLIP's normalizers
        *(  # CLIP
            rf"{_CONTRACTIONS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+",
            rf"<\|startoftext\|>|<\|endoftext\|>|{_CONTRACTIONS}|[\p{{L}}]+|[\p{{N}}]|[^\s\p{{L}}\p{{N}}]+",
        ),
        rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+",  # GPT-2
        *(  # cl100k and those made after it: Llama 3, EuroBERT, Qwen
            rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^\s{rest}]+[\r\n]*|{_SPACES}"
            for letters, rest in ((r"\p{L}", r"\p{L}\p{N}"), (r"[\p{L}\p{M}]", r"\p{L}\p{M}\p{N}"))
            for digits in (r"\p{N}", r"\p{N}{1,3}")
        ),
    }
)
"""Regexes that take linear time on any text."""

_KNOWN_GROWTH = 4
MAX_GROWTH = 16
"""Maximum factor by which a bundle's own rule may lengthen a text."""
_MAX_LETTERS = 64
"""Maximum length of a replacement for one letter, or of a prefix: NFKC turns U+FDFA into 18 letters, of 33 bytes."""
_LONGEST_TOKEN = 1024
_LONGEST_WORD = 200
"""Maximum word length: WordPiece tries every part of a word."""
_MAX_PIECES = 64


MAX_ID = (1 << 24) - 1
"""The largest token id; vocabularies have 250,000."""

PROBE_LETTERS = 4096
"""Length of a hostile text: quadratic rules pass, rules that grow faster do not."""
_USUAL = "aA1 \n.é▁x"
_MAX_DISTINCT = 48


def foreign_rules(content: Mapping[str, Any]) -> dict[str, Any]:
    """The rules of a tokenizer.json that may be unbounded, by their places in it.

    A place outside `SECTIONS` is tried only together with all others.
    """
    try:
        return _foreign_rules(content)
    except (AttributeError, LookupError, TypeError, ValueError):  # no tokenizer of the library's has such values
        return {"model": content.get("model")}


def _foreign_rules(content: Mapping[str, Any]) -> dict[str, Any]:
    rules = [found for section in SECTIONS for found in _rules(section, content.get(section))]
    foreign = {place: rule for place, rule in rules if not _is_known(rule)}
    growth = {place: growth_of(rule) for place, rule in rules if place not in foreign}
    together = 1.0
    for place, rule in rules:
        together *= growth.get(place, 1.0)
        if together > _KNOWN_GROWTH:
            foreign[place] = rule
            together = 1.0
    model = content.get("model") or {}
    words = model.get("vocab") or {}
    tokens = words if isinstance(words, dict) else [word if isinstance(word, str) else word[0] for word in words]
    added = [token.get("content", "") for token in content.get("added_tokens") or ()]
    longest = max(map(len, chain(tokens, added)), default=0)
    if longest > _LONGEST_TOKEN or model.get("max_input_chars_per_word", 0) > _LONGEST_WORD:
        foreign["model"] = model
    post = content.get("post_processor") or {}
    steps = post.get("processors", [post])
    if any(len(step.get(form) or ()) > _MAX_PIECES for step in steps for form in ("single", "pair")):
        foreign["post_processor"] = post
    return foreign


def largest_id(content: Mapping[str, Any]) -> int:
    """The largest token id, for each of which up to it the library takes memory."""
    model, added = content.get("model"), content.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    ids = [*words.values()] if isinstance(words, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((each for each in ids if isinstance(each, int)), default=0)


def letters_of(rule: Mapping[str, Any]) -> str:
    pattern = rule.get("pattern")
    return "".join(map(str, pattern.values())) if isinstance(pattern, dict) else json.dumps(rule, ensure_ascii=False)


def hostile_texts(letters: str, length: int) -> Iterator[str]:
    """Long runs of one letter, alone and followed by another, and of two alternating letters."""
    distinct = list(dict.fromkeys(_USUAL + letters))[:_MAX_DISTINCT]
    for index, letter in enumerate(distinct):
        run, other = letter * length, distinct[index - 1]
        yield from (run, run + "\x01", run + other, (letter + other) * (length // 2) + "\x01")


def _rules(place: str, rule: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401  JSON
    """Single rules with their places; sequences are expanded."""
    if not isinstance(rule, dict):
        return
    if rule.get("type") == "Sequence":
        for name, members in rule.items():
            if isinstance(members, list):
                for index, member in enumerate(members):
                    yield from _rules(f"{place}.{name}[{index}]", member)
    else:
        yield place, rule


def _is_known(rule: Mapping[str, Any]) -> bool:
    pattern = rule.get("pattern")
    if isinstance(pattern, dict) and "Regex" in pattern and pattern["Regex"] not in KNOWN:
        return False
    if rule.get("type") == "Precompiled":
        return _longest_replacement(rule.get("precompiled_charsmap") or "") <= _MAX_LETTERS
    return len(rule.get("prepend") or "") <= _MAX_LETTERS


def growth_of(rule: Mapping[str, Any]) -> float:
    """The maximum factor by which a replacement may lengthen a text; a regex may match a single letter."""
    pattern = rule.get("pattern")
    if rule.get("type") != "Replace" or not isinstance(pattern, dict):
        return 1.0
    return max(1.0, len(rule.get("content") or "") / max(1, len(pattern.get("String") or "")))


def _longest_replacement(charsmap: str) -> int:
    """The longest replacement in SentencePiece's compiled map.

    The map holds the size of a trie in 4 bytes, the trie, and zero-terminated texts.
    """
    try:
        compiled = base64.b64decode(charsmap, validate=True)
    except (ValueError, binascii.Error):
        return _MAX_LETTERS + 1
    texts = compiled[4 + int.from_bytes(compiled[:4], "little") :]
    return max(map(len, texts.split(b"\0")))
