"""Describes a bundle on a terminal: after an export, and for `verify` and `inspect`."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING

from bertserve.export.pages.tables import Table, printable, untitled
from bertserve.export.recipe import limits_of
from bertserve.export.tasks.limits import Limits
from bertserve.serving.engine.kinds import AUTO, engine_for
from bertserve.serving.host import command
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Artifact, EndToEnd, Manifest, Parity, Quantisation

_COLUMNS = ("artifact", "precision", "size", "max diff", "cosine mean", "p1", "min", "agree", "batch invariant")
_MIB = 1 << 20
_NO_LIMITS = Limits()


def answer(manifest: Manifest) -> str:
    """The model's task and its output, in a few words."""
    said = ", ".join(word for word in (manifest.task, TASKS[manifest.task].summary(manifest)) if word)
    return f"{said}; also {' and '.join(manifest.also)}" if manifest.also else said


def end_to_end(manifest: Manifest) -> str:
    """The reference library of the end-to-end check, and how close the artifacts are to it."""
    reference = manifest.reference_library
    if reference is None:
        return "not compared"
    if reference.unproven:
        return f"not compared: {reference.unproven}"
    found = [(artifact, beside) for artifact in manifest.artifacts if (beside := artifact.end_to_end) is not None]
    sides, embedding = manifest.multi_vector, manifest.embedding
    unit = embedding.normalize if embedding else sides is not None and sides.normalized
    scaled = f"vectors {'' if unit else 'not '}scaled to length 1"
    vectors = any(beside.cosine_mean is not None for _, beside in found)
    figures = "; ".join(_beside(artifact, beside, manifest.task) for artifact, beside in found)
    return (
        f"compared with {reference.library}, on the tokens of {reference.texts} texts; largest difference in a returned"
        f" value ({scaled if vectors else 'relative for values above 1'}): {figures or 'none compared'}"
        + ("; no limit on the minimum cosine: these texts are edge cases on purpose" if vectors else "")
    )


def _beside(artifact: Artifact, found: EndToEnd, task: str) -> str:
    limits = limits_of(artifact, task)
    allowed = f"at most {limits.max_abs_difference:g}" if math.isfinite(limits.max_abs_difference) else "no limit"
    figures = [f"{artifact.file} {found.max_difference:.1e} over {found.texts} texts ({allowed})"]
    if found.cosine_mean is not None:
        least = f"at least {limits.cosine_mean:g}" if limits.cosine_mean > _NO_LIMITS.cosine_mean else "no limit"
        figures.append(f"mean cosine {found.cosine_mean:.5f} ({least})")
    return ", ".join(figures)


def serve_command(models: Path, artifacts: Sequence[Artifact]) -> str:
    """The command to type next. It names an engine if `--engine auto` tries none that runs an artifact."""
    targets = {artifact.target for artifact in artifacts}
    tried = any(kind.runs(target) for kind in AUTO for target in targets)
    engine = "" if tried else f" --engine {engine_for(min(targets)).name}"
    return command(f"serve --models {shlex.quote(str(models))}{engine}")


def executor(artifact: Artifact) -> str:
    """What runs an artifact, in words."""
    if artifact.engine is not None:
        return f"TensorRT, compute capability {artifact.engine.compute_capability}"
    return f"{engine_for(artifact.target).title}"


def ranges(quantisation: Quantisation) -> str:
    """How activations are quantized, in words."""
    left = "; the vocabulary in fp32" if quantisation.fp32_words else ""
    if not quantisation.calibration and quantisation.activations == "static":
        return f"INT8, static ranges{left}"
    if not quantisation.calibration:
        return f"INT8, dynamic ranges per row{left}"
    source = f"{quantisation.texts} texts ({quantisation.calibration})"
    if quantisation.activations == "dynamic":
        return f"INT8, channels equalized on {source}, dynamic ranges{left}"
    return f"INT8, channels equalized and static ranges from {source}{left}"


def size(size_bytes: int) -> str:
    """A file's size in MiB or KiB."""
    return f"{size_bytes / _MIB:.1f} MiB" if size_bytes >= _MIB // 10 else f"{size_bytes / 1024:.1f} KiB"


def whole(bundle: Bundle) -> list[str | Table]:
    """The complete description of a bundle."""
    manifest = bundle.manifest
    source = manifest.source
    facts = {
        "model": f"{manifest.model}, version {manifest.version}",
        "task": answer(manifest),
        "source": f"{source.name} ({source.architecture}), SHA-256 {source.sha256}",
        "made": f"{manifest.created}, with " + ", ".join(f"{name} {word}" for name, word in manifest.tools.items()),
        "sizes": f"up to {manifest.max_length} tokens of {manifest.vocab_size}, hidden size {manifest.hidden_size}",
        "at text": end_to_end(manifest),
        "vectors": "; ".join(_vectors(manifest)),
        "labels": ", ".join(manifest.labels.names if manifest.labels else ()),
        "prompts": ", ".join(
            f"{name} {words!r}{' (default)' if name == manifest.default_prompt else ''}"
            for name, words in manifest.prompts.items()
        ),
    }
    parts: list[str | Table] = [f"{name:<8} {printable(words)}" for name, words in facts.items() if words]
    parts += ["", *tables(manifest.artifacts), ""]
    for artifact in manifest.artifacts:
        parts += [f"{artifact.file} for {printable(executor(artifact))}", *_details(artifact, manifest.task)]
    files = [(f.file, f.sha256, size(f.size_bytes)) for f in manifest.entries()]
    return [*parts, "", untitled(("file", "SHA-256", "size"), files, words=2)]


