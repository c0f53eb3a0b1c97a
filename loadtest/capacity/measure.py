"""Measures batch costs on this machine: the whole encoder of a bundle, else its first layers.

The graphs take turns, batch by batch. Temporary slowness of the machine then affects all graphs alike, and each graph
finds the caches full of the others' weights, as the next layer of a whole encoder does. ONNX Runtime computes, on the
same lanes as in a server.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from loadtest.capacity.candidates import Candidate
from loadtest.capacity.costs import LENGTHS
from loadtest.capacity.fit import Fit, Sample, Shape
from loadtest.capacity.tables import BatchCosts
from loadtest.errors import BenchError
from serving import cgroups, host
from serving.engine.base import Batch, LaneKind
from serving.engine.batches import sample_text
from serving.engine.cpu.ort import OrtCpuBackend
from serving.engine.process.warm_up import side_by_side
from serving.records import ModelIndex
from serving.scheduling.cost import CostPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadtest.capacity.encoder import Encoder
    from serving.engine.specs import ModelSpec

LAYERS = (1, 2, 3)
"""Layer counts of the partial graphs."""

BATCHES = (Shape(8, 4), Shape(8, 16), Shape(32, 4), Shape(32, 16), Shape(128, 4))
_MIN_PASSES, _MAX_PASSES = 5, 40
_PAUSE_S = 0.004
"""Pause before each run. The threads of the previous graph spin for a while and would take cores from this one."""
_SHORT_US, _MAX_TURNS = 3000.0, 4
"""Shapes faster than this run several times per pass, up to the maximum."""
_ROOM = 3.0
"""Memory of an export and its sessions, relative to the weights in fp32."""


def here(threads: int, price: float | None) -> Candidate:
    """This machine as a candidate."""
    memory = cgroups.memory_limit() or _memory()
    return Candidate(
        title=f"this machine ({host.processor()}, {threads} threads)",
        kind="cpu",
        memory_gb=memory / 1e9,
        bandwidth_gb_s=0.0,
        tera_per_s={},
        price_per_hour=price,
        source="this machine",
        cores=threads,
    )


def costs_here(
    encoder: Encoder, precision: str, threads: int, seconds: float, tell: Callable[[str], None]
) -> BatchCosts:
    """The costs of an encoder on this machine.

    Args:
        encoder: A configuration, or a bundle with an artifact of that precision.
        precision: fp32 or int8.
        threads: Cores to use.
        seconds: Approximate duration of the runs.
        tell: Called with the progress and the remaining time.

    Raises:
        BenchError: The encoder cannot be run.
    """
    if encoder.bundle is not None:
        return _whole(encoder, precision, threads, seconds, tell)
    layers = tuple(count for count in LAYERS if count <= encoder.layers)
    needed = _ROOM * sum(layers) / encoder.layers * encoder.weight_bytes("fp32")
    if needed > (memory := cgroups.memory_limit() or _memory()):
        raise BenchError(
            f"partial runs need about {needed / 1e9:,.0f} GB of memory, but this machine has {memory / 1e9:,.0f}"
        )
    from loadtest.capacity.partial import specs  # noqa: PLC0415  imports PyTorch

    with TemporaryDirectory(prefix="bertserve-size-") as folder:
        models = specs(encoder, precision, Path(folder), layers, tell)
        samples = run(models, layers, threads, seconds, lambda line: tell(f"partial runs in {precision}: {line}"))
    return extrapolated(encoder, precision, samples, threads)


def extrapolated(
    encoder: Encoder, precision: str, samples: Mapping[LaneKind, Sequence[Sample]], threads: int
) -> BatchCosts:
    """The costs of all layers, extrapolated from samples of a few."""
    fits = {kind: Fit(found) for kind, found in samples.items()}
    points, errors = [], []
    for kind, fit in fits.items():
        for shape in fit.shapes:
            us, error = fit.at(encoder.layers, shape)
            points.append(CostPoint(kind.value, shape.tokens, shape.texts, us, fit.spread * us))
            errors.append(error)
    error = max(errors)
    measured = sorted({sample.layers for found in samples.values() for sample in found})
    fact = (
        f"extrapolated from runs of {', '.join(map(str, measured))} of {encoder.layers} layers with random weights, "
        f"ONNX Runtime in {precision} on {threads} threads: expected error {100 * error:.0f}%"
    )
    narrow = threads if LaneKind.NARROW in fits else 0
    return BatchCosts("extrapolated", tuple(points), error=error, facts=(fact,), narrow_lanes=narrow, threads=threads)


def _whole(encoder: Encoder, precision: str, threads: int, seconds: float, tell: Callable[[str], None]) -> BatchCosts:
    from serving.models.artifact_selection import select_artifact  # noqa: PLC0415  imports the engines' libraries

    bundle = encoder.bundle
    artifact = None if bundle is None else bundle.artifact(precision)
    if bundle is None or artifact is None:
        raise BenchError(f"the bundle {encoder.name} has no {precision} artifact for CPUs")
    spec = select_artifact(bundle, precision, "ort-cpu", unproven=True).spec()
    samples = run([spec], [encoder.layers], threads, seconds, lambda line: tell(f"runs in {precision}: {line}"))
    points = tuple(
        CostPoint(kind.value, sample.shape.tokens, sample.shape.texts, sample.us, sample.spread_us)
        for kind, found in samples.items()
        for sample in found
    )
    fact = f"measured on this machine: {artifact.file}, ONNX Runtime on {threads} threads"
    narrow = threads if LaneKind.NARROW in samples else 0
    return BatchCosts("measured", points, facts=(fact,), narrow_lanes=narrow, threads=threads)


def run(
    models: Sequence[ModelSpec],
    layers: Sequence[int],
    threads: int,
    seconds: float,
    tell: Callable[[str], None],
    shapes: Sequence[Shape] = (),
) -> dict[LaneKind, list[Sample]]:
    """Measures graphs; returns samples by kind of lane.

    Args:
        models: Graphs of one encoder.
        layers: Number of layers of each graph.
        threads: Cores to use.
        seconds: Approximate duration.
        tell: Called with the progress.
        shapes: Shapes to run; empty for the default ones.
    """
    backend = OrtCpuBackend(models, threads)
    kinds = backend.lanes()
    runners = [backend.runner(lane) for lane in range(len(kinds))]
    lanes = {kind: [r for r, k in zip(runners, kinds, strict=True) if k is kind] for kind in dict.fromkeys(kinds)}
    longest = models[0].max_length
    together = models[0].batch_invariant
    usual = [Shape(tokens, 1) for tokens in sorted({min(tokens, longest) for tokens in LENGTHS})]
    usual += [shape for shape in BATCHES if shape.tokens <= longest and together]
    times: dict[tuple[LaneKind, Shape, int], list[float]] = {}
    turns: dict[tuple[LaneKind, Shape], int] = {}
    started, passes, done = time.perf_counter(), _MIN_PASSES, 0
    while done < passes:
        for kind, group in lanes.items():
            for shape in shapes or usual:
                for _ in range(turns.get((kind, shape), 1)):
                    for index, model in enumerate(models):
                        batch = Batch(ModelIndex(index), [sample_text(model, shape.tokens)] * shape.texts)
                        time.sleep(_PAUSE_S)
                        found = side_by_side(model.name, group, batch, 1)
                        if done:  # the first pass is a warm-up
                            times.setdefault((kind, shape, index), []).extend(found)
                        else:
                            turns[kind, shape] = max(1, min(_MAX_TURNS, int(_SHORT_US / max(found))))
        done += 1
        each = (time.perf_counter() - started) / done
        passes = max(_MIN_PASSES, min(_MAX_PASSES, int(seconds / each)))
        tell(f"pass {done} of {passes}, {max(0.0, (passes - done) * each):.0f} s left")
    result: dict[LaneKind, list[Sample]] = {}
    for (kind, shape, index), values in times.items():
        quarters = statistics.quantiles(values, n=4)
        sample = Sample(layers[index], shape, statistics.median(values), quarters[2] - quarters[0])
        result.setdefault(kind, []).append(sample)
    return result


def _memory() -> int:
    """Memory of this machine, in bytes."""
    line = next(line for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if "MemTotal" in line)
    return 1024 * int(line.split()[1])
