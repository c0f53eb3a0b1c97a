"""Distribution of text lengths."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bertserve.loadtest.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIX = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?(?::(\d+(?:\.\d+)?))?")


def mean(mix: Mapping[int, float]) -> float:
    """Mean number of tokens per text."""
    return sum(tokens * weight for tokens, weight in mix.items()) / sum(mix.values())


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
