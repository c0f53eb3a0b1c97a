"""Judges the folders of the seeds on the command line, or of ranges such as `150-199`, and prints what it finds."""

from __future__ import annotations

import sys

from tests.support.folders import grammar, search


def _seeds(words: list[str]) -> list[int]:
    ranges = [word.partition("-") for word in words]
    return [seed for first, _, last in ranges for seed in range(int(first), int(last or first) + 1)]


def main(words: list[str]) -> int:
    """Prints each folder with a fault; returns 1 if there is one."""
    counts: dict[str, int] = {}
    faults = 0
    for seed in _seeds(words):
        findings, outcome = search.search([seed])
        counts = {name: counts.get(name, 0) + outcome.get(name, 0) for name in {*counts, *outcome}}
        print(*outcome, seed, grammar.shown(grammar.drawn(seed)), *findings, sep="  ", flush=True)  # noqa: T201
        faults += len(findings)
    print(counts)  # noqa: T201
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
