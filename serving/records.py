"""The inputs, tokens and rows that all rooms hand on: plain data, without imports from the project.

Records are `msgspec.Struct`s, made in C: a request makes a dozen, and a dataclass would cost 4 us more for each while
a model's weights sweep the caches.
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
"""One text's part of every output; outputs of a token each are as long as the batch was padded."""

Side = Literal["left", "right"]
"""The end of a text that is cut off."""

Truncate = bool | Side
"""Whether inputs that are too long are cut: at the end that is named, or at the model's own (true)."""

TokenIds = array
"""Token ids as an `array('i')`: four bytes each in the machine's order, the wire's own layout."""

ModelIndex = NewType("ModelIndex", int)
"""Position of a model in the list that the engine process was started with."""

BULK = 4
"""The class of work that nobody waits for: it has what the others leave, and a share of the device besides."""

PRIORITIES = (1, 2, 3, BULK)
"""Classes of requests; of the first three a smaller number goes first, always, as Triton counts them."""

DEFAULT_PRIORITY = 2

IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "mask_positions"
"""Names of the inputs that a graph may have."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of a graph; -1 stands for a dimension that varies."""

    name: str
    dtype: Literal["int32", "float32"]
    shape: tuple[int, ...]


class EncodedText(msgspec.Struct, frozen=True):
    """One input as token ids, special tokens included.

    Attributes:
        type_ids: Segment of each token; None when all are 0.
        truncated: Tokens that were cut off.
    """

    ids: TokenIds[int]
    type_ids: TokenIds[int] | None = None
    truncated: int = 0


class AlignedText(EncodedText, frozen=True, eq=False, kw_only=True):
    """An input, or a window of one, whose tokens point back into its text (of a pair: into the second part).

    Attributes:
        source: Position of the input in the request.
        spans: int32 [tokens, 2], the characters [start, end) that each token stands for.
        words: int32 [tokens], the number of each token's word; -1 for tokens that are not of the text.
        start: Of a window: how many tokens of the text lie before it.
        head: Of a window: how many tokens stand before those of the text, in every window of it.
        tail: Likewise behind them.
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
        source: Position of the input in the request.
        start: Its first character in the input.
        end: The character behind its last.
    """

    source: int
    start: int
    end: int


TextInput = str | tuple[str, str] | list[int] | EncodedText
"""One input: a text, a pair of texts, or token ids with their special tokens, with or without segments."""
