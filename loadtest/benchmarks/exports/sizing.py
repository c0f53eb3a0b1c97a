"""Whether partial runs foretell whole encoders on this machine: predictions and measurements side by side.

`python -m loadtest.benchmarks.exports sizing` runs graphs of one, two and three layers and of all layers in turns, and
compares what the few foretell with what the whole takes. With `--capacity` it compares the highest rates at which a
server here holds an objective for a mix: the one that the few layers foretell, and the one that is searched for with
all of them, with random weights.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from export.checkpoint.families import family_of
from export.errors import ExportError
from loadtest.benchmarks.exports import random_checkpoints
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import HOST, BertServer
from loadtest.benchmarks.show import filled, rendered
from loadtest.capacity.costs import LENGTHS
from loadtest.capacity.encoder import encoder_of
from loadtest.capacity.fit import Fit, Sample, Shape
from loadtest.capacity.measure import BATCHES, LAYERS, costs_here, run
from loadtest.capacity.plan import Replica
from loadtest.capacity.size_cli import load_of, parser
from loadtest.errors import BenchError
from loadtest.generator.search import bracket, narrowed
from loadtest.generator.workload import make_texts
from serving.engine.base import LaneKind
from serving.host import available_cpus, processor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from loadtest.benchmarks.store import Step, Store
    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.plan import SizingLoad

BARS = 2
"""Standard deviations of the error bars that are counted."""

OTHERS = (Shape(20, 1), Shape(100, 1), Shape(300, 1))
"""Lengths that no partial run has: the smooth cost of a layer foretells them."""

_PRECISIONS = ("fp32", "int8")
_NARROW = 1.01
_TEXTS = 200
_FROM = 0.75
"""Of the rate that was foretold: where the search begins."""
_LIMITS = ("cosine_mean", "cosine_p01", "cosine_min", "agreement", "max_abs_difference")
"""That INT8 may break: random weights have no meaning that it could lose."""


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
        return {"cells": compare(name, precision, samples), "samples": lanes}

    def _capacity(self, name: str, precision: str) -> dict[str, Any]:
        """The highest rates at which one server holds the objective, foretold and measured; 0 for none."""
        encoder, options = encoder_of(name), self.options
        words = [name, "--lengths", options.lengths, "--rate", "1", "--slo", options.slo]
        load = load_of(parser().parse_args(words), encoder)
        repository = self._exported(encoder, precision)
        replica = Replica(costs_here(encoder, precision, available_cpus(), options.seconds, self.say), load, 1)
        foretold = narrowed(*bracket(0.5 * replica.most_per_s, replica.holds), replica.holds, _NARROW)[0] or 0.0
        self.say(f"foretold: {foretold:.1f} texts a second; searching")
        with (
            TemporaryDirectory(prefix="bertserve-size-") as own,
            BertServer(repository, precision, available_cpus()) as server,
        ):
            texts, target = Path(own, "texts.txt"), f"http://{HOST}:{server.http_port}"
            texts.write_text("\n".join(_texts(repository, load)) + "\n", encoding="utf-8")
            asked = ("--target", target, "--texts", str(texts), "--slo", options.slo, "--find-capacity", "--out", own)
            rate = ("--rate", f"{max(1.0, _FROM * foretold):.2f}", "--duration", f"{options.probe_s:g}")
            told = subprocess.run(_command("load", *asked, *rate), capture_output=True, text=True, check=False)
            report = Path(own, "report.json")
            if not report.exists():
                raise BenchError(f"bertserve load: {told.stderr.strip()}")
            found = json.loads(report.read_bytes())
        circumstances = {
            "lengths": options.lengths,
            "slo": options.slo,
            "processor": processor(),
            "cores": available_cpus(),
        }
        measured = {"measured_per_s": found["capacity_per_s"] or 0.0, "confidence": found["confidence"]}
        figures = {"foretold_per_s": foretold, **measured, "runs": found["points"]}
        return {"encoder": encoder.name, "precision": precision, **circumstances, **figures}

    def _exported(self, encoder: Encoder, precision: str) -> Path:
        """A model repository with all of the encoder's layers, random weights in them; what is there is taken."""
        folder = self.options.keep or Path(self.stack.enter_context(TemporaryDirectory(prefix="bertserve-size-")))
        folder.mkdir(parents=True, exist_ok=True)
        repository = folder / f"{encoder.name}-{precision}"
        if list(repository.glob("[!.]*/[0-9]*/manifest.json")):
            return repository
        family = family_of(encoder.config)
        if family is None:
            raise BenchError(f"{encoder.name}: takes the name of an encoder or a config.json, no bundle")
        self.say(f"exporting all {encoder.layers} layers in {precision}")
        heads = encoder.config[family.sizes["heads"]]
        sizes = random_checkpoints.Sizes(encoder.layers, encoder.hidden, heads, encoder.vocabulary)
        with TemporaryDirectory(prefix="bertserve-size-", dir=folder) as checkpoint:
            random_checkpoints.write(Path(checkpoint), encoder.config["model_type"], "embed", sizes)
            words = ["--out", str(repository), "--name", encoder.name, "--precision", precision]
            words += [word for limit in _LIMITS for word in ("--allow", f"{precision}.{limit}")]
            made = subprocess.run(_command("export", checkpoint, *words), capture_output=True, text=True, check=False)
        if made.returncode:
            raise BenchError(f"bertserve export: {made.stderr.strip()}")
        return repository

    def show(self, store: Store) -> str:
        page = store.path.with_suffix(".md")
        cells = [cell for found in store.named("cells ").values() for cell in found["cells"]]
        for cell in cells:
            cell["ratio"] = cell["foretold_ms"] / cell["measured_ms"]
            cell["held"] = abs(cell["ratio"] - 1) <= BARS * cell["error"]
        misses = [abs(cell["ratio"] - 1) for cell in cells] or [0.0]
        figures = {"misses": misses, "bars": BARS, "capacities": store.named("capacity ").values(), "cells": cells}
        made = rendered(type(self), self.name, **figures)
        if page.exists():
            page.write_text(filled(page.read_text(encoding="utf-8"), made), encoding="utf-8")
        return made


def compare(name: str, precision: str, samples: Mapping[LaneKind, Sequence[Sample]]) -> list[dict[str, Any]]:
    """What the few layers foretell beside what all of them took, in milliseconds.

    `error` is relative, one standard deviation, as the fit expects it; `known`: whether partial runs had this shape.
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


def _texts(repository: Path, load: SizingLoad) -> list[str]:
    """Real English whose lengths have the load's distribution, in no order."""
    [bundle] = [path.parent for path in repository.glob("[!.]*/[0-9]*/manifest.json")]
    found, reached, total = [], 0.0, sum(load.lengths.mix.values())
    for tokens, weight in sorted(load.lengths.mix.items()):
        begun, reached = reached, reached + weight / total
        if count := round(_TEXTS * reached) - round(_TEXTS * begun):
            found += [text.text for text in make_texts(bundle, tokens, count)]
    random.Random(1).shuffle(found)
    return found


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "bertserve", *words]
