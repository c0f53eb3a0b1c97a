"""Checks on this machine whether partial runs predict whole encoders: predictions beside measurements.

`python -m loadtest.benchmarks.exports sizing` runs graphs of one, two, three and all layers in turns, and compares
the prediction from the few layers with the time of the whole encoder.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from export.errors import ExportError
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.show import filled, rendered
from loadtest.capacity.costs import LENGTHS
from loadtest.capacity.encoder import encoder_of
from loadtest.capacity.fit import Fit, Sample, Shape
from loadtest.capacity.measure import BATCHES, LAYERS, run
from loadtest.errors import BenchError
from serving.engine.base import LaneKind
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadtest.benchmarks.store import Step, Store

_BARS = 2
"""Width of the counted error bars, in standard deviations."""

OTHERS = (Shape(20, 1), Shape(100, 1), Shape(300, 1))
"""Lengths without a partial run: the smooth cost of a layer predicts them."""

_SHOWN = (8, 32, 128, 512)
"""Lengths of a lone text in the page's table."""

_PRECISIONS = ("fp32", "int8")


class SizingBenchmark(Benchmark):
    """The table of docs/benchmarks/sizing.md; its text is written by hand."""

    name = "sizing"
    purpose = "Compare a whole encoder with the prediction from runs of up to three layers."
    seconds = 40.0
    models = ""
    errors = (BenchError, ExportError)
    own = (
        Option("--encoder", ("bert-base", "bert-large"), "Encoders, as for `bertserve size`."),
        Option("--precisions", _PRECISIONS, "Precisions to measure."),
    )

    def facts(self) -> dict[str, Any]:
        return {}

    def steps(self) -> Iterator[Step]:
        for encoder, precision in product(self.options.encoder, self.options.precisions):
            yield f"cells {encoder} {precision}", partial(self._cells, encoder, precision)

    def _cells(self, name: str, precision: str) -> dict[str, Any]:
        """Every shape of one encoder's first layers and of all of them, in turns."""
        # Imports PyTorch.
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
        return {"cells": compare(name, precision, samples), "samples": lanes}

    def page(self, store: Store) -> str:
        cells = [cell for found in store.named("cells ").values() for cell in found["cells"]]
        for cell in cells:
            cell["ratio"] = cell["foretold_ms"] / cell["measured_ms"]
            cell["held"] = abs(cell["ratio"] - 1) <= _BARS * cell["error"]
        misses = [abs(cell["ratio"] - 1) for cell in cells]
        lanes: dict[tuple[str, str, str], dict[int, Any]] = {}
        for cell in cells:
            if cell["texts"] == 1:
                lanes.setdefault((cell["encoder"], cell["precision"], cell["lane"]), {})[cell["tokens"]] = cell
        context = {"cells": cells, "misses": misses, "bars": _BARS, "lanes": lanes, "lengths": _SHOWN}
        made = rendered(type(self), self.name, **context)
        page = store.path.with_suffix(".md")
        return filled(page.read_text(encoding="utf-8"), made) if page.exists() else made


def compare(name: str, precision: str, samples: Mapping[LaneKind, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Predicted and measured times in milliseconds.

    `error` is one relative standard deviation, as the fit expects it. `known`: whether partial runs had this shape.
    """
    encoder = encoder_of(name)
    cells = []
    for kind, found in samples.items():
        fit = Fit([one for one in found if one.layers != encoder.layers and one.shape not in OTHERS])
        for whole in (one for one in found if one.layers == encoder.layers):
            us, error = fit.at(encoder.layers, whole.shape)
            cell = {"encoder": name, "precision": precision, "lane": LaneKind(kind).value, **whole.shape._asdict()}
            cell |= {"foretold_ms": us / 1e3, "error": error, "measured_ms": whole.us / 1e3}
            cells.append(cell | {"known": whole.shape not in OTHERS})
    return cells