def _vectors(manifest: Manifest) -> Iterator[str]:
    part = manifest.embedding or manifest.sparse
    if part and part.similarity:
        yield f"compared by {part.similarity}"
    if manifest.embedding and manifest.embedding.matryoshka:
        yield f"can be truncated to {', '.join(map(str, manifest.embedding.matryoshka))} dimensions"


def _details(artifact: Artifact, task: str) -> Iterator[str]:
    if artifact.engine is not None:
        build = artifact.engine
        lengths = ", ".join(f"{p.max[0]} x {p.max[1]}" for p in build.profiles)
        yield f"  TensorRT {printable(build.version)} ({build.flavour}); largest batch x tokens: {lengths}"
    if (parity := artifact.evidence.parity) is not None:
        yield f"  farthest from PyTorch: {printable(parity.worst)}"
    limits = asdict(limits_of(artifact, task))
    stated = [f"{name} {value:g}" for name, value in limits.items() if value != getattr(_NO_LIMITS, name)]
    yield f"  limits: {', '.join(stated)}"
    if artifact.quantisation is not None:
        yield f"  activations: {printable(ranges(artifact.quantisation))}"
    if artifact.operators:
        yield f"  operators: {', '.join(f'{count} {printable(name)}' for name, count in artifact.operators.items())}"


def tables(artifacts: Sequence[Artifact]) -> Iterator[str | Table]:
    """The artifacts with their figures compared with PyTorch, one line each."""
    texts = max((parity.texts for artifact in artifacts if (parity := artifact.evidence.parity)), default=0)
    rows = [row for artifact in artifacts for row in (_row(artifact), *_rows_of_others(artifact))]
    yield untitled(_COLUMNS, rows, words=2)
    yield f"  over {texts} texts; max diff, cosine, agree: each text alone, compared with PyTorch"
    if (labelled := accuracy(artifacts)).rows:
        yield ""
        yield labelled
    yield from (f"  {a.file}: waived limits: {', '.join(a.waived)}" for a in artifacts if a.waived)
    yield from (f"  {a.file}: served by --precision {a.precision} only: {a.reserved}" for a in artifacts if a.reserved)


def accuracy(artifacts: Sequence[Artifact]) -> Table:
    """Scores of the artifacts and of PyTorch on labeled text, by the task's own metric."""
    rows = [
        (
            artifact.file,
            figure.metric,
            f"{figure.examples} of {figure.reference}",
            f"{figure.pytorch:.2f}",
            f"{figure.artifact:.2f}",
            f"{figure.artifact - figure.pytorch:+.2f}",
        )
        for artifact in artifacts
        for figure in artifact.evidence.accuracy
    ]
    return untitled(("artifact", "metric", "over", "PyTorch", "artifact's", "difference"), rows, words=3)


def _row(artifact: Artifact) -> tuple[str, ...]:
    parity, invariance = artifact.evidence.parity, artifact.evidence.invariance
    if parity is None or invariance is None:
        return (artifact.file, artifact.precision, size(artifact.total_bytes), "unproven", *[""] * 5)
    # Each precision is judged by one figure (see `export.tasks.limits`): show that one.
    if artifact.precision == "fp32" or invariance.cosine_min is None:
        worst = f"within {invariance.max_abs_difference:.1e}"
    else:
        worst = f"cosine down to {invariance.cosine_min:.5f}"
    unproven = "" if artifact.proven else "; UNPROVEN: measured on its graph, on a CPU"
    return (
        artifact.file,
        artifact.precision,
        size(artifact.total_bytes),
        *_figures(parity),
        f"{'yes' if artifact.evidence.batch_invariant else 'no'}, {worst}{unproven}",
    )


def _rows_of_others(artifact: Artifact) -> list[tuple[str, ...]]:
    """The figures of the other tasks that a graph answers."""
    return [(f"  {task}", "", "", *_figures(parity), "") for task, parity in artifact.also.items()]


def _figures(parity: Parity) -> tuple[str, ...]:
    return (
        f"{parity.max_abs_difference:.1e}",
        *(_figure(value) for value in (parity.cosine_mean, parity.cosine_p01, parity.cosine_min, parity.agreement)),
    )


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
