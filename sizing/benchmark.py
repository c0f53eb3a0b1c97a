"""Whether partial runs foretell whole encoders on this machine: predictions and measurements side by side.

`python -m sizing.benchmark --out docs/benchmarks/sizing.json` runs graphs of one, two and three layers and of all
layers in turns, in one run, and compares what the few foretell with what the whole takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from serving.engine.base import LaneKind
from serving.host import available_cpus, processor
from sizing.costs import LENGTHS
from sizing.encoder import KNOWN, encoder_of
from sizing.fit import Fit, Shape
from sizing.measure import BATCHES, LAYERS, run
from sizing.partial import specs

if TYPE_CHECKING:
    from collections.abc import Sequence

BARS = 2
"""Standard deviations of the error bars that are counted."""

OTHERS = (Shape(20, 1), Shape(100, 1), Shape(300, 1))
"""Lengths that no partial run has: the smooth cost of a layer foretells them."""


@dataclass(slots=True, frozen=True)
class Cell:
    """One batch, foretold and measured.

    Attributes:
        encoder: Its name.
        precision: What was run.
        lane: Wide or narrow.
        tokens: Of each text.
        texts: Of the batch.
        foretold_ms: By partial runs.
        error: Relative, one standard deviation, as the fit expects it.
        measured_ms: The median of the whole encoder.
        known: Whether partial runs had this shape.
    """

    encoder: str
    precision: str
    lane: str
    tokens: int
    texts: int
    foretold_ms: float
    error: float
    measured_ms: float
    known: bool

    @property
    def ratio(self) -> float:
        return self.foretold_ms / self.measured_ms

    @property
    def held(self) -> bool:
        """Whether the error bar holds what was measured."""
        return abs(self.ratio - 1) <= BARS * self.error


def compare(name: str, precision: str, seconds: float) -> list[Cell]:
    """Every shape of one encoder."""
    encoder = encoder_of(name)
    layers = (*LAYERS, encoder.layers)
    shapes = (*(Shape(tokens, 1) for tokens in LENGTHS), *OTHERS, *BATCHES)
    with TemporaryDirectory(prefix="bertserve-size-") as folder:
        models = specs(encoder, precision, Path(folder), layers, _tell)
        samples = run(models, layers, available_cpus(), seconds, _tell, shapes)
    cells = []
    for kind, found in samples.items():
        fit = Fit([one for one in found if one.layers != encoder.layers and one.shape not in OTHERS])
        for whole in (one for one in found if one.layers == encoder.layers):
            us, error = fit.at(encoder.layers, whole.shape)
            sizes = (whole.shape.tokens, whole.shape.texts, us / 1e3, error, whole.us / 1e3, whole.shape not in OTHERS)
            cells.append(Cell(name, precision, LaneKind(kind).value, *sizes))
    return cells


def report(cells: Sequence[Cell]) -> str:
    """A table for people, and how often the error bars held."""
    lines = [
        "| encoder | in | lane | tokens x texts | foretold ms | measured ms | ratio | error | held |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    lines += [
        f"| {c.encoder} | {c.precision} | {c.lane} | {c.tokens} x {c.texts}{'' if c.known else ' (not run)'}"
        f" | {c.foretold_ms:.1f} | {c.measured_ms:.1f} | {c.ratio:.2f} | ±{100 * c.error:.0f}%"
        f" | {'yes' if c.held else '**no**'} |"
        for c in cells
    ]
    held = sum(cell.held for cell in cells)
    distances = [abs(cell.ratio - 1) for cell in cells]
    lines.append(
        f"\n{held} of {len(cells)} error bars ({BARS} standard deviations) hold; the median miss is "
        f"{100 * statistics.median(distances):.1f}%, the largest {100 * max(distances):.0f}%."
    )
    return "\n".join(lines)


def _tell(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  progress of a command


def main() -> None:
    """Runs the comparison."""
    made = argparse.ArgumentParser(prog="python -m sizing.benchmark", description=__doc__)
    made.add_argument("--encoder", action="append", choices=tuple(KNOWN), help="default: bert-base and bert-large")
    made.add_argument("--precision", action="append", choices=("fp32", "int8"), help="default: both")
    made.add_argument("--seconds", type=float, default=60.0, help="of the runs of each (default: 60)")
    made.add_argument("--out", type=Path, help="where every figure goes, as JSON")
    given = made.parse_args()
    cells = [
        cell
        for name in given.encoder or ("bert-base", "bert-large")
        for precision in given.precision or ("fp32", "int8")
        for cell in compare(name, precision, given.seconds)
    ]
    if given.out:
        machine = {"processor": processor(), "cores": available_cpus()}
        given.out.write_text(json.dumps({**machine, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")
    print(report(cells))  # noqa: T201  the command's own output


if __name__ == "__main__":
    main()
