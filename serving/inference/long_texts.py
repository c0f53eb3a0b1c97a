"""What requests of every protocol may ask to be done with texts that are too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from serving.errors import InvalidRequest
from serving.records import Windows

if TYPE_CHECKING:
    from serving.records import Long, WindowScores


def windows_of(
    long: Long | None, tokens: int | None, overlap: int | None, scores: WindowScores | None
) -> Windows | None:
    """What a request asks for by its fields `long`, `window_tokens`, `window_overlap` and `window_scores`."""
    fields = {"tokens": tokens, "overlap_tokens": overlap, "scores": scores}
    given = {name: value for name, value in fields.items() if value is not None}
    if long == "window":
        return msgspec.convert(given, Windows)
    if given:
        raise InvalidRequest("`window_tokens`, `window_overlap` and `window_scores` need `long` to be `window`")
    return None
