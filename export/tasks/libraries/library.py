"""The interface of reference libraries for the end-to-end check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.tasks.libraries.answers import Answer, Variant
    from bertserve.export.texts.corpus import Text

    Tokens = tuple[list[int], list[int]]

BESIDE = ("attention_mask", "token_type_ids")
"""Outputs of a tokenizer besides token ids."""


class Library(ABC):
    """A library that has loaded a checkpoint's folder.

    Attributes:
        missing: Whether it found no weights for a part of the model, and filled that part with random numbers.
    """

    title: ClassVar[str]
    name: str
    tokenizer: Any
    missing: bool

    @abstractmethod
    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Loads a checkpoint's folder."""

    @property
    def longest(self) -> int:
        """Tokens of its longest input."""
        return int(self.tokenizer.model_max_length)

    @longest.setter
    def longest(self, length: int) -> None:
        self.tokenizer.model_max_length = length

    @abstractmethod
    def variants(self) -> list[Variant]:
        """The variants of requests that are compared, the usual one first."""

    def tokenized(self) -> list[Variant]:
        """The variants whose tokens are compared: by default the usual one."""
        return self.variants()[:1]

    @abstractmethod
    def asked(self, text: Text) -> Text | None:
        """A text as an input of the task; None if it cannot be one."""

    @abstractmethod
    def encode(self, text: Text) -> list[Tokens]:
        """Token ids and token types of an input, or of each of its windows, in each variant of `tokenized`.

        Tokens that attention ignores have complements of ids, as in `EncodedText`.
        """

    @abstractmethod
    def answer(self, texts: Sequence[Text], variant: Variant) -> list[Answer]:
        """The answers that the library's users get."""


def tokens(features: Mapping[str, Any], row: int = 0) -> Tokens:
    """The token ids and token types of one row of a batch, without padding."""
    ids = [int(token) for token in features["input_ids"][row]]
    columns = {name: [int(value) for value in features[name][row]] for name in features if name in BESIDE}
    seen = [at for at, is_text in enumerate(columns.get("attention_mask", [1] * len(ids))) if is_text]
    types = columns.get("token_type_ids", [0] * len(ids))
    return [ids[at] for at in seen], [types[at] for at in seen]
