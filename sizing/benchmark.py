"""Whether partial runs foretell whole encoders on this machine: predictions and measurements side by side.

`python -m sizing.benchmark --out docs/benchmarks/sizing.json` runs graphs of one, two and three layers and of all
layers in turns, in one run, and compares what the few foretell with what the whole takes.

`python -m sizing.benchmark --carries CONFIG --lengths FILE --slo p99=250ms` foretells the highest rate that one server
here carries, for a comparison with `bertserve load --find-capacity`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from loadtest.generator.search import bracket
from serving.engine.base import LaneKind
from serving.host import available_cpus, processor
from sizing.cli import load_of, parser
from sizing.costs import LENGTHS
from sizing.encoder import KNOWN, encoder_of
from sizing.fit import Fit, Sample, Shape
from sizing.measure import BATCHES, LAYERS, costs_here, run
from sizing.partial import specs
from sizing.plan import Replica

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BARS = 2
"""Standard deviations of the error bars that are counted."""

_NARROW = 1.01

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


def measure(name: str, precision: str, seconds: float) -> dict[LaneKind, list[Sample]]:
    """Every shape of one encoder's first layers and of all of them, in turns."""
    encoder = encoder_of(name)
    layers = (*LAYERS, encoder.layers)
    shapes = (*(Shape(tokens, 1) for tokens in LENGTHS), *OTHERS, *BATCHES)
    with TemporaryDirectory(prefix="bertserve-size-") as folder:
        models = specs(encoder, precision, Path(folder), layers, _tell)
        return run(models, layers, available_cpus(), seconds, _tell, shapes)


def compare(name: str, precision: str, samples: Mapping[LaneKind, Sequence[Sample]]) -> list[Cell]:
    """What the few layers foretell beside what all of them took."""
    encoder = encoder_of(name)
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


def carries(model: str, precision: str, seconds: float, lengths: str, slo: str) -> float | None:
    """The highest rate at which one server here holds an objective, by partial runs; None where none does."""
    encoder = encoder_of(model)
    given = parser().parse_args([model, "--lengths", lengths, "--rate", "1", "--slo", slo])
    load = load_of(given, encoder)
    replica = Replica(costs_here(encoder, precision, available_cpus(), seconds, _tell), load, 1)
    low, high = bracket(0.5 * replica.most_per_s, replica.holds)
    while low and high and high / low > _NARROW:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if replica.holds(middle) else (low, middle)
    return low


def _tell(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  progress of a command


def main() -> None:
    """Runs the comparison."""
    made = argparse.ArgumentParser(prog="python -m sizing.benchmark", description=__doc__)
    made.add_argument("--encoder", action="append", choices=tuple(KNOWN), help="default: bert-base and bert-large")
    made.add_argument("--precision", action="append", choices=("fp32", "int8"), help="default: both")
    made.add_argument("--seconds", type=float, default=40.0, help="of the runs of each (default: 40)")
    made.add_argument("--out", type=Path, help="where every figure goes, as JSON")
    made.add_argument("--carries", metavar="MODEL", help="foretell the highest rate that a server here carries")
    made.add_argument("--lengths", default="10-250", help="of its texts, as `bertserve size` takes them")
    made.add_argument("--slo", default="p99=250ms", help="its objective")
    given = made.parse_args()
    if given.carries:
        for precision in given.precision or ("fp32", "int8"):
            rate = carries(given.carries, precision, given.seconds, given.lengths, given.slo)
            print(f"{precision}: {rate or 0:.1f} texts a second")  # noqa: T201  the command's own output
        return
    cells: list[Cell] = []
    runs = []
    for name in given.encoder or ("bert-base", "bert-large"):
        for precision in given.precision or ("fp32", "int8"):
            samples = measure(name, precision, given.seconds)
            cells += compare(name, precision, samples)
            lanes = {
                kind.value: [[s.layers, *s.shape, s.us, s.spread_us] for s in found] for kind, found in samples.items()
            }
            runs.append({"encoder": name, "precision": precision, "samples": lanes})
    if given.out:
        content = {
            "processor": processor(),
            "cores": available_cpus(),
            "cells": [asdict(c) for c in cells],
            "runs": runs,
        }
        given.out.write_text(json.dumps(content) + "\n")
    print(report(cells))  # noqa: T201  the command's own output


if __name__ == "__main__":
    main()
