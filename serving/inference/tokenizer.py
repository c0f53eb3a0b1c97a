"""Text to token ids, with limits: input that is too long is truncated and counted, or rejected before any work."""

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

from bertserve.serving.errors import BertserveError, BundleError, DeadlineExceeded, InternalError, InvalidRequest
from bertserve.serving.inference.requests import Token
from bertserve.serving.inference.tokenizer_process import (
    CPU_S,
    MEMORY_BYTES,
    OPEN,
    PROBE,
    OverLimitError,
    TokenizerProcess,
)
from bertserve.serving.inference.tokenizer_rules import (
    MAX_GROWTH,
    MAX_ID,
    PROBE_LETTERS,
    SECTIONS,
    foreign_rules,
    growth_of,
    largest_id,
    letters_of,
)
from bertserve.serving.inference.wordpiece_cache import wordpiece_cache_for
from bertserve.serving.models import query_weights
from bertserve.serving.models.manifest import TOKENIZER
from bertserve.serving.records import AlignedText, EncodedChunk, EncodedText
from bertserve.serving.tasks.base import CHARACTERS_PER_TOKEN
from bertserve.serving.tasks.windows import chunk_ranges, too_many_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Encoding

    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.records import Side, TextInput, Truncate
    from bertserve.serving.tasks.parts import MultiVector


log = logging.getLogger("bertserve")

MAX_CHARACTERS = 262_144
"""Maximum characters read of a truncated text, unless `max_characters` is larger: about 0.2 s of work."""

_MAX_RULES, _NAMED = 32, 3
"""The maximum number of a tokenizer's own rules that are tried, and of those that an error names."""

_BLANK = re.compile(r"\s")
_GROWTH = 4
_MARGIN = 32
"""Extra tokens read beyond those that are kept: an added token that is cut in two may become this many pieces."""

CONTEXT_LIMIT_BYTES = 1_000_000
"""Maximum size of a context that is read in windows."""


_WINDOW_STEPS = 6
"""A window starts at least this part of its length after the previous one, which bounds their number."""


