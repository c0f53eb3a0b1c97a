"""Inputs, tokens and output rows: plain data shared by all packages, without imports from the project.

Records are `msgspec.Struct`s, which are created in C. A request creates about a dozen. A dataclass would take 4 us
longer for each while a model's weights sweep the caches.
"""

from __future__ import annotations

from array import array
from typing import Literal, NewType, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32] | NDArray[np.int32]
"""One output of a graph."""

Row: TypeAlias = tuple[Array, ...]
"""One text's row of every output; per-token outputs have the batch's padded length."""

Side = Literal["left", "right"]
"""The end of a text that truncation cuts off."""

Truncate = bool | Side
"""Whether to truncate inputs that are too long: at the named end, or at the model's default end (true)."""

TokenIds = array
"""Token ids as an `array('i')`: four bytes each in native byte order, as on the wire."""

ModelIndex = NewType("ModelIndex", int)
"""Index of a model in the list that the engine process was started with."""

BULK = 4
"""Priority of bulk work: it gets the spare capacity, plus a reserved share of the device."""

PRIORITIES = (1, 2, 3, BULK)
"""Request priorities. Among the first three the smaller number always goes first, as in Triton."""

DEFAULT_PRIORITY = 2

IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "mask_positions"
"""Names of the inputs that a graph may have."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a graph; -1 is a dynamic dimension."""

    name: str
    dtype: Literal["int32", "float32"]
    shape: tuple[int, ...]


class EncodedText(msgspec.Struct, frozen=True):
    """One input as token ids, including special tokens.

    Attributes:
        ids: A token that attention must ignore has the bitwise complement of its id, which is negative.
        type_ids: Token type of each token; None if all are 0.
        truncated: Number of tokens that were cut off.
    """

    ids: TokenIds[int]
    type_ids: TokenIds[int] | None = None
    truncated: int = 0


class AlignedText(EncodedText, frozen=True, eq=False, kw_only=True):
    """An input, or a window of it, whose tokens are aligned with its text (of a pair, with the second text).

    Attributes:
        source: Index of the input in the request.
        spans: int32 [tokens, 2], the character range [start, end) of each token.
        words: int32 [tokens], the word number of each token; -1 for tokens outside the text.
        start: For a window, number of the text's tokens before it.
        head: For a window, number of tokens before the text's, the same in every window.
        tail: For a window, number of tokens after the text's, the same in every window.
    """

    source: int
    spans: NDArray[np.int32]
    words: NDArray[np.int32]
    start: int = 0
    head: int = 0
    tail: int = 0


class EncodedChunk(EncodedText, frozen=True, kw_only=True):
    """A chunk of an input.

    Attributes:
        source: Index of the input in the request.
        start: Index of its first character in the input.
        end: Index after its last character.
    """

    source: int
    start: int
    end: int


TextInput = str | tuple[str, str] | list[int] | EncodedText
"""One input: a text, a pair of texts, or token ids with special tokens, with or without token types."""
