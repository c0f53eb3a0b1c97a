"""Sample texts."""

from __future__ import annotations

import json
import random

from tests.support.models import ROOT

_WORDS = ("the", "server", "takes", "a", "text", "and", "answers", "with", "numbers", "that", "depend", "on", "it")
_PARITY_TEXTS = ROOT / "export" / "texts" / "parity.jsonl"


def sample(count: int = 40) -> list[str]:
    """Always the same texts of many lengths and languages; the five longest of all are among them."""
    lines = _PARITY_TEXTS.read_text(encoding="utf-8").splitlines()
    texts = [entry["text"] for entry in map(json.loads, lines) if "pair" not in entry]
    texts.sort(key=len)
    return texts[-5:] + random.Random(7).sample(texts[:-5], count - 5)


def mixed(count: int, seed: int = 1) -> list[str]:
    """Distinct texts from 1 to about 200 words, short ones far more often than long ones."""
    dice = random.Random(seed)
    return [
        " ".join([str(number), *dice.choices(_WORDS, k=min(200, int(dice.expovariate(1 / 12))))])
        for number in range(count)
    ]
