"""What a person reads at the end of an export."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.bundle import Bundle
    from serving.manifest import Artifact

_COLUMNS = ("artifact", "precision", "size", "max diff", "cosine mean", "p1", "min", "batch invariant")
_MIB = 1 << 20


def table(bundle: Bundle) -> str:
    """The artifacts of a bundle with their figures beside PyTorch, a line each."""
    rows = [_COLUMNS, *(_row(artifact) for artifact in bundle.manifest.artifacts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    texts = max((artifact.parity.texts for artifact in bundle.manifest.artifacts if artifact.parity), default=0)
    return "\n".join([*lines, f"  over {texts} texts; max diff, cosine: each text alone, beside PyTorch alone"])


def _row(artifact: Artifact) -> tuple[str, ...]:
    parity, invariance = artifact.parity, artifact.invariance
    size = f"{artifact.size_bytes / _MIB:.1f} MiB"
    if parity is None or invariance is None:
        return (artifact.file, artifact.precision, size, "unproven", *[""] * 4)
    # Each precision is judged by one figure (see recipe.LIMITS): show that one.
    exact = artifact.precision == "fp32"
    worst = f"within {invariance.max_abs_difference:.1e}" if exact else f"cosine down to {invariance.cosine_min:.5f}"
    return (
        artifact.file,
        artifact.precision,
        size,
        f"{parity.max_abs_difference:.1e}",
        f"{parity.cosine_mean:.5f}",
        f"{parity.cosine_p01:.5f}",
        f"{parity.cosine_min:.5f}",
        f"{'yes' if artifact.batch_invariant else 'no'}, {worst}",
    )
