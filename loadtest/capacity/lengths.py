"""Distribution of text lengths: a mix, a file of texts, or a server's metrics."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

_TIMEOUT_S = 5.0
_TOKENS_OF_WORD, _SPECIAL = 1.3, 2
"""Tokens per word of English text in a WordPiece vocabulary, and special tokens of each text."""

_HISTOGRAM = "bertserve_text_tokens"
_BUCKET = re.compile(rf'^{_HISTOGRAM}_bucket{{le="([^"]+)"}} (\S+)$', re.MULTILINE)


_MIX = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?(?::(\d+(?:\.\d+)?))?")


class Lengths(NamedTuple):
    """A distribution of text lengths.

    Attributes:
        mix: Weights by number of tokens.
        fact: Origin and uncertainty of the lengths, as text.
    """

    mix: Mapping[int, float]
    fact: str

    @property
    def mean(self) -> float:
        """Mean number of tokens per text."""
        return sum(tokens * weight for tokens, weight in self.mix.items()) / sum(self.mix.values())

    def scaled(self, factor: float, most: int) -> Lengths:
        """The same texts with their lengths multiplied by a factor; longer ones are truncated to `most`."""
        mix: dict[int, float] = {}
        for tokens, weight in self.mix.items():
            length = min(most, max(1, round(tokens * factor)))
            mix[length] = mix.get(length, 0.0) + weight
        return Lengths(mix, self.fact)


def parse_mix(given: str, option: str) -> dict[int, float]:
    """Weights by number of tokens, as in `128`, `8:70,32:30` or `10-250`, a range whose lengths share its weight.

    `option` is the option's name for the error message.

    Raises:
        BenchError: The syntax is invalid.
    """
    mix: dict[int, float] = {}
    for part in given.split(","):
        found = _MIX.fullmatch(part.strip())
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not found or not 0 < low <= high:
            raise BenchError(f"{option} {given}: must look like 128, 8:70,32:30 or 10-250")
        weight = float(found[3] or 1) / (high - low + 1)
        for tokens in range(low, high + 1):
            mix[tokens] = mix.get(tokens, 0.0) + weight
    if not any(mix.values()):
        raise BenchError(f"{option} {given}: at least one weight must be above 0")
    return mix


def read_lengths(given: str, most: int, tokenizer: Tokenizer | None = None) -> Lengths:
    """The lengths of a command line, truncated to the encoder's maximum.

    Args:
        given: A mix, the path of a file with one text per line, or the URL of a server's metrics.
        most: Maximum text length, in tokens.
        tokenizer: Counts a text's tokens; None estimates them from words.

    Raises:
        BenchError: It is none of these.
    """
    if re.match(r"https?://", given):
        found = _of_server(given)
    elif Path(given).is_file():
        found = _of_file(Path(given), tokenizer)
    else:
        try:
            found = Lengths(parse_mix(given, "--lengths"), f"lengths in tokens: {given}")
        except BenchError as error:
            hint = "or be the path of a file with one text per line, or the URL of a server's /metrics"
            raise BenchError(f"{error}, {hint}") from error
    cut = found.scaled(1.0, most)
    longer = sum(weight for tokens, weight in found.mix.items() if tokens > most) / sum(found.mix.values())
    return cut._replace(fact=f"{cut.fact}; {100 * longer:.1f}% are truncated to {most} tokens") if longer else cut


def _of_file(path: Path, tokenizer: Tokenizer | None) -> Lengths:
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--lengths {path}: cannot be read as UTF-8 text ({error})") from error
    if not texts:
        raise BenchError(f"--lengths {path}: has no texts; expected one per line")
    if tokenizer is None:
        counts = [round(_TOKENS_OF_WORD * len(text.split())) + _SPECIAL for text in texts]
        how = f"estimated from words, {_TOKENS_OF_WORD:g} tokens each; to count tokens, put a tokenizer.json beside it"
    else:
        counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
        how = "counted by its tokenizer"
    mix = {tokens: float(count) for tokens, count in sorted(Counter(counts).items())}
    return Lengths(mix, f"lengths of {len(texts)} texts of {path.name}, {how}")


def _of_server(url: str) -> Lengths:
    """Lengths from a server's histogram; assumes an even spread within each bucket."""
    if not url.rstrip("/").endswith("/metrics"):
        url = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310  http or https
            shown = reply.read().decode()
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise BenchError(f"--lengths {url}: {getattr(error, 'reason', error)}") from error
    counts = [(float(bound), float(count)) for bound, count in _BUCKET.findall(shown)]
    if not counts:
        raise BenchError(f"--lengths {url}: no metric {_HISTOGRAM}; use the URL of the metrics port")
    _, texts = counts.pop()  # the infinite bucket
    if not texts:
        raise BenchError(f"--lengths {url}: the server has not processed any texts yet")
    longest = int(counts[-1][0])
    mix = {longest: beyond} if (beyond := texts - counts[-1][1]) else {}
    for (low, below), (high, up_to) in pairwise([(0.0, 0.0), *counts]):
        for tokens in range(int(low) + 1, int(high) + 1) if up_to > below else ():
            mix[tokens] = mix.get(tokens, 0.0) + (up_to - below) / (high - low)
    fact = f"lengths of {texts:.0f} texts that the server at {url} processed, assumed uniform within each bucket"
    return Lengths(mix, f"{fact}, {beyond:.0f} of them longer than {longest} tokens" if beyond else fact)
