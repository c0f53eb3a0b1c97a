"""What messages about several tasks share: what to do with texts that are too long, and more."""

from __future__ import annotations

import msgspec

from serving.errors import InvalidRequest
from serving.tasks.windows import Long, Windows, WindowScores


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


class LongText(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with texts that are too long.

    Attributes:
        long: `window` reads them in overlapping windows and cuts nothing off.
        window_tokens: Of a window; null means as many as the model takes.
        window_overlap: Tokens that neighbouring windows share; null means 128, or a quarter of a window.
    """

    long: Long = "truncate"
    window_tokens: int | None = None
    window_overlap: int | None = None

    @property
    def windows(self) -> Windows | None:
        return windows_of(self.long, self.window_tokens, self.window_overlap, None)


class LongScored(LongText, frozen=True, kw_only=True):
    """The same of texts that have scores; `window_scores` says which is the text's: the highest (null), or the mean."""

    window_scores: WindowScores | None = None

    @property
    def windows(self) -> Windows | None:
        return windows_of(self.long, self.window_tokens, self.window_overlap, self.window_scores)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How Hugging Face's own servers should handle a request; not used here."""

    use_cache: bool | None = None
    use_gpu: bool | None = None
    wait_for_model: bool | None = None
