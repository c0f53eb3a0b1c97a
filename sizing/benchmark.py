"""Whether partial runs foretell whole encoders on this machine: predictions and measurements side by side.

`python -m sizing.benchmark --out docs/benchmarks/sizing.json` runs graphs of one, two and three layers and of all
layers in turns, in one run, and compares what the few foretell with what the whole takes.

With `--capacity` it compares the highest rates at which a server here holds an objective for a mix: the one that the
few layers foretell, and the one that `bertserve load --find-capacity` finds for all of them.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from export.errors import ExportError
from loadtest.errors import BenchError, check_above_zero
from serving.engine.base import LaneKind
from serving.host import available_cpus, processor
from serving.options import OptionParser
from simulate.errors import SimulateError
from sizing.costs import LENGTHS
from sizing.encoder import encoder_of
from sizing.errors import SizeError
from sizing.fit import Fit, Sample, Shape
from sizing.measure import BATCHES, LAYERS, run
from sizing.partial import specs

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

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


def _tell(line: str) -> None:
    print(line, file=sys.stderr)  # noqa: T201  progress of a command


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the comparison."""
    made = OptionParser(prog="python -m sizing.benchmark", description=__doc__)
    made.add_argument("--encoder", action="append", help="as `bertserve size` has it (default: bert-base, bert-large)")
    made.add_argument("--precision", action="append", choices=("fp32", "int8"), help="default: both")
    made.add_argument("--seconds", type=float, default=40.0, help="of the partial runs of each (default: 40)")
    made.add_argument("--out", type=Path, help="where every figure goes, as JSON; what the other form found stays")
    made.add_argument("--capacity", action="store_true", help="compare what a server carries")
    made.add_argument("--lengths", default="10-128", help="of its texts, in tokens (default: 10-128)")
    made.add_argument("--slo", default="p95=500ms", help="its objective (default: p95=500ms)")
    made.add_argument("--probe-s", type=float, default=20.0, help="of a run of its search (default: 20)")
    made.add_argument("--keep", type=Path, metavar="DIR", help="keep its exports there, and take those that are there")
    given = made.parse_args(argv)
    asked = list(product(given.encoder or ("bert-base", "bert-large"), given.precision or ("fp32", "int8")))
    # Lets SIGTERM leave blocks as an exception does: a server is ended on the way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        check_above_zero(given, "seconds", "probe_s")
        print(_capacities(given, asked) if given.capacity else _cells(given, asked))  # noqa: T201  the command's output
    except (SizeError, SimulateError, BenchError, ExportError) as error:
        raise SystemExit(f"python -m sizing.benchmark: {error}") from error


def _capacities(given: argparse.Namespace, asked: Sequence[tuple[str, str]]) -> str:
    # Brings PyTorch.
    from sizing.carried import HEAD, carried  # noqa: PLC0415

    with TemporaryDirectory(prefix="bertserve-size-") as own:
        folder = given.keep or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        words = (given.seconds, given.lengths, given.slo)
        found = []
        for name, precision in asked:
            found.append(carried(name, precision, *words, probe_s=given.probe_s, folder=folder, tell=_tell))
            _tell(found[-1].row())
    _keep(given.out, {"capacities": [asdict(one) for one in found]})
    return "\n".join([HEAD, *(one.row() for one in found)])


def _keep(out: Path | None, found: Mapping[str, object]) -> None:
    """Adds figures to those of a file, in the place of such ones there."""
    if out is not None:
        before = json.loads(out.read_bytes()) if out.exists() else {}
        out.write_text(json.dumps({**before, **found}) + "\n")


def _cells(given: argparse.Namespace, asked: Sequence[tuple[str, str]]) -> str:
    cells: list[Cell] = []
    runs = []
    for name, precision in asked:
        samples = measure(name, precision, given.seconds)
        cells += compare(name, precision, samples)
        lanes = {
            kind.value: [[s.layers, *s.shape, s.us, s.spread_us] for s in found] for kind, found in samples.items()
        }
        runs.append({"encoder": name, "precision": precision, "samples": lanes})
    where = {"processor": processor(), "cores": available_cpus()}
    _keep(given.out, {**where, "cells": [asdict(c) for c in cells], "runs": runs})
    return report(cells)


if __name__ == "__main__":
    main()
