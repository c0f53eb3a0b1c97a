"""Text to token ids, with bounds: what is too long is cut and counted, or refused before any work."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from serving.errors import BundleError, InvalidRequest
from serving.inference.wordpiece_cache import wordpiece_cache_for
from serving.models.manifest import TOKENIZER
from serving.records import AlignedText, EncodedText, Token

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Encoding

    from serving.models.manifest import Manifest
    from serving.records import TextInput, Truncate

CHARACTERS_PER_TOKEN = 32
"""A text may have this many characters for each token that the model takes."""

CONTEXT_LIMIT_BYTES = 1_000_000
"""Of a context that is read in windows."""


_WINDOW_STEPS = 6
"""A window begins at least this part of its length behind the one before: their number stays bounded."""


class TextTokenizer:
    """The tokenizer of one model.

    Attributes:
        max_length: Tokens of the longest input, special tokens included.
        max_characters: Characters of the longest text that is tokenised at all.
        mask_id: None where the model has no mask token.
        mask_token: The mask token as it stands in a text.
        frame: The special tokens of an empty text: those around any single one.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, vocab_size: int, mask_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._wordpieces = wordpiece_cache_for(tokenizer)
        self._vocab_size = vocab_size
        self.frame: list[int] = tokenizer.encode("").ids
        self.max_length = max_length
        self.max_characters = CHARACTERS_PER_TOKEN * max_length
        self.mask_id = mask_id
        self.mask_token = ("" if mask_id is None else tokenizer.id_to_token(mask_id)) or ""

    @classmethod
    def open(cls, bundle: Path, manifest: Manifest) -> TextTokenizer:
        """Reads the tokenizer of a verified bundle.

        Raises:
            BundleError: It does not parse, or is not the one that the manifest describes.
        """
        file = f"bundle {bundle}: {TOKENIZER}"
        try:
            tokenizer = Tokenizer.from_str((bundle / TOKENIZER).read_text(encoding="utf-8"))
            opened = cls(tokenizer, manifest.max_length, manifest.vocab_size, manifest.special_ids.get("mask"))
        except Exception as error:  # the binding raises a bare Exception
            raise BundleError(f"{file} is not a tokenizer: {error}") from error
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

    def sizes_bytes(self, inputs: Sequence[TextInput]) -> list[int]:
        """Size of each input; raises `InvalidRequest` for a text of more than `max_characters`."""
        sizes = []
        for index, value in enumerate(inputs):
            if not isinstance(value, str | tuple):
                sizes.append(4 * len(value if isinstance(value, list) else value.ids))
                continue
            size = len(value) if isinstance(value, str) else len(value[0]) + len(value[1])
            if size > self.max_characters:
                raise InvalidRequest(
                    f"input {index} has {size} characters; at most {self.max_characters} are read"
                    f" ({CHARACTERS_PER_TOKEN} for each of the model's {self.max_length} tokens)"
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
        for source, (text, encoding) in enumerate(zip(texts, self._tokenizer.encode_batch(list(texts)), strict=True)):
            whole, surplus = self._fitted(source, text, encoding, truncate=truncate)
            spans, words = _alignment(whole)
            aligned.append(
                AlignedText(ids=array("i", whole.ids), truncated=surplus, source=source, spans=spans, words=words)
            )
        return aligned

    def windows_sizes_bytes(self, pairs: Sequence[tuple[str, str]]) -> list[int]:
        """Size of each pair whose second part is read in windows.

        Raises:
            InvalidRequest: A first part has more than `max_characters`, or a second more than its limit.
        """
        sizes = self.sizes_bytes([first for first, _ in pairs])
        for index, (_, second) in enumerate(pairs):
            size = len(second.encode())
            if size > CONTEXT_LIMIT_BYTES:
                raise InvalidRequest(
                    f"the context of input {index} has {size} bytes; at most {CONTEXT_LIMIT_BYTES} are read"
                )
            sizes[index] += size
        return sizes

    def encode_windows(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        length: int,
        overlap: int,
        truncate: Truncate,
        whole_words: bool = True,
    ) -> list[AlignedText]:
        """Token ids of each pair, its second part in as many windows as it needs; nothing of it is cut off.

        Args:
            pairs: Every window repeats the first part.
            length: Tokens of a window, both parts and special tokens included.
            overlap: Tokens of the second part that neighbouring windows share; fewer where windows would not go on by
                a sixth of their length.
            truncate: Whether to cut what of a first part goes beyond half of a window.
            whole_words: Whether `spans` are those of whole words in the second part, or of tokens.

        Raises:
            InvalidRequest: A first part is too long, or a window too short for any second.
        """
        parts = self._tokenizer.encode_batch([part for pair in pairs for part in pair], add_special_tokens=False)
        return [
            window
            for source, (first, second) in enumerate(zip(parts[::2], parts[1::2], strict=True))
            for window in self._windows(
                source, first, second, length, overlap, whole_words=whole_words, truncate=truncate
            )
        ]

    def decode(self, ids: Sequence[int], *, bare: bool = False) -> str:
        """The text of token ids; `bare` leaves out special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=bare)
        return text

    def name(self, token: int) -> str:
        """What the vocabulary calls a token."""
        return self._tokenizer.id_to_token(token) or ""

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
        first: Encoding,
        second: Encoding,
        length: int,
        overlap: int,
        *,
        whole_words: bool,
        truncate: Truncate,
    ) -> Iterator[AlignedText]:
        cut = self._cut_first(source, first, length, truncate=truncate)
        # What stands around the second part is the same in every window: it is read off around any text.
        frame = self._tokenizer.post_process(first, self._tokenizer.encode("a", add_special_tokens=False))
        inside = [index for index, part in enumerate(frame.sequence_ids) if part == 1]
        head, tail = inside[0], len(frame) - inside[-1] - 1
        room = length - head - tail
        if room < 1:
            raise InvalidRequest(f"a window of {length} tokens leaves no room for a context")
        step = max(room - overlap, length // _WINDOW_STEPS, 1)
        ids, (spans, words) = second.ids, _alignment(second)
        if whole_words:
            spans = _of_words(spans, words)
        for start in range(0, max(1, len(ids) - room + step), step):
            own = slice(start, start + room)
            size = len(ids[own])
            types = [*frame.type_ids[:head], *[frame.type_ids[head]] * size, *frame.type_ids[len(frame) - tail :]]
            yield AlignedText(
                ids=array("i", [*frame.ids[:head], *ids[own], *frame.ids[len(frame) - tail :]]),
                type_ids=array("i", types),
                truncated=cut if start == 0 else 0,
                source=source,
                spans=np.pad(spans[own], ((head, tail), (0, 0))),
                words=np.pad(words[own], (head, tail), constant_values=-1),
            )

    def _cut_first(self, source: int, first: Encoding, length: int, *, truncate: Truncate) -> int:
        """Leaves half of a window to the second part; returns how many of the first were cut."""
        most = max(0, length // 2 - self._tokenizer.num_special_tokens_to_add(is_pair=True))
        surplus = len(first) - most
        if surplus <= 0:
            return 0
        if not truncate:
            raise InvalidRequest(
                f"the question of input {source} has {len(first)} tokens; the model takes {most}:"
                " shorten it or allow truncation"
            )
        first.truncate(most)
        return surplus

    def _encoded(self, index: int, value: TextInput, *, truncate: Truncate) -> EncodedText:
        if not isinstance(value, str | tuple):
            return self._check_ids(index, value)
        if self._wordpieces is not None and isinstance(value, str):
            ids = self._wordpieces.encode(value)
            if ids is not None and len(ids) <= self.max_length:
                return EncodedText(ids)
        # Unlike `encode`, this holds neither the interpreter's lock nor the characters' positions.
        encoding = self._tokenizer.encode_batch_fast([value])[0]
        whole, surplus = self._fitted(index, value, encoding, truncate=truncate)
        types = None if isinstance(value, str) else array("i", whole.type_ids)
        return EncodedText(array("i", whole.ids), types, surplus)

    def _fitted(
        self, index: int, value: str | tuple[str, str], encoding: Encoding, *, truncate: Truncate
    ) -> tuple[Encoding, int]:
        """The encoding of an input that fits, and how many tokens were cut off.

        Cuts the longer part first, as BERT was trained on pairs, and keeps every special token.
        """
        surplus = len(encoding) - self.max_length
        if surplus <= 0:
            return encoding, 0
        if not truncate:
            raise InvalidRequest(
                f"input {index} has {len(encoding)} tokens; the model takes {self.max_length}:"
                " shorten it or allow truncation"
            )
        parts = (value,) if isinstance(value, str) else value
        encodings = [self._tokenizer.encode(part, add_special_tokens=False) for part in parts]
        lengths = list(map(len, encodings))
        for _ in range(surplus):
            lengths[lengths.index(max(lengths))] -= 1
        for part, length in zip(encodings, lengths, strict=True):
            part.truncate(length, direction="left" if truncate == "left" else "right")
        return self._tokenizer.post_process(encodings[0], encodings[1] if len(encodings) > 1 else None), surplus

    def _check_ids(self, index: int, value: list[int] | EncodedText) -> EncodedText:
        ids = value if isinstance(value, list) else value.ids
        if not 0 < len(ids) <= self.max_length:
            raise InvalidRequest(f"input {index} has {len(ids)} token ids; between 1 and {self.max_length} are taken")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidRequest(f"input {index} holds a token id outside 0..{self._vocab_size - 1}")
        return EncodedText(array("i", value)) if isinstance(value, list) else value


def _alignment(encoding: Encoding) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Characters [tokens, 2] and word [tokens] of each token; the word is -1 for what the text does not hold."""
    words = [-1 if word is None else word for word in encoding.word_ids]
    return np.array(encoding.offsets, np.int32).reshape(-1, 2), np.array(words, np.int32)


def _of_words(spans: NDArray[np.int32], words: NDArray[np.int32]) -> NDArray[np.int32]:
    """For each token, the characters of its whole word."""
    if not len(words):
        return spans
    begins = np.flatnonzero(np.diff(words, prepend=-2))
    ends = np.append(begins[1:], len(words)) - 1
    sizes = ends - begins + 1
    return np.repeat(np.stack([spans[begins, 0], spans[ends, 1]], axis=1), sizes, axis=0)
