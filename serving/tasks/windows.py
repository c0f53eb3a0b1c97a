"""Long texts in overlapping windows: options of requests, encoding, and merging of results."""

from __future__ import annotations

from array import array
from itertools import groupby
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec
import numpy as np

from bertserve.serving.errors import InvalidRequest, quote
from bertserve.serving.records import AlignedText, EncodedText
from bertserve.serving.tasks.base import go_on, with_checks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from bertserve.serving.records import Array, Row, TextInput, TokenIds, Truncate
    from bertserve.serving.tasks.base import Check, Facts, Tokenizer


def windows_of(
    long: Long | None, tokens: int | None, overlap: int | None, scores: WindowScores | None
) -> Windows | None:
    """The windows that a request asks for by `long`, `window_tokens`, `window_overlap` and `window_scores`.

    Raises:
        InvalidRequest: The others are set, but `long` is not `window`.
    """
    fields = {"tokens": tokens, "overlap_tokens": overlap, "scores": scores}
    given = {name: value for name, value in fields.items() if value is not None}
    if long == "window":
        return msgspec.convert(given, Windows)
    if given:
        raise InvalidRequest("`window_tokens`, `window_overlap` and `window_scores` need `long` to be `window`")
    return None


class LongText(msgspec.Struct, frozen=True, kw_only=True):
    """How to handle texts that are too long.

    Attributes:
        long: `window` reads them in overlapping windows and truncates nothing.
        window_tokens: Tokens of a window; null means the model's limit.
        window_overlap: Tokens that neighboring windows share; null means 128, or a quarter of a window if that is less.
    """

    long: Long = "truncate"
    window_tokens: int | None = None
    window_overlap: int | None = None

    @property
    def windows(self) -> Windows | None:
        return windows_of(self.long, self.window_tokens, self.window_overlap, None)


class LongScored(LongText, frozen=True, kw_only=True):
    """How to handle texts that are too long, if texts have scores.

    `window_scores` selects the score of a text: the highest of its windows (null), or their mean.
    """

    window_scores: WindowScores | None = None

    @property
    def windows(self) -> Windows | None:
        return windows_of(self.long, self.window_tokens, self.window_overlap, self.window_scores)


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for Hugging Face's own servers; ignored here."""

    use_cache: bool | None = None
    use_gpu: bool | None = None
    wait_for_model: bool | None = None


Long = Literal["truncate", "window"]
"""How to handle a text that is too long: truncate it (or reject it, depending on `truncate`), or read it in windows."""


WindowScores = Literal["max", "mean"]


class Windows(msgspec.Struct, frozen=True):
    """Read a text that is too long in overlapping windows, instead of truncating it.

    Attributes:
        tokens: Tokens of a window, including special tokens and what each window repeats; None means the model's limit.
        overlap_tokens: Tokens that neighboring windows share; None means 128, or a quarter of a window if that is less.
        scores: The score of a text: the highest of its windows' scores, or their mean.
        most: Maximum windows of a text, beyond which it is truncated; None means no limit.
    """

    tokens: int | None = None
    overlap_tokens: int | None = None
    scores: WindowScores = "max"
    most: int | None = None


USUAL_OVERLAP = 128
MIN_WINDOW = 16


class WindowOptions(Protocol):
    @property
    def windows(self) -> Windows | None: ...


def asked(options: WindowOptions) -> bool:
    return options.windows is not None


