"""What a person reads at the end of an export."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.manifest import Artifact, Manifest

_COLUMNS = ("artifact", "precision", "size", "max diff", "cosine mean", "p1", "min", "agree", "batch invariant")
_ACCURACY_COLUMNS = ("artifact", "metric", "over", "PyTorch", "artifact's", "difference")
_MIB = 1 << 20
_EXECUTORS = {"cpu": "ONNX Runtime on a CPU", "openvino": "OpenVINO on a CPU", "cuda": "ONNX Runtime on a GPU"}


def answer(manifest: Manifest) -> str:
    """What a model answers, in a few words."""
    details = {
        "embed": f"{manifest.pooling} pooling, {manifest.hidden_size} components",
        "classify": f"{len(manifest.labels)} labels{', each for itself' if manifest.multi_label else ''}",
        "tag": f"{len(manifest.labels)} tags",
        "fill_mask": f"{manifest.candidates} words for each mask",
    }
    return ", ".join(word for word in (manifest.task, details.get(manifest.task)) if word)


def executor(artifact: Artifact) -> str:
    """What runs an artifact, in words."""
    if artifact.engine is not None:
        return f"TensorRT, compute capability {artifact.engine.compute_capability}"
    return _EXECUTORS.get(artifact.target, artifact.target)


def size(size_bytes: int) -> str:
    """A file's size, in the unit that people expect."""
    return f"{size_bytes / _MIB:.1f} MiB" if size_bytes >= _MIB // 10 else f"{size_bytes / 1024:.1f} KiB"


def table(artifacts: Sequence[Artifact]) -> str:
    """Artifacts with their figures beside PyTorch, a line each."""
    texts = max((artifact.parity.texts for artifact in artifacts if artifact.parity), default=0)
    parts = [
        _aligned([_COLUMNS, *(_row(artifact) for artifact in artifacts)]),
        f"  over {texts} texts; max diff, cosine, agree: each text alone, beside PyTorch alone",
    ]
    if figures := [row for artifact in artifacts for row in _accuracy_rows(artifact)]:
        parts += ["", _aligned([_ACCURACY_COLUMNS, *figures])]
    parts += [f"  {a.file}: allowed to break {', '.join(a.waived)}" for a in artifacts if a.waived]
    return "\n".join(parts)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(artifact: Artifact) -> tuple[str, ...]:
    parity, invariance = artifact.parity, artifact.invariance
    if parity is None or invariance is None:
        return (artifact.file, artifact.precision, size(artifact.size_bytes), "unproven", *[""] * 5)
    # Each precision is judged by one figure (see recipe.LIMITS): show that one.
    if artifact.precision == "fp32" or invariance.cosine_min is None:
        worst = f"within {invariance.max_abs_difference:.1e}"
    else:
        worst = f"cosine down to {invariance.cosine_min:.5f}"
    return (
        artifact.file,
        artifact.precision,
        size(artifact.size_bytes),
        f"{parity.max_abs_difference:.1e}",
        *(_figure(value) for value in (parity.cosine_mean, parity.cosine_p01, parity.cosine_min, parity.agreement)),
        f"{'yes' if artifact.batch_invariant else 'no'}, {worst}",
    )


def _accuracy_rows(artifact: Artifact) -> list[tuple[str, ...]]:
    return [
        (
            artifact.file,
            figure.metric,
            f"{figure.examples} of {figure.reference}",
            f"{figure.pytorch:.2f}",
            f"{figure.artifact:.2f}",
            f"{figure.artifact - figure.pytorch:+.2f}",
        )
        for figure in artifact.accuracy
    ]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
