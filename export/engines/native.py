"""Engines for the local GPU, which go into the node's cache and not into the bundle."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from bertserve.export.engines import tensorrt
from bertserve.export.errors import ExportError, NoRoomError
from bertserve.export.proof.verify import State, verify
from bertserve.serving.engine.gpu import discovery
from bertserve.serving.errors import BundleError
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.models.manifest import Quantisation
from bertserve.serving.models.node_cache import CacheError, CacheWriter, Proof, open_entry

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.export.progress import Progress
    from bertserve.export.proof.verify import Outcome
    from bertserve.serving.engine.specs import EngineBuild
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Precision

TIMINGS = "tensorrt.timings"
"""TensorRT's measurements of its kernels on this GPU, for the next build."""

_GIB = 1 << 30
_GPU_BYTES, _GPU_FACTOR = tensorrt.WORKSPACE_BYTES, 3
"""GPU memory for a build: scratch memory, and weights more than once. Estimated, not measured."""


def build(
    bundle: Bundle, cache: Path, target: str | None, precision: Precision | None, threads: int, progress: Progress
) -> Outcome:
    """Builds an engine of a bundle, compares it with PyTorch's answers, and puts both into the node's cache.

    An engine for a GPU elsewhere is stored without a proof.

    Args:
        bundle: An opened bundle.
        cache: The node's cache, which does not change if this fails.
        target: One of `tensorrt.TARGETS`; None for the local GPU and the installed TensorRT.
        precision: Of the engine; None for fp16 if the bundle has that graph, otherwise for the one that it has.
        threads: Cores to use for the comparison.
        progress: Told of every stage.

    Raises:
        ExportError: No engine can be built, or its answers differ from PyTorch's.
        CacheError: It cannot be stored there.
    """
    chosen_precision, graph = _graph(bundle, precision)
    with progress.stage("looking for a GPU"):
        chosen = target or _own_target(tensorrt.graph_bytes(graph))
    manifest = bundle.manifest
    with CacheWriter(cache, manifest.model, manifest.version) as node:
        timings = node.path / TIMINGS if chosen == tensorrt.NATIVE else None
        if timings is not None:
            recall_timings(cache, bundle.path, node.path)
        with progress.stage(f"building the TensorRT engine for {chosen}"):
            made = node.path / "made"
            done = tensorrt.build(
                graph, made, chosen, max_length=manifest.max_length, count=progress.count, timing_cache=timings
            )
        file = made.rename(node.path / name_of(done.engine, chosen_precision))
        artifact = tensorrt.artifact(done.engine, file, chosen_precision)
        if chosen_precision == "int8":
            artifact = msgspec.structs.replace(artifact, quantisation=_quantisation(bundle))
        own = replace(bundle, made_here=((artifact, node.path),))
        (outcome,) = verify(own, (), threads, progress, [artifact])
        if outcome.state is State.BROKEN:
            raise ExportError(f"bundle {bundle.path}: {artifact.file} {outcome.sentence}")
        proofs = {artifact.file: Proof.of(outcome.artifact)} if outcome.state is State.PROVEN else {}
        node.publish(bundle, engines=[artifact], proofs=proofs, files=[TIMINGS] if timings else [])
    return outcome


def _graph(bundle: Bundle, precision: Precision | None) -> tuple[Precision, Path]:
    """The graph to build an engine from.

    Raises:
        ExportError: The bundle does not have it.
    """
    graphs = bundle.engine_graphs
    if not graphs:
        raise ExportError(
            f"bundle {bundle.path}: has no graph to build an engine from; export it with --tensorrt graph"
        )
    chosen = precision or next(iter(graphs))
    if chosen not in graphs:
        raise ExportError(
            f"bundle {bundle.path}: has graphs to build an engine in {' and '.join(graphs)}, but not in {chosen};"
            f" export it with --tensorrt graph --tensorrt-precision {chosen}"
        )
    return chosen, graphs[chosen]


def _quantisation(bundle: Bundle) -> Quantisation:
    """How the ranges of a bundle's engine graph were found: all INT8 forms of an export share the calibration."""
    known = (artifact.quantisation for artifact in bundle.manifest.artifacts)
    return next((one for one in known if one is not None and one.activations == "static"), Quantisation("static"))


def name_of(engine: EngineBuild, precision: Precision) -> str:
    """The engine's file name in the node's cache; a bundle's own engine of another flavor may be for the same GPU."""
    return f"native.{form_of(engine, precision)}"


def form_of(engine: EngineBuild, precision: Precision) -> str:
    """The name of an engine's file without target."""
    return f"{tensorrt.target_of(engine.compute_capability)}.{precision}.engine"


def recall_timings(cache: Path, before: Path, folder: Path) -> None:
    """Copies the measurements of an earlier build of this bundle or of another version, if there is one."""
    try:
        entry = open_entry(cache, open_bundle(before))
    except (BundleError, CacheError):  # nothing depends on it but time
        entry = None
    if entry is not None and any(entry_file.file == TIMINGS for entry_file in entry.derived.files):
        shutil.copyfile(entry.path / TIMINGS, folder / TIMINGS)


def _own_target(graph_bytes: int) -> str:
    """The target for the local GPU: with the enterprise library that GPU, otherwise its kind with TensorRT for RTX.

    Raises:
        ExportError: There is no GPU or no TensorRT for it.
        NoRoomError: The GPU lacks free memory.
    """
    machine = discovery.look()
    if machine.problem:
        raise ExportError(f"no GPU to build an engine for: {machine.problem}")
    gpu = machine.gpus[0]
    if not machine.libraries["enterprise"].problem:
        if (free_bytes := machine.free_bytes[0]) < (needed := _GPU_BYTES + _GPU_FACTOR * graph_bytes):
            raise NoRoomError(
                f"building on {gpu.name} needs about {needed / _GIB:.1f} GiB of GPU memory, but"
                f" {free_bytes / _GIB:.1f} GiB are free"
            )
        return tensorrt.NATIVE
    if problem := machine.libraries["rtx"].problem:
        raise ExportError(f"TensorRT cannot build an engine here: {problem}")
    if gpu.target not in tensorrt.TARGETS:
        raise ExportError(f"TensorRT for RTX cannot build an engine for {gpu.name} (target {gpu.target})")
    return gpu.target
