"""Measures an artifact's latency on this machine over a small grid of batch sizes and lengths, for the report."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.export.proof.parity import run_batch, text_of_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.export.proof.parity import Count
    from bertserve.serving.engine.base import Engine
    from bertserve.serving.records import EncodedText

BATCHES = (1, 8)
LENGTHS = (16, 32, 128)

_CELL_S = 0.2
_MAX_RUNS = 15
_TOTAL_S = 4.0
"""Time for an artifact's grid. A cell that would exceed it is left out."""


@dataclass(slots=True, frozen=True)
class Latency:
    """One cell of the grid.

    Attributes:
        tokens: Tokens per text, special tokens included.
        p50_ms: Median of `runs` runs, without tokenization and the server's own work.
    """

    batch: int
    tokens: int
    p50_ms: float
    runs: int


def measure(
    engine: Engine, texts: Sequence[EncodedText], *, max_length: int, batches: Sequence[int], count: Count
) -> list[Latency]:
    """Measures the cells that fit into a few seconds, the cheap ones first.

    Raises:
        ExportError: The engine failed on a batch.
    """
    lengths = sorted({min(length, max_length) for length in LENGTHS})
    cells = [(batch, tokens) for batch in batches for tokens in lengths]
    end = time.perf_counter() + _TOTAL_S
    measured: dict[tuple[int, int], Latency] = {}
    for done, (batch, tokens) in enumerate(cells, 1):
        alone = measured.get((1, tokens))
        # A warm-up run, and one measured run.
        expected_s = 2 * batch * alone.p50_ms / 1e3 if alone else 0.0
        if time.perf_counter() + expected_s < end:
            measured[batch, tokens] = _cell(engine, [text_of_length(texts, tokens)] * batch)
        count(done, len(cells))
    return list(measured.values())


def _cell(engine: Engine, texts: Sequence[EncodedText]) -> Latency:
    _run(engine, texts)
    started, runs = time.perf_counter(), list[float]()
    while not runs or (len(runs) < _MAX_RUNS and time.perf_counter() - started < _CELL_S):
        runs.append(_run(engine, texts))
    return Latency(len(texts), len(texts[0].ids), statistics.median(runs), len(runs))


def _run(engine: Engine, texts: Sequence[EncodedText]) -> float:
    started = time.perf_counter()
    run_batch(engine, texts)
    return (time.perf_counter() - started) * 1e3
