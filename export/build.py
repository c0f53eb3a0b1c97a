"""From a recipe to a bundle: opens, traces, fuses, quantises, compares, writes."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import onnx
import onnxruntime
import safetensors
import tokenizers
import torch
import transformers

from export import corpus, graph, optimize, parity, quantize
from export.errors import ExportError
from export.recipe import LIMITS
from serving.bundle import BundleWriter, digest, file_entry
from serving.engine.base import ModelSpec
from serving.engine.cpu import available_cpus
from serving.manifest import (
    SCHEMA_VERSION,
    TOKENIZER,
    Artifact,
    Manifest,
    Source,
    graph_inputs,
    graph_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from export.checkpoint import Checkpoint
    from export.progress import Progress
    from export.recipe import Precision
    from serving.bundle import Bundle
    from serving.records import EncodedText, TensorSpec

_WORK = "work"
_INPUTS = graph_inputs("embed", segments=True)


@dataclass(slots=True, frozen=True)
class _Reference:
    texts: Sequence[EncodedText]
    vectors: NDArray[np.float32]


def build(precisions: Sequence[Precision], checkpoint: Checkpoint, writer: BundleWriter, progress: Progress) -> Bundle:
    """Exports a checkpoint. Nothing is written unless every artifact keeps its limits.

    Args:
        precisions: Which artifacts to make.
        checkpoint: What to make it from.
        writer: Where to write it.
        progress: Told of every stage.

    Raises:
        ExportError: A gate or a limit stopped the export.
        BundleError: The bundle cannot be written or opened.
    """
    with writer:
        work = writer.path / _WORK
        work.mkdir()
        reference = _graph_and_reference(checkpoint, work / "raw.onnx", progress)
        artifacts = _artifacts(precisions, checkpoint, reference, writer.path, progress)
        with progress.stage("writing the bundle"):
            shutil.rmtree(work)
            (writer.path / TOKENIZER).write_bytes(checkpoint.vocabulary.content)
            return writer.publish(_manifest(writer, checkpoint, artifacts))


def _graph_and_reference(checkpoint: Checkpoint, raw: Path, progress: Progress) -> _Reference:
    with progress.stage("loading the weights"):
        embedder = graph.load(checkpoint)
    with progress.stage("exporting the graph"):
        graph.write(embedder, raw)
    texts = checkpoint.vocabulary.encode(corpus.read(), checkpoint.max_length)
    with progress.stage(f"PyTorch's answers to {len(texts)} texts"):
        vectors = graph.answers(embedder, texts, threads=available_cpus(), count=progress.count)
    return _Reference(texts, vectors)


def _artifacts(
    precisions: Sequence[Precision], checkpoint: Checkpoint, reference: _Reference, folder: Path, progress: Progress
) -> tuple[Artifact, ...]:
    work = folder / _WORK
    layers = checkpoint.layers
    with progress.stage("fusing operators"):
        fused = work / "fused.onnx"
        optimize.fuse(
            work / "raw.onnx", fused, layers=layers, heads=checkpoint.heads, hidden_size=checkpoint.hidden_size
        )
    made = []
    for precision in precisions:
        path = folder / f"model.{precision}.onnx"
        if precision == "int8":
            with progress.stage("quantising to INT8"):
                quantize.quantize(fused, path, layers=layers)
        else:
            shutil.copyfile(fused, path)
        made.append(_verified(path, precision, checkpoint, reference, progress))
    return tuple(made)


def _verified(
    path: Path, precision: Precision, checkpoint: Checkpoint, reference: _Reference, progress: Progress
) -> Artifact:
    sha256 = digest(path)
    spec = ModelSpec(
        name=path.name,
        path=str(path),
        sha256=sha256,
        batch_invariant=True,
        vocab_size=checkpoint.config["vocab_size"],
        max_length=checkpoint.max_length,
        special_ids=checkpoint.vocabulary.special_ids,
        inputs=tuple(tensor.name for tensor in _INPUTS),
        outputs=_outputs(checkpoint),
    )
    with progress.stage(f"comparing {path.name} with PyTorch"):
        verdict = parity.verify(
            spec,
            reference.texts,
            reference.vectors,
            LIMITS[precision],
            threads=available_cpus(),
            count=progress.count,
        )
        if verdict.failure is not None:
            raise ExportError(f"{path.name} does not answer as PyTorch does: {verdict.failure}")
    return Artifact(
        file=path.name,
        kind="onnx",
        precision=precision,
        target="cpu",
        sha256=sha256,
        size_bytes=path.stat().st_size,
        batch_invariant=verdict.batch_invariant,
        parity=verdict.parity,
        invariance=verdict.invariance,
        operators=optimize.operators(path),
    )


def _manifest(writer: BundleWriter, checkpoint: Checkpoint, artifacts: tuple[Artifact, ...]) -> Manifest:
    source = checkpoint.source
    return Manifest(
        schema_version=SCHEMA_VERSION,
        model=writer.path.parent.name,
        version=writer.version,
        task="embed",
        pooling=checkpoint.sentence.pooling,
        hidden_size=checkpoint.hidden_size,
        vocab_size=checkpoint.config["vocab_size"],
        max_length=checkpoint.max_length,
        special_ids=checkpoint.vocabulary.special_ids,
        inputs=_INPUTS,
        outputs=_outputs(checkpoint),
        artifacts=artifacts,
        files=(file_entry(writer.path / TOKENIZER),),
        source=Source(source.name, checkpoint.architecture, checkpoint.weights.sha256()),
        tools=_tools(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        prompts=checkpoint.sentence.prompts,
    )


def _outputs(checkpoint: Checkpoint) -> tuple[TensorSpec, ...]:
    return graph_outputs("embed", hidden_size=checkpoint.hidden_size, labels=0, candidates=0)


def _tools() -> dict[str, str]:
    modules = (torch, transformers, onnx, onnxruntime, tokenizers, safetensors)
    return {"bertserve": _own_version(), **{module.__name__: str(module.__version__) for module in modules}}


def _own_version() -> str:
    try:
        return importlib.metadata.version("bertserve")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
