"""Whether partial runs foretell whole encoders on this machine: predictions and measurements side by side.

`python -m loadtest.benchmarks.exports sizing` runs graphs of one, two and three layers and of all layers in turns, and
compares what the few foretell with what the whole takes. With `--capacity` it compares the highest rates at which a
server here holds an objective for a mix: the one that the few layers foretell, and the one that `bertserve load
--find-capacity` finds for all of them.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from export.errors import ExportError
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.show import filled, table
from loadtest.capacity.costs import LENGTHS
from loadtest.capacity.encoder import encoder_of
from loadtest.capacity.fit import Fit, Sample, Shape
from loadtest.capacity.measure import BATCHES, LAYERS, run
from loadtest.errors import BenchError
from loadtest.report.tables import as_markdown
from serving.engine.base import LaneKind
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadtest.benchmarks.store import Step, Store

BARS = 2
"""Standard deviations of the error bars that are counted."""

OTHERS = (Shape(20, 1), Shape(100, 1), Shape(300, 1))
"""Lengths that no partial run has: the smooth cost of a layer foretells them."""

_PRECISIONS = ("fp32", "int8")


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


class SizingBenchmark(Benchmark):
    """The tables of docs/benchmarks/sizing.md, whose text is written by hand."""

    name = "sizing"
    purpose = "what partial runs of three layers foretell of a whole encoder, and of a server of it"
    seconds = 40.0
    models = ""
    errors = (BenchError, ExportError)
    own = (
        Option("--encoder", ("bert-base", "bert-large"), "as `bertserve size` has it"),
        Option("--precisions", _PRECISIONS, "which of them"),
        Option("--capacity", False, "compare what a server carries"),
        Option("--lengths", "10-128", "of its texts, in tokens (%(default)s)"),
        Option("--slo", "p95=500ms", "its objective (%(default)s)"),
        Option("--probe-s", 20.0, "of a run of its search (%(default)s)"),
        Option("--keep", None, "keep its exports there, and take those that are there", Path),
    )

    def facts(self) -> dict[str, Any]:
        return {}

    def steps(self) -> Iterator[Step]:
        kind, measure = ("capacity", self._capacity) if self.options.capacity else ("cells", self._cells)
        for encoder, precision in product(self.options.encoder, self.options.precisions):
            yield f"{kind} {encoder} {precision}", partial(measure, encoder, precision)

    def _cells(self, name: str, precision: str) -> dict[str, Any]:
        """Every shape of one encoder's first layers and of all of them, in turns."""
        # Brings PyTorch.
        from loadtest.capacity.partial import specs  # noqa: PLC0415

        encoder = encoder_of(name)
        layers = (*LAYERS, encoder.layers)
        shapes = (*(Shape(tokens, 1) for tokens in LENGTHS), *OTHERS, *BATCHES)
        with TemporaryDirectory(prefix="bertserve-size-") as folder:
            models = specs(encoder, precision, Path(folder), layers, self.say)
            samples = run(models, layers, available_cpus(), self.options.seconds, self.say, shapes)
        lanes = {
            kind.value: [[s.layers, *s.shape, s.us, s.spread_us] for s in found] for kind, found in samples.items()
        }
        return {"cells": [asdict(cell) for cell in compare(name, precision, samples)], "samples": lanes}

    def _capacity(self, name: str, precision: str) -> dict[str, Any]:
        # Brings PyTorch.
        from loadtest.benchmarks.exports.carried import carried  # noqa: PLC0415

        options = self.options
        folder = options.keep or Path(self.stack.enter_context(TemporaryDirectory(prefix="bertserve-size-")))
        folder.mkdir(parents=True, exist_ok=True)
        words = (options.seconds, options.lengths, options.slo)
        return asdict(carried(name, precision, *words, probe_s=options.probe_s, folder=folder, tell=self.say))

    def show(self, store: Store) -> str:
        page, made = store.path.with_suffix(".md"), tables(store)
        if page.exists():
            page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
        return "\n\n".join(made.values())


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


def tables(store: Store) -> dict[str, str]:
    """What a server carries, and every cell with how often the error bars held."""
    # Brings PyTorch.
    from loadtest.benchmarks.exports.carried import HEAD, Carried  # noqa: PLC0415

    carried = [Carried(**found).row() for found in store.named("capacity ").values()]
    cells = [Cell(**cell) for found in store.named("cells ").values() for cell in found["cells"]]
    every = table(
        "",
        "",
        cells,
        ("encoder", lambda c: c.encoder),
        ("in", lambda c: c.precision),
        ("lane", lambda c: c.lane),
        ("tokens x texts", lambda c: f"{c.tokens} x {c.texts}{'' if c.known else ' (not run)'}"),
        ("foretold ms", lambda c: f"{c.foretold_ms:.1f}"),
        ("measured ms", lambda c: f"{c.measured_ms:.1f}"),
        ("ratio", lambda c: f"{c.ratio:.2f}"),
        ("error", lambda c: f"±{100 * c.error:.0f}%"),
        ("held", lambda c: "yes" if c.held else "**no**"),
        words=3,
    )
    misses = [abs(cell.ratio - 1) for cell in cells] or [0.0]
    summary = (
        f"{sum(cell.held for cell in cells)} of {len(cells)} error bars ({BARS} standard deviations) hold; the median"
        f" miss is {100 * statistics.median(misses):.1f}%, the largest {100 * max(misses):.0f}%."
    )
    return {"capacity": "\n".join([HEAD, *carried]), "cells": f"{as_markdown(every)}\n\n{summary}"}
