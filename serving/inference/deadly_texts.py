"""Texts that ended two engine processes, stored as digests; the number is limited and no text is kept."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

from bertserve.serving.errors import EngineFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.records import EncodedText, ModelIndex

_DIGEST_BYTES = 16

_REFUSAL = "an input of this request crashed the engine twice and is now rejected"


class DeadlyTexts:
    """Remembers the last `most` texts by model and token ids; another version of the model may survive them.

    Attributes:
        told: The digests, and whether the rejection was reported.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self.told: dict[bytes, bool] = {}

    def add(self, model: ModelIndex, text: EncodedText) -> None:
        self.told.setdefault(_digest(model, text), False)
        if len(self.told) > self._most:
            del self.told[next(iter(self.told))]

    def find(self, model: ModelIndex, texts: Sequence[EncodedText]) -> EngineFault | None:
        """The error for a request that contains such a text; None if it contains none."""
        for text in texts:
            digest = _digest(model, text)
            if (told := self.told.get(digest)) is not None:
                self.told[digest] = True
                return EngineFault(_REFUSAL, news=not told)
        return None


def _digest(model: ModelIndex, text: EncodedText) -> bytes:
    types = b"" if text.type_ids is None else text.type_ids.tobytes()
    return blake2b(text.ids.tobytes() + types, digest_size=_DIGEST_BYTES, salt=model.to_bytes(8)).digest()
