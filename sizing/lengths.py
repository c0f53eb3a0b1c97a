"""How long the texts are: a mix as `bertserve simulate` takes it, a file of texts, or what a server counted."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from simulate.errors import SimulateError
from simulate.traffic import parse_mix
from sizing.errors import SizeError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenizers import Tokenizer

_TIMEOUT_S = 5.0
_TOKENS_OF_WORD, _SPECIAL = 1.3, 2
"""Of English texts in a vocabulary of wordpieces, and those around every text."""
_COUNTERS = ("bertserve_tokens_total", "bertserve_texts_total")


class Lengths(NamedTuple):
    """A mix of lengths.

    Attributes:
        mix: Weights by number of tokens.
        fact: Where it is from, and what is not known of it.
    """

    mix: Mapping[int, float]
    fact: str

    @property
    def mean(self) -> float:
        """Tokens of a text on average."""
        return sum(tokens * weight for tokens, weight in self.mix.items()) / sum(self.mix.values())

    def scaled(self, factor: float, most: int) -> Lengths:
        """The same texts, each longer by a factor; what is longer than `most` is cut."""
        mix: dict[int, float] = {}
        for tokens, weight in self.mix.items():
            length = min(most, max(1, round(tokens * factor)))
            mix[length] = mix.get(length, 0.0) + weight
        return Lengths(mix, self.fact)


def read_lengths(given: str, most: int, tokenizer: Tokenizer | None = None) -> Lengths:
    """The lengths that a command line names, none longer than the encoder takes.

    Args:
        given: A mix, the path of a file with a text a line, or the URL of a server's metrics.
        most: Tokens of the longest text.
        tokenizer: Counts a text's tokens; None estimates them from words.

    Raises:
        SizeError: It is none of these.
    """
    if re.match(r"https?://", given):
        found = _of_server(given)
    elif Path(given).is_file():
        found = _of_file(Path(given), tokenizer)
    else:
        try:
            found = Lengths(parse_mix(given), f"lengths in tokens: {given}")
        except SimulateError as error:
            hint = "or the path of a file with a text a line, or the URL of a server's /metrics"
            raise SizeError(f"{error}, {hint}") from error
    cut = found.scaled(1.0, most)
    longer = sum(weight for tokens, weight in found.mix.items() if tokens > most) / sum(found.mix.values())
    return cut._replace(fact=f"{cut.fact}; {100 * longer:.1f}% are cut to {most} tokens") if longer else cut


def _of_file(path: Path, tokenizer: Tokenizer | None) -> Lengths:
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SizeError(f"--lengths {path}: cannot be read as UTF-8 text ({error})") from error
    if not texts:
        raise SizeError(f"--lengths {path}: holds no text; one a line is taken")
    if tokenizer is None:
        counts = [round(_TOKENS_OF_WORD * len(text.split())) + _SPECIAL for text in texts]
        how = f"estimated from words, {_TOKENS_OF_WORD:g} tokens each: a tokenizer.json beside it counts them"
    else:
        counts = [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)]
        how = "counted by its tokenizer"
    mix = {tokens: float(count) for tokens, count in sorted(Counter(counts).items())}
    return Lengths(mix, f"lengths of {len(texts)} texts of {path.name}, {how}")


def _of_server(url: str) -> Lengths:
    """A server counts texts and tokens and keeps no lengths, so that their mean alone is known."""
    if not url.rstrip("/").endswith("/metrics"):
        url = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310  http or https
            text = reply.read().decode()
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise SizeError(f"--lengths {url}: {getattr(error, 'reason', error)}") from error
    tokens, texts = (_total(text, name) for name in _COUNTERS)
    if tokens is None or texts is None:
        raise SizeError(f"--lengths {url}: shows no {' and '.join(_COUNTERS)}; give the URL of the metrics port")
    if not texts:
        raise SizeError(f"--lengths {url}: the server has not answered a text yet")
    mean = max(1, round(tokens / texts))
    fact = (
        f"lengths of {texts:.0f} texts that the server at {url} answered: {mean} tokens on average. It keeps no "
        "distribution, so all are taken as that long: longer ones wait longer than is said here"
    )
    return Lengths({mean: 1.0}, fact)


def _total(text: str, name: str) -> float | None:
    found = [float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)]
    return sum(found) if found else None
