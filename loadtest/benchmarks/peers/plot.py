"""The plot: bars for every server, lengths side by side, latency above throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING

from charts.bars import Bar, Block, bars_file
from loadtest.benchmarks.peers.subjects import MANY, ONE, subjects

if TYPE_CHECKING:
    from loadtest.benchmarks.peers.store import Store

_COLOURS = {"bertserve": "blue", "raw engine": "violet"}


def svg(found: Store) -> str:
    """The plot as a file of its own, which follows the reader's light or dark scheme."""
    shown = subjects(found.facts.model["model"])

    def block(title: str, connections: int, figure: str, decimals: int) -> Block:
        panels = {}
        for tokens in sorted(found.lengths):
            spreads = [found.figure(tokens, subject, connections, figure) for subject in shown]
            panels[f"{tokens} tokens"] = [Bar(spread.median, spread.low, spread.high) for spread in spreads]
        return Block(title, decimals, panels)

    blocks = [
        block("p50 at 1 connection, ms (shorter is better)", ONE, "p50_ms", 2),
        block(f"texts a second at {MANY} connections (longer is better)", MANY, "per_s", 0),
    ]
    names = [(subject.name, _COLOURS.get(subject.system, "grey")) for subject in shown]
    return bars_file("p50 and throughput of every server", names, blocks)