def check(options: WindowOptions, manifest: Facts, *, stride: bool = False) -> None:
    """Rejects windows that a model cannot read. A `stride`, as in Transformers, may be longer."""
    windows = options.windows
    if windows is None:
        return
    if windows.tokens is not None and not MIN_WINDOW <= windows.tokens <= manifest.max_length:
        raise InvalidRequest(
            f"`window_tokens` is {quote(windows.tokens)}; it must be {MIN_WINDOW} to {manifest.max_length}"
        )
    length = windows.tokens or manifest.max_length
    name, most, part = (
        ("stride", 2 * length // 3, "two thirds of") if stride else ("window_overlap", length // 2, "half")
    )
    if windows.overlap_tokens is not None and not 0 <= windows.overlap_tokens <= most:
        raise InvalidRequest(f"`{name}` is {quote(windows.overlap_tokens)}; it must be 0 to {most}, {part} a window")


def sizes_bytes(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: WindowOptions, *, truncate: Truncate
) -> list[int]:
    if options.windows is None:
        return tokenizer.sizes_bytes(inputs, truncate=truncate)
    return tokenizer.windows_sizes_bytes(_texts(inputs), truncate=truncate)


def encode(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], options: WindowOptions, *, truncate: Truncate
) -> Sequence[EncodedText]:
    windows = options.windows
    if windows is None:
        return tokenizer.encode(inputs, truncate=truncate)
    length = windows.tokens or tokenizer.max_length
    overlap = min(USUAL_OVERLAP, length // 4) if windows.overlap_tokens is None else windows.overlap_tokens
    return tokenizer.encode_windows(
        _texts(inputs), length=length, overlap=overlap, truncate=truncate, whole_words=False, most=windows.most
    )


def pool(scores: NDArray[np.float64], texts: Sequence[EncodedText], options: WindowOptions) -> NDArray[np.float64]:
    """The scores of each input, [inputs, ...], from those of each of the `texts`, which may be windows of inputs."""
    windows = options.windows
    if windows is None:
        return scores
    sources = [text.source for text in texts if isinstance(text, AlignedText)]
    begins = np.flatnonzero(np.diff(sources, prepend=-1))
    if windows.scores == "max":
        highest: NDArray[np.float64] = np.maximum.reduceat(scores, begins, axis=0)
        return highest
    counts = np.diff(np.append(begins, len(scores)))
    sums: NDArray[np.float64] = np.add.reduceat(scores, begins, axis=0)
    return sums / counts.reshape(-1, *[1] * (scores.ndim - 1))


def by_input(
    texts: Sequence[EncodedText], rows: Sequence[Row]
) -> Iterator[tuple[int, Sequence[AlignedText], Sequence[Row]]]:
    """The position, windows and rows of each input."""
    pairs = [(text, row) for text, row in zip(texts, rows, strict=True) if isinstance(text, AlignedText)]
    for source, group in groupby(pairs, key=lambda pair: pair[0].source):
        windows, own = zip(*group, strict=True)
        yield source, windows, own


def merge(
    windows: Sequence[AlignedText], arrays: Sequence[Array], check: Check = go_on
) -> tuple[AlignedText, NDArray[Any]]:
    """Merges the windows of a text: each token once, from the window with the most context around it.

    Args:
        windows: The windows of the text.
        arrays: An output of the graph for each window, [tokens or more, ...].
        check: Called between windows.

    Returns:
        The text as if the model had read it whole, with the special tokens of its first and last window; and its rows.
    """
    if len(windows) == 1:
        return windows[0], arrays[0]
    # If the model truncates on the left, its windows are ordered from the end of the text.
    windows, arrays = zip(*sorted(zip(windows, arrays, strict=True), key=lambda pair: pair[0].start), strict=True)
    ends = [window.start + len(window.ids) - window.head - window.tail for window in windows]
    # Of two neighbors, the first has the tokens up to the middle of their overlap.
    cuts = [(right.start + end) // 2 for right, end in zip(windows[1:], ends, strict=False)]
    parts = []
    for number, window in enumerate(with_checks(windows, check, 1)):
        low = window.head + cuts[number - 1] - window.start if number else 0
        high = window.head + cuts[number] - window.start if number < len(cuts) else len(window.ids)
        parts.append((window, slice(low, high)))
    ids: TokenIds[int] = array("i")
    for window, part in parts:
        ids += window.ids[part]
    whole = msgspec.structs.replace(
        windows[0],
        ids=ids,
        type_ids=None,
        spans=np.concatenate([window.spans[part] for window, part in parts]),
        words=np.concatenate([window.words[part] for window, part in parts]),
    )
    return whole, np.concatenate([rows[part] for rows, (_, part) in zip(arrays, parts, strict=True)])


def chunk_ranges(
    words: NDArray[np.int32], room: int, overlap: int, surplus: Callable[[int, int], int] = lambda *_: 0
) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of a text's tokens that hold whole words, or parts of words that are longer than `room`.

    Args:
        words: int32 [tokens], the word number of each token; at least one.
        room: Maximum tokens of a range.
        overlap: Minimum number of tokens that a range shares with the previous one, as far as they are whole words.
        surplus: Number of tokens by which a range is too long.
    """
    begins = np.flatnonzero(np.diff(words, prepend=-2, append=-2))
    count = len(words)

    def word_end(begin: int, end: int) -> int:
        last = int(begins[np.searchsorted(begins, end, side="right") - 1])
        return last if last > begin else max(begin + 1, end)

    begin = 0
    while True:
        end = word_end(begin, min(begin + room, count))
        while end > begin + 1 and (over := surplus(begin, end)) > 0:
            end = word_end(begin, end - over)
        yield begin, end
        if end >= count:
            return
        again = int(begins[np.searchsorted(begins, end - overlap, side="right") - 1]) if overlap else end
        begin = again if begin < again < end else end


def too_many_chunks(most: int) -> InvalidRequest:
    return InvalidRequest(f"the texts have more than {most} chunks; send fewer texts, or larger chunks")


def _texts(inputs: Sequence[TextInput]) -> list[str | tuple[str, str]]:
    texts = [value for value in inputs if isinstance(value, str | tuple)]
    if len(texts) != len(inputs):
        raise InvalidRequest("windows need texts as inputs, not token IDs")
    return texts
