"""Text to token ids, with bounds: what is too long is cut and counted, or refused before any work."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from serving.bundle import BundleError
from serving.errors import InvalidRequest
from serving.manifest import TOKENIZER
from serving.records import EncodedText

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Encoding

    from serving.manifest import Manifest
    from serving.records import TextInput

CHARACTERS_PER_TOKEN = 32
"""A text may have this many characters for each token that the model takes."""


class TextTokenizer:
    """The tokenizer of one model.

    Attributes:
        max_length: Tokens of the longest input, special tokens included.
        max_characters: Characters of the longest text that is tokenised at all.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.max_length = max_length
        self.max_characters = CHARACTERS_PER_TOKEN * max_length

    @classmethod
    def open(cls, bundle: Path, manifest: Manifest) -> TextTokenizer:
        """Reads the tokenizer of a verified bundle.

        Raises:
            BundleError: It does not parse, or is not the one that the manifest describes.
        """
        try:
            tokenizer = Tokenizer.from_str((bundle / TOKENIZER).read_text(encoding="utf-8"))
        except Exception as error:  # the binding raises a bare Exception
            raise BundleError(f"bundle {bundle}: {TOKENIZER} is not a tokenizer: {error}") from error
        if tokenizer.truncation is not None or tokenizer.padding is not None:
            raise BundleError(f"bundle {bundle}: {TOKENIZER} truncates or pads; lengths belong to the manifest")
        for role, token in manifest.special_ids.items():
            if tokenizer.id_to_token(token) is None:
                raise BundleError(f"bundle {bundle}: {TOKENIZER} has no token {token}, the manifest's {role} token")
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        if size > manifest.vocab_size:
            raise BundleError(f"bundle {bundle}: {TOKENIZER} has {size} tokens, the model {manifest.vocab_size}")
        return cls(tokenizer, manifest.max_length, manifest.vocab_size)

    def size_bytes(self, inputs: Sequence[TextInput]) -> int:
        """Size of the inputs, after checking that each is short enough to be tokenised.

        Raises:
            InvalidRequest: A text has more than `max_characters`.
        """
        total = 0
        for index, value in enumerate(inputs):
            if isinstance(value, list):
                total += 4 * len(value)
                continue
            size = len(value) if isinstance(value, str) else len(value[0]) + len(value[1])
            if size > self.max_characters:
                raise InvalidRequest(
                    f"input {index} has {size} characters; at most {self.max_characters} are read"
                    f" ({CHARACTERS_PER_TOKEN} for each of the model's {self.max_length} tokens)"
                )
            total += len(value.encode()) if isinstance(value, str) else sum(len(part.encode()) for part in value)
        return total

    def encode(self, inputs: Sequence[TextInput], *, truncate: bool) -> list[EncodedText]:
        """Token ids of each input; one bad input never touches its neighbours.

        Args:
            inputs: Texts, pairs or token ids.
            truncate: Cut what is too long instead of refusing it.

        Raises:
            InvalidRequest: An input is too long, or its ids are not the model's.
        """
        # One call for all: it holds neither the interpreter's lock nor, as `encode` does, character offsets.
        if len(inputs) == 1 and isinstance(inputs[0], str):
            return [self._fitted(0, inputs[0], self._tokenizer.encode_batch_fast(inputs)[0], truncate=truncate)]
        encodings = iter(self._tokenizer.encode_batch_fast([value for value in inputs if not isinstance(value, list)]))
        return [
            self._check_ids(index, value)
            if isinstance(value, list)
            else self._fitted(index, value, next(encodings), truncate=truncate)
            for index, value in enumerate(inputs)
        ]

    def _fitted(self, index: int, value: str | tuple[str, str], encoding: Encoding, *, truncate: bool) -> EncodedText:
        surplus = len(encoding) - self.max_length
        if surplus <= 0:
            return _encoded(encoding, paired=not isinstance(value, str), truncated=0)
        if not truncate:
            raise InvalidRequest(
                f"input {index} has {len(encoding)} tokens; the model takes {self.max_length}:"
                " shorten it or allow truncation"
            )
        return self._truncated(value, surplus)

    def _truncated(self, value: str | tuple[str, str], surplus: int) -> EncodedText:
        """Cuts the longer part first, as BERT was trained on pairs, and keeps every special token."""
        parts = (value,) if isinstance(value, str) else value
        encodings = [self._tokenizer.encode(part, add_special_tokens=False) for part in parts]
        lengths = [len(encoding) for encoding in encodings]
        for _ in range(surplus):
            lengths[lengths.index(max(lengths))] -= 1
        for encoding, length in zip(encodings, lengths, strict=True):
            encoding.truncate(length)
        whole = self._tokenizer.post_process(encodings[0], encodings[1] if len(encodings) > 1 else None)
        return _encoded(whole, paired=len(parts) > 1, truncated=surplus)

    def _check_ids(self, index: int, ids: list[int]) -> EncodedText:
        if not 0 < len(ids) <= self.max_length:
            raise InvalidRequest(f"input {index} has {len(ids)} token ids; between 1 and {self.max_length} are taken")
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            raise InvalidRequest(f"input {index} holds a token id outside 0..{self._vocab_size - 1}")
        return EncodedText(array("i", ids))


def _encoded(encoding: Encoding, *, paired: bool, truncated: int) -> EncodedText:
    return EncodedText(array("i", encoding.ids), array("i", encoding.type_ids) if paired else None, truncated)
