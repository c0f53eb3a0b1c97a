"""Judges the folders of the seeds on the command line, or of ranges such as `150-199`, and prints what it finds."""

from __future__ import annotations

import sys
from collections import Counter

import torch

from tests.support.folders import grammar, search


def _seeds(words: list[str]) -> list[int]:
    ranges = [word.partition("-") for word in words]
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]


def main(words: list[str]) -> int:
    """Prints what became of each folder, and each one with a fault reduced; returns 1 if there is one."""
    torch.set_num_threads(1)  # as in tests/export/conftest.py
    counts: Counter[str] = Counter()
    for seed in _seeds(words):
        draw = grammar.drawn(seed)
        verdict = search.judged(draw, seed, fused=True)
        counts[verdict.outcome] += 1
        found = search.finding(seed, draw, verdict, fused=True) if verdict.outcome == "fault" else verdict.words
        print(f"{verdict.outcome:10} {seed:5} {grammar.shown(draw)}\n    {found}", flush=True)  # noqa: T201
    print(dict(counts))  # noqa: T201
    return bool(counts["fault"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