class TextTokenizer:
    """The tokenizer of one model.

    Attributes:
        max_length: Tokens of the longest input, including special tokens.
        max_characters: Characters of the longest text that is read whole before truncation.
        mask_id: None if the model has no mask token.
        mask_token: The mask token as it appears in a text.
        frame: The special tokens of an empty text, which surround every single text.
        query_weights: For each token, its weight in a query that needs no engine, float32 [tokens]; None if the model
            has none.
        multi_vector: How a multi-vector model reads queries and documents; None for other models.
        truncation_side: The end that is truncated if a request names none.
        turn: Held by the one request whose texts are tokenized, if that must not happen on the event loop; otherwise
            None.
    """

    turn: asyncio.Lock | None = None
    query_weights: NDArray[np.float32] | None = None
    multi_vector: MultiVector | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        vocab_size: int,
        mask_id: int | None = None,
        truncation_side: Side = "right",
    ) -> None:
        self._tokenizer = tokenizer
        # With nearly all tokenizers a single text has only token type 0, which needs no list.
        self._is_typed = any(tokenizer.encode("a").type_ids)
        self._wordpieces = None if self._is_typed else wordpiece_cache_for(tokenizer)
        self._vocab_size = vocab_size
        self.truncation_side: Side = truncation_side
        self.frame: list[int] = tokenizer.encode("").ids
        self.max_length = max_length
        self.max_characters = CHARACTERS_PER_TOKEN * max_length
        self.mask_id = mask_id
        self.mask_token = ("" if mask_id is None else tokenizer.id_to_token(mask_id)) or ""

    @classmethod
    def open(cls, bundle: Path, manifest: Manifest) -> TextTokenizer:
        """Reads the tokenizer of a verified bundle.

        Raises:
            BundleError: It does not parse, or does not match the manifest.
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
        tokenizer = opened._tokenizer  # noqa: SLF001  of the same class
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            raise BundleError(f"{file} must not truncate or pad; the manifest sets the length")
        for role, token in manifest.special_ids.items():
            if tokenizer.id_to_token(token) is None:
                raise BundleError(f"{file} lacks the token {token}, the manifest's {role} token")
        vocabulary = f"but the model's vocab_size is {manifest.vocab_size}; export it with its own tokenizer"
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        if size > manifest.vocab_size:
            raise BundleError(f"{file} has {size} tokens, {vocabulary}")
        # Ids need not be consecutive: with fewer tokens than embedding rows, an id may still be too large.
        if (largest := max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)) >= manifest.vocab_size:
            raise BundleError(f"{file} has the token ID {largest}, {vocabulary}")
        for role, ids in (("cls", opened.frame[:1]), ("sep", opened.frame[-1:])):
            if role in manifest.special_ids and ids != [manifest.special_ids[role]]:
                raise BundleError(f"{file} does not frame a text with the manifest's {role} token")
        looks_up = manifest.sparse is not None and manifest.sparse.query_weights
        opened.query_weights = query_weights.read(bundle, manifest.vocab_size) if looks_up else None
        opened.multi_vector = manifest.multi_vector
        return opened

    def sizes_bytes(self, inputs: Sequence[TextInput], *, truncate: Truncate = False) -> list[int]:
        """The size of each input; raises `InvalidRequest` for more than `max_characters` unless `truncate`."""
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

    def encode(
        self, inputs: Sequence[TextInput], *, truncate: Truncate, most: int | None = None, whole: str = ""
    ) -> list[EncodedText]:
        """Token ids of each input; raises `InvalidRequest` for one that is too long or has unknown ids.

        Args:
            inputs: Texts, pairs, or token ids.
            truncate: Whether inputs that are too long are truncated, and where.
            most: Maximum tokens of an input, if that is less than `max_length`.
            whole: The name in errors of the second text of pairs, if only the first is truncated; empty truncates both.
        """
        longest = most or self.max_length
        return [
            self._encoded(index, value, truncate=truncate, longest=longest, whole=whole)
            for index, value in enumerate(inputs)
        ]

    def encode_bare(self, texts: Sequence[str], *, truncate: Truncate) -> list[EncodedText]:
        """Token ids of each text without special tokens; raises `InvalidRequest` for a text that is too long."""
        encoded = []
        for index, text in enumerate(texts):
            encoding, unread, _ = self._read(text, truncate=truncate)
            surplus = max(0, len(encoding) - self.max_length)
            if surplus and not truncate:
                raise _too_long(index, len(encoding), self.max_length)
            if surplus:
                encoding.truncate(self.max_length, direction=self._side(truncate))
            encoded.append(EncodedText(array("i", encoding.ids), None, surplus + unread))
        return encoded

    def encode_aligned(self, texts: Sequence[str], *, truncate: Truncate) -> list[AlignedText]:
        """Token ids of each text, with the characters and the word of each token."""
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
        """The size of each text or pair that is read in windows; the second part of a pair is in windows.

        Raises:
            InvalidRequest: A first part has more than `max_characters` without truncation, or a text or second part
                exceeds `CONTEXT_LIMIT_BYTES`.
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
        """Token ids of each text or pair in as many sliding windows as it needs.

        Args:
            inputs: Texts or pairs; windows of a pair slide over its second part, and each repeats the first part.
            length: Tokens of a window, including both parts and special tokens.
            overlap: Tokens that neighboring windows share; fewer if windows would advance by less than a sixth of their
                length.
            truncate: Whether to truncate a first part that exceeds half of a window and leaves no room for the rest.
            whole_words: Whether `spans` are those of whole words instead of tokens.
            most: Maximum windows of a text; None for as many as it needs.

        Raises:
            InvalidRequest: A first part is too long, or a window is too short for any text beside it.
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

        A chunk has at most `tokens` tokens, and the same ids as if its text were sent alone.

        Raises:
            InvalidRequest: There are more than `most` chunks, or the first part leaves no room.
        """
        chunks: list[EncodedChunk] = []
        for source, (prompt, text) in enumerate(pairs):
            encoding = self._tokenizer.encode_batch([text], add_special_tokens=False)[0]
            spans, words = _alignment(encoding)
            used = len(self._encoded(source, prompt, truncate=True).ids)
            if used >= tokens:
                raise InvalidRequest(f"a chunk of {tokens} tokens is too small: prompt and special tokens take {used}")

            def encoded(begin: int, end: int) -> EncodedChunk:
                at, stop = (int(spans[begin, 0]), int(spans[end - 1, 1])) if end else (0, 0)  # noqa: B023  called here
                alone = self._encoded(source, prompt + text[at:stop], truncate=True)  # noqa: B023  called here
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
        """A text truncated to `tokens` tokens, and how many tokens were cut off at the truncation side."""
        encoding, unread, skipped = self._read(text, truncate=truncate or True)
        surplus = len(encoding) - tokens
        if surplus <= 0:
            return text, 0
        if self._side(truncate) == "left":
            return text[skipped + encoding.offsets[surplus][0] :], surplus + unread
        return text[: encoding.offsets[tokens - 1][1]], surplus + unread

    def decode(self, ids: Sequence[int], *, bare: bool = False) -> str:
        """The text of token ids; `bare` omits special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=bare)
        return text

    def name(self, token: int) -> str:
        return self._tokenizer.id_to_token(token) or ""

    @cached_property
    def marks_subwords(self) -> bool:
        """Whether tokens inside words have a prefix in their names, such as `##` in WordPiece."""
        return bool(getattr(self._tokenizer.model, "continuing_subword_prefix", None))

    def first_id(self, word: str) -> int | None:
        """The id of the token of that name, or else of the text's first token; None if the text has none."""
        token: int | None = self._tokenizer.token_to_id(word)
        if token is not None:
            return token
        ids = self._tokenizer.encode(word, add_special_tokens=False).ids
        return ids[0] if ids else None

    def tokens(self, text: str, *, special: bool) -> list[Token]:
        """The tokens of a text, without truncation; `special` adds the special tokens that the model gets."""
        encoding = self._tokenizer.encode(text, add_special_tokens=special)
        return [
            Token(token, name if alone else text[start:stop], alone, None if alone else start, None if alone else stop)
            for token, name, alone, (start, stop) in zip(
                encoding.ids, encoding.tokens, map(bool, encoding.special_tokens_mask), encoding.offsets, strict=True
            )
        ]

    def check_readable(self, ids: Sequence[int]) -> None:
        """Rejects ids that are too many to be decoded, or outside the vocabulary."""
        if len(ids) > self.max_characters:
            raise InvalidRequest(f"{len(ids)} token IDs for one text; the maximum is {self.max_characters}")
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            raise InvalidRequest(f"a token ID is outside 0..{self._vocab_size - 1}")

    def is_framed(self, ids: Sequence[int]) -> bool:
        """Whether ids begin and end with the special tokens of a text; False if the model has none."""
        return bool(self.frame) and [*ids[:1], *ids[-1:]] == [self.frame[0], self.frame[-1]]

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
        # The tokens around the text are the same in every window, so any text shows them.
        inner = self._tokenizer.encode("a", add_special_tokens=False)
        frame = self._tokenizer.post_process(*((inner,) if first is None else (first, inner)))
        inside = [index for index, part in enumerate(frame.sequence_ids) if part == (first is not None)]
        head, tail = inside[0], len(frame) - inside[-1] - 1
        room = length - head - tail
        if room < 1:
            raise InvalidRequest(
                f"a window of {length} tokens leaves no room for the {'text' if first is None else 'context'}"
            )
        step = max(room - overlap, length // _WINDOW_STEPS, 1)
        distances = range(0, max(1, len(ids) - room + step), step)[:most]
        unread = max(0, len(ids) - distances[-1] - room)
        # The same windows as in the tokenizers library, starting at the end that is kept.
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

        It leaves the second part half of a window, or the number of tokens that `second` has if that is less.
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

    def _encoded(
        self, index: int, value: TextInput, *, truncate: Truncate, longest: int | None = None, whole: str = ""
    ) -> EncodedText:
        longest = longest or self.max_length
        if not isinstance(value, str | tuple):
            return self.check_ids(index, value, longest)
        if self._wordpieces is not None and isinstance(value, str) and len(value) <= self.max_characters:
            ids = self._wordpieces.encode(value)
            if ids is not None and len(ids) <= longest:
                return EncodedText(ids)
        fitted, surplus, *_ = self._fitted(index, value, truncate=truncate, aligned=False, longest=longest, whole=whole)
        types = array("i", fitted.type_ids) if self._is_typed or not isinstance(value, str) else None
        return EncodedText(array("i", fitted.ids), types, surplus)

    def _fitted(
        self,
        index: int,
        value: str | tuple[str, str],
        *,
        truncate: Truncate,
        aligned: bool = True,
        longest: int | None = None,
        whole: str = "",
    ) -> tuple[Encoding, int, int, Sequence[tuple[int, int]] | None]:
        """The encoding of an input, truncated to fit.

        The longer part is truncated first, as in Transformers (`longest_first`), or with `whole` the first part alone
        (`only_first`). Every special token is kept. The number of unread tokens is estimated from the read part.
        Without `aligned`, the encoding may lack character offsets.

        Returns:
            The encoding; the number of tokens cut off; the number of characters skipped before it; after truncation,
            the character offsets of the first part's tokens, because a byte-level tokenizer trims those of the encoding
            twice.
        """
        longest = longest or self.max_length
        parts = (value,) if isinstance(value, str) else value
        if sum(map(len, parts)) <= self.max_characters or not truncate:
            # Unlike `encode`, these calls release the GIL.
            encode = self._tokenizer.encode_batch if aligned else self._tokenizer.encode_batch_fast
            encoding = encode([value])[0]
            if len(encoding) <= longest:
                return encoding, 0, 0, None
            if not truncate:
                raise _too_long(index, len(encoding), longest)
        read = [self._read(part, truncate=truncate) for part in parts]
        encodings = [encoding for encoding, _, _ in read]
        lengths = list(map(len, encodings))
        room = longest - self._tokenizer.num_special_tokens_to_add(is_pair=len(parts) > 1)
        surplus = max(0, sum(lengths) - room)
        if surplus:
            kept = [room]
            if len(lengths) > 1 and whole:
                kept = [room - lengths[1], lengths[1]]
                if kept[0] < 1:
                    raise InvalidRequest(
                        f"{whole} has {lengths[1]} tokens; at most {room - 1} fit beside a text: shorten it"
                    )
            elif len(lengths) > 1:
                kept = [*shares(*self._whole_lengths(parts, read, room), room)]
            for part, length in zip(encodings, kept, strict=True):
                part.truncate(length, direction=self._side(truncate))
        fitted = self._tokenizer.post_process(encodings[0], encodings[1] if len(encodings) > 1 else None)
        inner = encodings[0].offsets if aligned else None
        return fitted, surplus + sum(unread for _, unread, _ in read), read[0][2], inner

    def _whole_lengths(
        self, parts: Sequence[str], read: Sequence[tuple[Encoding, int, int]], room: int
    ) -> tuple[int, int]:
        """Token counts of the parts of a pair, from estimates of what was not read.

        The counts are exact where they matter, for texts of which everything may be read.
        """
        lengths = [len(encoding) + unread for encoding, unread, _ in read]
        # The longer part gets an odd token, and estimates do not tell for certain which one is longer.
        if room % 2 and all(2 * len(encoding) > room for encoding, _, _ in read):
            most = max(self.max_characters, MAX_CHARACTERS)
            for index, (part, (_, unread, _)) in enumerate(zip(parts, read, strict=True)):
                if unread and len(part) <= most:
                    lengths[index] = len(self._tokenizer.encode_batch_fast([part], add_special_tokens=False)[0])
        return lengths[0], lengths[1]

    def _read(self, text: str, *, truncate: Truncate) -> tuple[Encoding, int, int]:
        """A text without special tokens, read far enough that more would not change the kept tokens.

        Tokenizers read word by word. So a prefix of a text has the tokens of the whole text, except in the prefix's
        last word. A suffix has them from its second word on. A text is cut after `MAX_CHARACTERS` even if these are too
        few tokens.

        Returns:
            The encoding; the estimated number of unread tokens; the number of characters skipped before it.
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
        """The truncation side: the request's, or else the model's."""
        return self.truncation_side if isinstance(truncate, bool) else truncate

    @staticmethod
    def _sure(encoding: Encoding, *, left: bool) -> int:
        """Number of tokens outside the word at which a text was cut."""
        at = 0 if left else len(encoding) - 1
        word = encoding.token_to_word(at) if len(encoding) else None
        tokens = None if word is None else encoding.word_to_tokens(word)
        if tokens is None:
            return 0
        return len(encoding) - tokens[1] if left else int(tokens[0])

    def check_ids(self, index: int, value: list[int] | EncodedText, longest: int) -> EncodedText:
        ids = value if isinstance(value, list) else value.ids
        if not 0 < len(ids) <= longest:
            raise InvalidRequest(f"input {index} has {len(ids)} token IDs; send 1 to {longest}")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidRequest(f"input {index} has a token ID outside 0..{self._vocab_size - 1}")
        return EncodedText(array("i", value)) if isinstance(value, list) else value


def _remote(name: str) -> Any:  # noqa: ANN401  has the type of the method `name`
    def call(self: IsolatedTokenizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return self.process.call(name, *args, **kwargs)
        except (OverLimitError, DeadlineExceeded):
            raise DeadlineExceeded("the model's tokenizer rules take too much time or memory on this input") from None
        except InternalError as error:
            log.warning("the model's tokenizer rules failed: %s", error)
            raise InternalError from None

    return call


class IsolatedTokenizer(TextTokenizer):
    """A tokenizer whose rules may be unbounded: everything that reads texts runs in a process that can be killed."""

    def __init__(
        self, content: str, max_length: int, vocab_size: int, mask_id: int | None, truncation_side: Side
    ) -> None:
        bare = json.dumps(json.loads(content) | dict.fromkeys(SECTIONS))
        super().__init__(Tokenizer.from_str(bare), max_length, vocab_size, mask_id, truncation_side)
        self._wordpieces = None
        self.turn = asyncio.Lock()
        self.process = TokenizerProcess(content, (max_length, vocab_size, mask_id, truncation_side))

    def encode(
        self, inputs: Sequence[TextInput], *, truncate: Truncate, most: int | None = None, whole: str = ""
    ) -> list[EncodedText]:
        """Encodes texts in the other process; token ids need no rules and are checked here."""
        longest = most or self.max_length
        ids = {index: value for index, value in enumerate(inputs) if not isinstance(value, str | tuple)}
        checked = {index: self.check_ids(index, value, longest) for index, value in ids.items()}
        if len(ids) == len(inputs):
            return list(checked.values())
        texts = ["" if index in ids else value for index, value in enumerate(inputs)]
        encoded: list[EncodedText] = self._encode_texts(texts, truncate=truncate, most=most, whole=whole)
        return [checked.get(index, text) for index, text in enumerate(encoded)]

    _encode_texts: Any = _remote("encode")
    encode_bare: Any = _remote("encode_bare")
    encode_aligned: Any = _remote("encode_aligned")
    encode_windows: Any = _remote("encode_windows")
    encode_chunks: Any = _remote("encode_chunks")
    shortened: Any = _remote("shortened")
    decode: Any = _remote("decode")
    first_id: Any = _remote("first_id")
    tokens: Any = _remote("tokens")

    def check(self, foreign: Mapping[str, Any]) -> None:
        """Tries each rule alone and then all together on hostile texts.

        Raises:
            BundleError: One takes too much time or memory; the message begins with its place.
        """
        if len(foreign) > _MAX_RULES:
            raise BundleError(f"has {len(foreign)} rules of no known tokenizer; the maximum is {_MAX_RULES}")
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
    content: str, max_length: int, vocab_size: int, mask_id: int | None, truncation_side: Side, *, tried: bool = False
) -> TextTokenizer:
    """Opens a tokenizer.json; a tokenizer with rules that may be unbounded gets a process of its own.

    With `tried`, `check_rules` has tried them.

    Raises:
        BundleError: One of these rules takes too much time or memory on a hostile text.
    """
    document = json.loads(content)
    check_ids(document)
    if not (foreign := foreign_rules(document)):
        try:
            return TextTokenizer(Tokenizer.from_str(content), max_length, vocab_size, mask_id, truncation_side)
        except BaseException as error:
            # A panic of the library is not an `Exception`: a template that names an unknown token raises one.
            if type(error).__name__ == "PanicException":
                raise BundleError(f"not a tokenizer: {error}") from None
            raise
    isolated = IsolatedTokenizer(content, max_length, vocab_size, mask_id, truncation_side)
    if not tried:
        isolated.check(foreign)
    return isolated


def check_rules(content: Mapping[str, Any]) -> None:
    """Tries the rules of a tokenizer.json that may be unbounded, in a process of their own.

    Raises:
        BundleError: One of them takes too much time or memory on a hostile text, or a token id takes too much memory.
        Exception: The tokenizers library's own, for something else than a tokenizer.
    """
    check_ids(content)
    if foreign := foreign_rules(content):
        # Token ids, which the vocabulary's size would limit, are not read.
        IsolatedTokenizer(json.dumps(content), PROBE_LETTERS, 0, None, "right").check(foreign)


def check_ids(content: Mapping[str, Any]) -> None:
    """Raises `BundleError` for a token id that would take the library gigabytes."""
    if (largest := largest_id(content)) > MAX_ID:
        raise BundleError(f"has the token ID {largest}; the maximum is {MAX_ID}")


def shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Number of tokens kept of each part of a pair that is longer than `room`.

    The shorter part is kept whole if it fits in half of the room. Otherwise both get half, and the odd token goes to
    the longer part, or to the second of equal parts (`longest_first` of the tokenizers library).
    """
    short = min(first, second, room // 2)
    long = room - short
    return (long, short) if first > second else (short, long)


def _too_long(index: int, tokens: int, longest: int) -> InvalidRequest:
    return InvalidRequest(
        f"input {index} has {tokens} tokens; the model takes {longest}: shorten it or allow truncation"
    )


def _windowed(value: str | tuple[str, str]) -> str:
    return value if isinstance(value, str) else value[1]


def _last_starter(text: str, at: int) -> int:
    """The end of a prefix, at most `at`: not before a combining mark, which may change the preceding character."""
    while at > 1 and unicodedata.combining(text[at]):
        at -= 1
    return at


def _first_blank(text: str, size: int) -> int:
    """The start of a suffix: `size` characters before the end, or the next blank if it is near."""
    at = len(text) - size
    blank = _BLANK.search(text, at, at + size // 2)
    return at if blank is None else blank.start()


def _alignment(encoding: Encoding) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Characters [tokens, 2] and word [tokens] of each token; the word is -1 for tokens that are not in the text."""
    words = [-1 if word is None else word for word in encoding.word_ids]
    return np.array(encoding.offsets, np.int32).reshape(-1, 2), np.array(words, np.int32)


def _of_words(spans: NDArray[np.int32], words: NDArray[np.int32]) -> NDArray[np.int32]:
    if not len(words):
        return spans
    begins = np.flatnonzero(np.diff(words, prepend=-2))
    ends = np.append(begins[1:], len(words)) - 1
    sizes = ends - begins + 1
    return np.repeat(np.stack([spans[begins, 0], spans[ends, 1]], axis=1), sizes, axis=0)
