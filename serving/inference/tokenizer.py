"""Text to token ids, with bounds: what is too long is cut and counted, or refused before any work."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import unicodedata
from array import array
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from serving.errors import BertserveError, BundleError, DeadlineExceeded, InternalError, InvalidRequest
from serving.inference.requests import Token
from serving.inference.tokenizer_process import (
    CPU_S,
    MEMORY_BYTES,
    OPEN,
    PROBE,
    OverLimitError,
    TokenizerProcess,
)
from serving.inference.tokenizer_rules import MAX_GROWTH, PROBE_LETTERS, SECTIONS, foreign_rules, growth_of, letters_of
from serving.inference.wordpiece_cache import wordpiece_cache_for
from serving.models.manifest import TOKENIZER
from serving.records import AlignedText, EncodedChunk, EncodedText
from serving.tasks.windows import chunk_ranges, too_many_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Encoding

    from serving.models.manifest import Manifest
    from serving.records import Side, TextInput, Truncate


log = logging.getLogger("bertserve")

CHARACTERS_PER_TOKEN = 32
"""A text of more characters for each token that the model takes is read in part, or refused where it may not be cut."""

MAX_CHARACTERS = 262_144
"""Of a text that is cut, so many characters are read at most, unless `max_characters` are more: about 0.2 s of work."""

_MAX_RULES, _NAMED = 32, 3
"""Rules of its own that a tokenizer may have, and those that an error names."""

_BLANK = re.compile(r"\s")
_GROWTH = 4
_MARGIN = 32
"""Tokens that a part of a text has beyond those kept: so many pieces an added token may have where it is cut in two."""

CONTEXT_LIMIT_BYTES = 1_000_000
"""Of a context that is read in windows."""


_WINDOW_STEPS = 6
"""A window begins at least this part of its length behind the one before: their number stays bounded."""


class TextTokenizer:
    """The tokenizer of one model.

    Attributes:
        max_length: Tokens of the longest input, special tokens included.
        mask_id: None where the model has no mask token.
        mask_token: The mask token as it stands in a text.
        frame: The special tokens of an empty text: those around any single one.
        truncation_side: The end that is cut off where a request names none.
        turn: Held by the one request whose texts are looked at, where that must not happen on the event loop; None
            where it may.
    """

    turn: asyncio.Lock | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        vocab_size: int,
        mask_id: int | None = None,
        truncation_side: Side = "right",
    ) -> None:
        self._tokenizer = tokenizer
        # Nearly all tokenizers say that a single text is of the first segment, which needs no list of zeros.
        self._is_typed = any(tokenizer.encode("a").type_ids)
        self._wordpieces = None if self._is_typed else wordpiece_cache_for(tokenizer)
        self._vocab_size = vocab_size
        self.truncation_side: Side = truncation_side
        self.frame: list[int] = tokenizer.encode("").ids
        self.max_length = max_length
        self.mask_id = mask_id
        self.mask_token = ("" if mask_id is None else tokenizer.id_to_token(mask_id)) or ""

    @property
    def max_characters(self) -> int:
        """Characters of the longest text that is read whole before it is cut."""
        return CHARACTERS_PER_TOKEN * self.max_length

    @classmethod
    def open(cls, bundle: Path, manifest: Manifest) -> TextTokenizer:
        """Reads the tokenizer of a verified bundle.

        Raises:
            BundleError: It does not parse, or is not the one that the manifest describes.
        """
        file = f"bundle {bundle}: {TOKENIZER}"
        try:
            content = (bundle / TOKENIZER).read_text(encoding="utf-8")
            mask_id, side = manifest.special_ids.get("mask"), manifest.truncation_side
            opened = opened_tokenizer(content, manifest.max_length, manifest.vocab_size, mask_id, side)
        except BundleError as error:
            raise BundleError(f"{file}: {error}") from None
        except Exception as error:  # the binding raises a bare Exception
            raise BundleError(f"{file} is not a tokenizer: {error}") from error
        tokenizer = opened._tokenizer  # noqa: SLF001  one of this class
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            raise BundleError(f"{file} truncates or pads; lengths belong to the manifest")
        for role, token in manifest.special_ids.items():
            if tokenizer.id_to_token(token) is None:
                raise BundleError(f"{file} has no token {token}, the manifest's {role} token")
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        if size > manifest.vocab_size:
            raise BundleError(f"{file} has {size} tokens, the model {manifest.vocab_size}")
        # Ids need not be consecutive: fewer tokens than rows may still lead beyond the last one.
        if (largest := max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)) >= manifest.vocab_size:
            raise BundleError(f"{file} has the token id {largest}, the model's are smaller")
        for role, ids in (("cls", opened.frame[:1]), ("sep", opened.frame[-1:])):
            if role in manifest.special_ids and ids != [manifest.special_ids[role]]:
                raise BundleError(f"{file} does not frame a text with the manifest's {role} token")
        return opened

    def sizes_bytes(self, inputs: Sequence[TextInput], *, truncate: Truncate = False) -> list[int]:
        """Size of each input; raises `InvalidRequest` for one of more than `max_characters` that may not be cut."""
        sizes = []
        for index, value in enumerate(inputs):
            if not isinstance(value, (str, tuple)):
                sizes.append(4 * len(value if isinstance(value, list) else value.ids))
                continue
            size = len(value) if isinstance(value, str) else len(value[0]) + len(value[1])
            if size > self.max_characters and not truncate:
                raise InvalidRequest(
                    f"input {index} has {size} characters; at most {self.max_characters} are read"
                    f" ({CHARACTERS_PER_TOKEN} for each of the model's {self.max_length} tokens):"
                    " shorten it or allow truncation"
                )
            sizes.append(
                len(value.encode()) if isinstance(value, str) else len(value[0].encode()) + len(value[1].encode())
            )
        return sizes

    def encode(self, inputs: Sequence[TextInput], *, truncate: Truncate) -> list[EncodedText]:
        """Token ids of each input; raises `InvalidRequest` for one that is too long or has ids that the model lacks."""
        return [self._encoded(index, value, truncate=truncate) for index, value in enumerate(inputs)]

    def encode_aligned(self, texts: Sequence[str], *, truncate: Truncate) -> list[AlignedText]:
        """Token ids of each text, with the characters and the word that each token stands for."""
        aligned = []
        for source, text in enumerate(texts):
            whole, surplus, skipped, inner = self._fitted(source, text, truncate=truncate)
            spans, words = _alignment(whole)
            if inner is not None:
                spans[words >= 0] = np.array(inner, np.int32).reshape(-1, 2) + skipped
            types = array("i", whole.type_ids) if self._is_typed else None
            aligned.append(AlignedText(array("i", whole.ids), types, surplus, source=source, spans=spans, words=words))
        return aligned

    def windows_sizes_bytes(self, inputs: Sequence[str | tuple[str, str]], *, truncate: Truncate = False) -> list[int]:
        """Size of each text, or pair, that is read in windows: of a pair the second part is.

        Raises:
            InvalidRequest: A first part has more than `max_characters` and may not be cut, or a second more than its
                limit.
        """
        sizes = self.sizes_bytes(["" if isinstance(value, str) else value[0] for value in inputs], truncate=truncate)
        for index, value in enumerate(inputs):
            size = len(_windowed(value).encode())
            if size > CONTEXT_LIMIT_BYTES:
                what = "input" if isinstance(value, str) else "the context of input"
                raise InvalidRequest(f"{what} {index} has {size} bytes; at most {CONTEXT_LIMIT_BYTES} are read")
            sizes[index] += size
        return sizes

    def encode_windows(
        self,
        inputs: Sequence[str | tuple[str, str]],
        *,
        length: int,
        overlap: int,
        truncate: Truncate,
        whole_words: bool = True,
        most: int | None = None,
    ) -> list[AlignedText]:
        """Token ids of each text, or pair, in as many windows as it needs; of a pair, its second part is in windows.

        Args:
            inputs: Of a pair, every window repeats the first part.
            length: Tokens of a window, both parts and special tokens included.
            overlap: Tokens of the text that neighbouring windows share; fewer where windows would not go on by a sixth
                of their length.
            truncate: Whether to cut what of a first part goes beyond half of a window and leaves no room for the rest.
            whole_words: Whether `spans` are those of whole words, or of tokens.
            most: Windows of a text; None for as many as it needs.

        Raises:
            InvalidRequest: A first part is too long, or a window too short for any second.
        """
        texts = self._tokenizer.encode_batch(list(map(_windowed, inputs)), add_special_tokens=False)
        windows: list[AlignedText] = []
        for source, (value, text) in enumerate(zip(inputs, texts, strict=True)):
            first, cut = None, 0
            if not isinstance(value, str):
                first, cut = self._first_part(source, value[0], len(text), length, truncate=truncate)
            spans, words = _alignment(text)
            spans = _of_words(spans, words) if whole_words else spans
            windows += self._windows(source, first, cut, text.ids, spans, words, length, overlap, most=most)
        return windows

    def encode_chunks(
        self, pairs: Sequence[tuple[str, str]], *, tokens: int, overlap: int, most: int
    ) -> list[EncodedChunk]:
        """Token ids of each chunk of the second part of each pair, with the first part before it.

        A chunk has so many tokens at most, and the ids that the same text has alone.

        Raises:
            InvalidRequest: There are more chunks than `most`, or no room for any beside the first part.
        """
        chunks: list[EncodedChunk] = []
        for source, (prompt, text) in enumerate(pairs):
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
            spans, words = _alignment(encoding)
            used = len(self._encoded(source, prompt, truncate=True).ids)
            if used >= tokens:
                raise InvalidRequest(f"a chunk of {tokens} tokens leaves no room: prompt and special tokens are {used}")

            def encoded(begin: int, end: int) -> EncodedChunk:
                at, stop = (int(spans[begin, 0]), int(spans[end - 1, 1])) if end else (0, 0)  # noqa: B023  called here
                alone = self._encoded(source, prompt + text[at:stop], truncate=True)  # noqa: B023  likewise
                return EncodedChunk(alone.ids, alone.type_ids, alone.truncated, source=source, start=at, end=stop)  # noqa: B023

            def surplus(begin: int, end: int) -> int:
                chunk = encoded(begin, end)
                return len(chunk.ids) + chunk.truncated - tokens

            ranges = chunk_ranges(words, tokens - used, overlap, surplus) if len(words) else [(0, 0)]
            for begin, end in ranges:
                chunks.append(encoded(begin, end))
                if len(chunks) > most:
                    raise too_many_chunks(most)
        return chunks

    def shortened(self, text: str, tokens: int, *, truncate: Truncate = True) -> tuple[str, int]:
        """So many tokens of a text as a text, and how many were cut off its end or, cut on the left, its beginning."""
        encoding, unread, skipped = self._read(text, truncate=truncate or True)
        surplus = len(encoding) - tokens
        if surplus <= 0:
            return text, 0
        if self._side(truncate) == "left":
            return text[skipped + encoding.offsets[surplus][0] :], surplus + unread
        return text[: encoding.offsets[tokens - 1][1]], surplus + unread

    def decode(self, ids: Sequence[int], *, bare: bool = False) -> str:
        """The text of token ids; `bare` leaves out special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=bare)
        return text

    def name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    @cached_property
    def marks_subwords(self) -> bool:
        """Whether tokens inside of words have a prefix in their names, as `##` of WordPiece."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def first_id(self, word: str) -> int | None:
        """The id of a token of that name, else of the first token of a text; None where the text has none."""
        token: int | None = self._tokenizer.token_to_id(word)
        if token is not None:
            return token
        ids = self._tokenizer.encode(word, add_special_tokens=False).ids
        return ids[0] if ids else None

    def tokens(self, text: str, *, special: bool) -> list[Token]:
        """The tokens of a text, which is not cut; `special` adds those that a model sees around it."""
        encoding = self._tokenizer.encode(text, add_special_tokens=special)
        return [
            Token(token, name if alone else text[start:stop], alone, None if alone else start, None if alone else stop)
            for token, name, alone, (start, stop) in zip(
                encoding.ids, encoding.tokens, map(bool, encoding.special_tokens_mask), encoding.offsets, strict=True
            )
        ]

    def check_readable(self, ids: Sequence[int]) -> None:
        """Refuses ids that are too many to be turned into text, or not the model's."""
        if len(ids) > self.max_characters:
            raise InvalidRequest(f"{len(ids)} token ids for one text; at most {self.max_characters} are read")
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            raise InvalidRequest(f"a token id lies outside 0..{self._vocab_size - 1}")

    def is_framed(self, ids: Sequence[int]) -> bool:
        """Whether ids begin and end with special tokens as those of a text do; not where the model has none."""
        return bool(self.frame) and [*ids[:1], *ids[-1:]] == [self.frame[0], self.frame[-1]]

    def framed(self, ids: list[int]) -> list[int]:
        """The ids with the special tokens around them, unless they have them."""
        return ids if not ids or not self.frame or self.is_framed(ids) else [*self.frame[:-1], *ids, *self.frame[-1:]]

    def _windows(
        self,
        source: int,
        first: Encoding | None,
        cut: int,
        ids: Sequence[int],
        spans: NDArray[np.int32],
        words: NDArray[np.int32],
        length: int,
        overlap: int,
        *,
        most: int | None,
    ) -> Iterator[AlignedText]:
        # What stands around the text is the same in every window: it is read off around any text.
        inner = self._tokenizer.encode("a", add_special_tokens=False)
        frame = self._tokenizer.post_process(*((inner,) if first is None else (first, inner)))
        inside = [index for index, part in enumerate(frame.sequence_ids) if part == (first is not None)]
        head, tail = inside[0], len(frame) - inside[-1] - 1
        room = length - head - tail
        if room < 1:
            raise InvalidRequest(
                f"a window of {length} tokens leaves no room for a {'text' if first is None else 'context'}"
            )
        step = max(room - overlap, length // _WINDOW_STEPS, 1)
        distances = range(0, max(1, len(ids) - room + step), step)[:most]
        unread = max(0, len(ids) - distances[-1] - room)
        # As the library tokenizers lays them, beginning at the end that is not cut.
        if self.truncation_side == "left":
            ranges = [(max(0, len(ids) - far - room), len(ids) - far) for far in distances]
        else:
            ranges = [(far, far + room) for far in distances]
        for start, stop in ranges:
            own = slice(start, stop)
            size = len(ids[own])
            types = [*frame.type_ids[:head], *[frame.type_ids[head]] * size, *frame.type_ids[len(frame) - tail :]]
            yield AlignedText(
                ids=array("i", [*frame.ids[:head], *ids[own], *frame.ids[len(frame) - tail :]]),
                type_ids=array("i", types) if first is not None or self._is_typed else None,
                truncated=cut + unread if start == ranges[0][0] else 0,
                source=source,
                spans=np.pad(spans[own], ((head, tail), (0, 0))),
                words=np.pad(words[own], (head, tail), constant_values=-1),
                start=start,
                head=head,
                tail=tail,
            )

    def _first_part(
        self, source: int, text: str, second: int, length: int, *, truncate: Truncate
    ) -> tuple[Encoding, int]:
        """The first part of a pair, and how many tokens were cut off.

        It leaves half of a window to the second part, or the so many tokens that this has.
        """
        special = self._tokenizer.num_special_tokens_to_add(is_pair=True)
        most = max(0, length // 2 - special, length - special - second)
        first, unread, _ = self._read(text, truncate=truncate)
        surplus = max(0, len(first) - most)
        if surplus + unread and not truncate:
            raise InvalidRequest(
                f"the question or query of input {source} has {len(first) + unread} tokens; the model takes {most}:"
                " shorten it or allow truncation"
            )
        if surplus:
            first.truncate(most, direction=self._side(truncate))
        return first, surplus + unread

    def _encoded(self, index: int, value: TextInput, *, truncate: Truncate) -> EncodedText:
        if not isinstance(value, str | tuple):
            return self._check_ids(index, value)
        if self._wordpieces is not None and isinstance(value, str) and len(value) <= self.max_characters:
            ids = self._wordpieces.encode(value)
            if ids is not None and len(ids) <= self.max_length:
                return EncodedText(ids)
        whole, surplus, *_ = self._fitted(index, value, truncate=truncate, aligned=False)
        types = array("i", whole.type_ids) if self._is_typed or not isinstance(value, str) else None
        return EncodedText(array("i", whole.ids), types, surplus)

    def _fitted(
        self, index: int, value: str | tuple[str, str], *, truncate: Truncate, aligned: bool = True
    ) -> tuple[Encoding, int, int, Sequence[tuple[int, int]] | None]:
        """The encoding of an input that fits.

        Cuts the longer part first, as Transformers does (`longest_first`), and keeps every special token. What was not
        read is counted at the rate of what was. Without `aligned` the encoding may lack the characters' positions.

        Returns:
            The encoding; how many tokens were cut off; how many characters before it; where something was cut, the
            characters of the first part's tokens, as a byte-level tokenizer trims those of the encoding twice.
        """
        parts = (value,) if isinstance(value, str) else value
        if sum(map(len, parts)) <= self.max_characters or not truncate:
            # Unlike `encode`, these do not hold the interpreter's lock.
            encode = self._tokenizer.encode_batch if aligned else self._tokenizer.encode_batch_fast
            encoding = encode([value])[0]
            if len(encoding) <= self.max_length:
                return encoding, 0, 0, None
            if not truncate:
                raise InvalidRequest(
                    f"input {index} has {len(encoding)} tokens; the model takes {self.max_length}:"
                    " shorten it or allow truncation"
                )
        read = [self._read(part, truncate=truncate) for part in parts]
        encodings = [encoding for encoding, _, _ in read]
        lengths = list(map(len, encodings))
        room = self.max_length - self._tokenizer.num_special_tokens_to_add(is_pair=len(parts) > 1)
        surplus = max(0, sum(lengths) - room)
        if surplus:
            kept = [room] if len(lengths) == 1 else shares(*self._whole_lengths(parts, read, room), room)
            for part, length in zip(encodings, kept, strict=True):
                part.truncate(length, direction=self._side(truncate))
        whole = self._tokenizer.post_process(encodings[0], encodings[1] if len(encodings) > 1 else None)
        inner = encodings[0].offsets if aligned else None
        return whole, surplus + sum(unread for _, unread, _ in read), read[0][2], inner

    def _whole_lengths(
        self, parts: Sequence[str], read: Sequence[tuple[Encoding, int, int]], room: int
    ) -> tuple[int, int]:
        """How many tokens the parts of a pair have: counted where it matters, as far as texts are read at all."""
        lengths = [len(encoding) + unread for encoding, unread, _ in read]
        # An odd token is left to the longer part, which estimates do not tell for certain.
        if room % 2 and all(2 * len(encoding) > room for encoding, _, _ in read):
            most = max(self.max_characters, MAX_CHARACTERS)
            for index, (part, (_, unread, _)) in enumerate(zip(parts, read, strict=True)):
                if unread and len(part) <= most:
                    lengths[index] = len(self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0])
        return lengths[0], lengths[1]

    def _read(self, text: str, *, truncate: Truncate) -> tuple[Encoding, int, int]:
        """A text without special tokens, read so far that more would not change the tokens kept.

        Tokenizers read word by word. So the tokens of a text's beginning are those of the text, up to the last word of
        the beginning; of its end they are, from the second word on. A text of which `MAX_CHARACTERS` are too few
        tokens is cut there.

        Returns:
            The encoding; about how many tokens the rest has; how many characters were left out before what was read.
        """
        left = self._side(truncate) == "left"
        size = self.max_characters
        most = max(size, MAX_CHARACTERS)
        while truncate and size < len(text):
            begin, end = (_first_blank(text, size), len(text)) if left else (0, _last_starter(text, size))
            encoding: Encoding = self._tokenizer.encode_batch([text[begin:end]], add_special_tokens=False)[0]
            if size == most or self._sure(encoding, left=left) >= self.max_length + _MARGIN:
                unread = len(text) - (end - begin)
                return encoding, max(1, round(len(encoding) * unread / max(1, end - begin))), begin
            size = min(_GROWTH * size, most)
        return self._tokenizer.encode_batch([text], add_special_tokens=False)[0], 0, 0

    def _side(self, truncate: Truncate) -> Side:
        """The end that is cut off: the one that a request names, else the model's own."""
        return self.truncation_side if isinstance(truncate, bool) else truncate

    @staticmethod
    def _sure(encoding: Encoding, *, left: bool) -> int:
        """How many tokens do not belong to the word at which a text was cut."""
        at = 0 if left else len(encoding) - 1
        word = encoding.token_to_word(at) if len(encoding) else None
        tokens = None if word is None else encoding.word_to_tokens(word)
        if tokens is None:
            return 0
        return len(encoding) - tokens[1] if left else int(tokens[0])

    def _check_ids(self, index: int, value: list[int] | EncodedText) -> EncodedText:
        ids = value if isinstance(value, list) else value.ids
        if not 0 < len(ids) <= self.max_length:
            raise InvalidRequest(f"input {index} has {len(ids)} token ids; between 1 and {self.max_length} are taken")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidRequest(f"input {index} holds a token id outside 0..{self._vocab_size - 1}")
        return EncodedText(array("i", value)) if isinstance(value, list) else value


def _remote(name: str) -> Any:  # noqa: ANN401  it has the type of the method of that name
    def call(self: IsolatedTokenizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return self.process.call(name, *args, **kwargs)
        except (OverLimitError, DeadlineExceeded):
            raise DeadlineExceeded("the model's own rules for tokens take too long, or too much memory, here") from None
        except InternalError as error:
            log.warning("the model's own rules for tokens: %s", error)
            raise InternalError from None

    return call


class IsolatedTokenizer(TextTokenizer):
    """One with rules that are not known to be bounded: what looks at texts runs in a process that can be ended."""

    def __init__(
        self, content: str, max_length: int, vocab_size: int, mask_id: int | None, truncation_side: Side
    ) -> None:
        bare = json.dumps(json.loads(content) | dict.fromkeys(SECTIONS))
        super().__init__(Tokenizer.from_str(bare), max_length, vocab_size, mask_id, truncation_side)
        self._wordpieces = None
        self.turn = asyncio.Lock()
        self.process = TokenizerProcess(content, (max_length, vocab_size, mask_id, truncation_side))

    def encode(self, inputs: Sequence[TextInput], *, truncate: Truncate) -> list[EncodedText]:
        """As of any; ids need no rule."""
        ids = {index: value for index, value in enumerate(inputs) if not isinstance(value, str | tuple)}
        checked = {index: self._check_ids(index, value) for index, value in ids.items()}
        if len(ids) == len(inputs):
            return list(checked.values())
        texts = ["" if index in ids else value for index, value in enumerate(inputs)]
        encoded: list[EncodedText] = self._encode_texts(texts, truncate=truncate)
        return [checked.get(index, text) for index, text in enumerate(encoded)]

    _encode_texts: Any = _remote("encode")
    encode_aligned: Any = _remote("encode_aligned")
    encode_windows: Any = _remote("encode_windows")
    encode_chunks: Any = _remote("encode_chunks")
    shortened: Any = _remote("shortened")
    decode: Any = _remote("decode")
    first_id: Any = _remote("first_id")
    tokens: Any = _remote("tokens")

    def check(self, foreign: Mapping[str, Any]) -> None:
        """Tries rules on texts that are made to hurt, each alone and then all.

        Raises:
            BundleError: One of them takes too much time or memory; the message begins with its place.
        """
        if len(foreign) > _MAX_RULES:
            raise BundleError(f"has {len(foreign)} rules that no known tokenizer has; at most {_MAX_RULES} are tried")
        text = f"a text of {PROBE_LETTERS} letters"
        alone = [(place, rule) for place, rule in foreign.items() if place.startswith(SECTIONS)]
        for place, rule in [*alone, (" with ".join([*foreign][:_NAMED]), None)]:
            letters = "".join(letters_of(each) for _, each in alone) if rule is None else letters_of(rule)
            if rule is not None and growth_of(rule) > MAX_GROWTH and "Regex" not in rule["pattern"]:
                raise BundleError(f"{place} makes a text more than {MAX_GROWTH} times as long")
            try:
                if rule is None:
                    self.process.call(OPEN)
                self.process.call(PROBE, re.split(r"[.\[]", place)[0], rule, letters[:PROBE_LETTERS], PROBE_LETTERS)
            except OverLimitError:
                raise BundleError(f"{place} takes more than {CPU_S} s or {MEMORY_BYTES >> 20} MiB on {text}") from None
            except BertserveError as error:
                raise BundleError(f"{place} cannot be used on {text}: {error}") from None


def opened_tokenizer(
    content: str, max_length: int, vocab_size: int, mask_id: int | None, truncation_side: Side
) -> TextTokenizer:
    """The tokenizer of a tokenizer.json; one with rules that are not known to be bounded runs in a process of its own.

    Raises:
        BundleError: One of these rules takes too much time or memory on a text that is made to hurt.
    """
    if not (foreign := foreign_rules(json.loads(content))):
        try:
            return TextTokenizer(Tokenizer.from_str(content), max_length, vocab_size, mask_id, truncation_side)
        except BaseException as error:
            # A panic of the library is no Exception: a template that names an unknown token raises one.
            if type(error).__name__ == "PanicException":
                raise BundleError(f"not a tokenizer: {error}") from None
            raise
    isolated = IsolatedTokenizer(content, max_length, vocab_size, mask_id, truncation_side)
    isolated.check(foreign)
    return isolated


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens are kept of each part of a pair that is longer than `room`.

    The shorter part is kept whole where the longer one is cut enough. Else both get half, and the odd token goes to the
    longer one, or to the second of equal parts (`longest_first` of the library tokenizers).
    """
    short = min(first, second, room // 2)
    long = room - short
    return (long, short) if first > second else (short, long)


def _windowed(value: str | tuple[str, str]) -> str:
    return value if isinstance(value, str) else value[1]


def _last_starter(text: str, at: int) -> int:
    """Where to end a part of a text, at most at `at`: not before a combining mark, which may change what it follows."""
    while at > 1 and unicodedata.combining(text[at]):
        at -= 1
    return at


def _first_blank(text: str, size: int) -> int:
    """Where to begin the end of a text: so many characters before it, or at the next blank if that is near."""
    at = len(text) - size
    blank = _BLANK.search(text, at, at + size // 2)
    return at if blank is None else blank.start()


def _alignment(encoding: Encoding) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Characters [tokens, 2] and word [tokens] of each token; the word is -1 for what the text does not hold."""
    words = [-1 if word is None else word for word in encoding.word_ids]
    return np.array(encoding.offsets, np.int32).reshape(-1, 2), np.array(words, np.int32)


def _of_words(spans: NDArray[np.int32], words: NDArray[np.int32]) -> NDArray[np.int32]:
    if not len(words):
        return spans
    begins = np.flatnonzero(np.diff(words, prepend=-2))
    ends = np.append(begins[1:], len(words)) - 1
    sizes = ends - begins + 1
    return np.repeat(np.stack([spans[begins, 0], spans[ends, 1]], axis=1), sizes, axis=0)
