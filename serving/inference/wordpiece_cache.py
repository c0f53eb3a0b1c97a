"""Caches the token ids of words, for tokenizers that treat each word of plain text separately.

BERT's tokenizer splits text at blanks and around punctuation, and tokenizes every word independently. So the tokens of
plain ASCII text are those of its words in order, and known words need not be tokenized again. The tokenizers library
does much more, and its code leaves the CPU caches whenever a model's weights pass through them. For a short text
between two inferences, the cache took a quarter of the library's time.

Text with any other character, or that may contain an added token such as `[MASK]`, is left to the tokenizer.
"""

from __future__ import annotations

import json
import re
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

MAX_WORDS = 32_768
"""Maximum number of words before the cache is cleared: a few megabytes."""

LONGEST_WORD = 32
"""Characters of the longest word that is cached."""

_WORD = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]")
_PLAIN = "\t\n\r" + "".join(map(chr, range(0x20, 0x7F)))


class WordpieceCache:
    def __init__(self, tokenizer: Tokenizer, *, frame: Sequence[int], lowercase: bool, plain: str) -> None:
        """Starts empty; use `wordpiece_cache_for`.

        `frame` holds the ids of the special tokens before and after a text, `plain` every character that a text may
        contain.
        """
        self._tokenizer = tokenizer
        self._lowercase = lowercase
        self._is_plain = re.compile(f"[{re.escape(plain)}]*").fullmatch
        self._tokens_of: dict[str, bytes] = {}
        self._head, self._tail = (array("i", [token]).tobytes() for token in frame)

    def encode(self, text: str) -> array[int] | None:
        """The text's token ids with special tokens; None if the tokenizer itself must read it."""
        if not self._is_plain(text):
            return None
        words = _WORD.findall(text.lower() if self._lowercase else text)
        try:
            tokens = b"".join(map(self._tokens_of.__getitem__, words))
        except KeyError:
            tokens = b"".join(map(self._look_up, words))
        ids = array("i", self._head)
        ids.frombytes(tokens + self._tail)
        return ids

    def _look_up(self, word: str) -> bytes:
        tokens = self._tokens_of.get(word)
        if tokens is None:
            tokens = array("i", self._tokenizer.encode(word, add_special_tokens=False).ids).tobytes()
            if len(word) <= LONGEST_WORD:
                if len(self._tokens_of) >= MAX_WORDS:
                    self._tokens_of.clear()
                self._tokens_of[word] = tokens
        return tokens


def wordpiece_cache_for(tokenizer: Tokenizer) -> WordpieceCache | None:
    """A cache for a tokenizer that treats each word of plain text separately; None for any other.

    Such a tokenizer has BERT's normalization and splitting, and one special token on either side of a text.
    """
    # Part by part, because serializing a whole tokenizer as JSON takes 30 ms.
    normalizer, splitter = map(_settings, (tokenizer.normalizer, tokenizer.pre_tokenizer))
    if normalizer.get("type") != "BertNormalizer" or splitter.get("type") != "BertPreTokenizer":
        return None
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    frame = tokenizer.encode("").ids
    if len(frame) != 2 or tokenizer.encode("a").ids != [frame[0], *bare, frame[1]]:  # noqa: PLR2004  as above
        return None
    added = {token.content[:1] for token in tokenizer.get_added_tokens_decoder().values()}
    plain = "".join(character for character in _PLAIN if not added & {character.lower(), character.upper()})
    return WordpieceCache(tokenizer, frame=frame, lowercase=normalizer["lowercase"], plain=plain)


def _settings(part: Any) -> dict[str, Any]:  # noqa: ANN401  the library has no types for it
    settings: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return settings
