"""`report.html`: the result of an export and its proof, as one page without network access or scripts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from export.pages import html
from export.pages.plots import Histogram, Scatter, in_page
from export.pages.tables import Table, untitled
from export.recipe import limits_of
from export.report.terminal import accuracy, answer, end_to_end, executor, ranges, size
from export.tasks.limits import Limits
from export.texts.corpus import shown
from serving.models.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from export.proof.parity import Comparison, Reference
    from export.report.latency import Latency
    from serving.models.manifest import Artifact, Manifest, Parity
    from serving.records import TensorSpec

    Figure = tuple[str, float | None, str]
    """A label, a value, and the name of its limit."""

_TEMPLATE = Path(__file__).with_name("report.html")
_WORST = 5
_NO_LIMIT = Limits()
_GREATEST = ("max_abs_difference", "metric_loss", "invariance_difference")
"""Limits that figures must not exceed. For the other limits, figures must reach them."""


@dataclass(slots=True, frozen=True)
class Finding:
    """Results for one artifact that the manifest does not keep.

    Attributes:
        comparison: Its answers compared with PyTorch's, text by text.
        latencies: Empty if its speed on this machine is not meaningful.
    """

    comparison: Comparison
    latencies: Sequence[Latency]


@dataclass(slots=True, frozen=True)
class Machine:
    """The machine that the latencies were measured on."""

    processor: str
    threads: int


def render(manifest: Manifest, reference: Reference, findings: Mapping[str, Finding], machine: Machine) -> str:
    """Renders the page.

    Args:
        manifest: The bundle's manifest, without the entry of the report.
        reference: The texts, and PyTorch's answers.
        findings: By the artifact's file; unproven artifacts have none.
        machine: Where the latencies were measured.
    """
    artifacts = manifest.artifacts
    return html.render(
        _TEMPLATE,
        title=f"{manifest.model} version {manifest.version}",
        manifest=manifest,
        machine=machine,
        reference=reference,
        answer=answer(manifest),
        end_to_end=end_to_end(manifest),
        executor=executor,
        size=size,
        ranges=ranges,
        artifacts=untitled(
            ("file", "precision", "runs on", "vs PyTorch", "batch-invariant", "size"),
            [(a.file, a.precision, executor(a), _status(a), _invariant(a), size(a.total_bytes)) for a in artifacts],
            words=5,
        ),
        accuracy=accuracy(artifacts),
        latency=_latency(findings),
        sections=[_section(artifact, manifest, reference, findings.get(artifact.file)) for artifact in artifacts],
        inputs=_tensors(manifest.inputs),
        outputs=_tensors(manifest.outputs),
        files={f"{f.file}, {size(f.size_bytes)}": f.sha256 for f in manifest.entries() if isinstance(f, FileEntry)},
    )


def _status(artifact: Artifact) -> str:
    if not artifact.proven:
        return "only its graph, on a CPU" if artifact.graph else "unproven"
    if artifact.waived:
        return "limits waived"
    return "proven, on a CPU" if artifact.target == "cuda" else "proven"


def _invariant(artifact: Artifact) -> str:
    if not artifact.proven:
        return "unproven"
    return "yes" if artifact.batch_invariant else "no: runs one text at a time, unpadded"


def _latency(findings: Mapping[str, Finding]) -> Table:
    grids = {file: {(cell.batch, cell.tokens): cell for cell in found.latencies} for file, found in findings.items()}
    lengths = sorted({tokens for grid in grids.values() for _, tokens in grid})
    rows = [
        (file, str(batch), *(_milliseconds(grid.get((batch, tokens))) for tokens in lengths))
        for file, grid in grids.items()
        for batch in sorted({batch for batch, _ in grid})
    ]
    return untitled(("artifact", "batch", *(f"{tokens} tokens" for tokens in lengths)), rows, words=1)


def _milliseconds(cell: Latency | None) -> str:
    if cell is None:
        return "not measured"
    return f"{cell.p50_ms:.2f} ms" if cell.p50_ms < 100 else f"{cell.p50_ms:.0f} ms"  # noqa: PLR2004  three digits


def _section(
    artifact: Artifact, manifest: Manifest, reference: Reference, finding: Finding | None
) -> dict[str, object]:
    limits = limits_of(artifact, manifest.task)
    return {
        "artifact": artifact,
        "figures": untitled(
            ("figure", "found", "limit", "verdict"),
            [*_figures(artifact, limits), *_figures_of_others(artifact)],
            words=1,
        ),
        "comparison": None if finding is None else _comparison(artifact.file, finding.comparison, limits, reference),
    }


def _figures(artifact: Artifact, limits: Limits) -> Iterator[tuple[str, str, str, str]]:
    parity, invariance, found = artifact.evidence.parity, artifact.evidence.invariance, artifact.end_to_end
    if parity is None or invariance is None:
        return
    texts = "" if found is None else f"end to end, {found.texts} texts"
    figures: list[Figure] = [
        *_of_parity(parity),
        *((f"points of {f.metric} lost", f.pytorch - f.artifact, "metric_loss") for f in artifact.evidence.accuracy),
        (f"{texts}: largest difference", found.max_difference if found else None, "max_abs_difference"),
        (f"{texts}: mean cosine", found.cosine_mean if found else None, "cosine_mean"),
        (f"{texts}: matching decisions", found.agreement if found else None, "agreement"),
        ("padded or batched: largest difference", invariance.max_abs_difference, "invariance_difference"),
        ("padded or batched: minimum cosine", invariance.cosine_min, "invariance_cosine"),
    ]
    yield from _judged(artifact, limits, figures)


def _figures_of_others(artifact: Artifact) -> Iterator[tuple[str, str, str, str]]:
    """The figures of the other tasks that a graph answers."""
    for task, parity in artifact.also.items():
        figures = [(f"{task}: {what}", value, name) for what, value, name in _of_parity(parity)]
        yield from _judged(artifact, limits_of(artifact, task), figures)


def _of_parity(parity: Parity) -> list[Figure]:
    return [
        ("largest difference", parity.max_abs_difference, "max_abs_difference"),
        ("mean cosine", parity.cosine_mean, "cosine_mean"),
        ("cosine, 1st percentile", parity.cosine_p01, "cosine_p01"),
        ("minimum cosine", parity.cosine_min, "cosine_min"),
        ("matching decisions", parity.agreement, "agreement"),
    ]


def _judged(artifact: Artifact, limits: Limits, figures: Sequence[Figure]) -> Iterator[tuple[str, str, str, str]]:
    for what, value, name in figures:
        if value is None:
            continue
        limit, is_greatest = getattr(limits, name), name in _GREATEST
        words = "" if limit == getattr(_NO_LIMIT, name) else f"at {'most' if is_greatest else 'least'} {limit:g}"
        broken = "broken, waived" if name in artifact.waived else "broken"
        if name.startswith("invariance"):
            broken = "not batch-invariant"
        verdict = "kept" if (value <= limit if is_greatest else value >= limit) else broken
        yield what, f"{value:.2e}" if is_greatest else f"{value:.6f}", words, verdict if words else ""


def _comparison(file: str, found: Comparison, limits: Limits, reference: Reference) -> dict[str, object]:
    """The plots and the worst texts of an artifact."""
    if found.cosines is None or math.isfinite(limits.max_abs_difference):
        most = limits.max_abs_difference if math.isfinite(limits.max_abs_difference) else None
        histogram = Histogram(found.differences, "largest difference", most)
    else:
        named = [(limits.cosine_min, "minimum cosine allowed"), (limits.cosine_mean, "mean cosine allowed")]
        bound, name = next(((1 - limit, name) for limit, name in named if limit != _NO_LIMIT.cosine_min), (None, ""))
        histogram = Histogram(1 - found.cosines, "1 - cosine", bound, name)
    cosines = () if found.cosines is None else ("1 - cosine",)
    rows = [
        (
            shown(reference.texts[index]),
            f"{found.differences[index]:.2e}",
            *(() if found.cosines is None else (f"{1 - found.cosines[index]:.2e}",)),
            str(len(reference.encoded[index].ids)),
        )
        for index in found.worst_first()[:_WORST].tolist()
    ]
    return {
        "distances": in_page(f"{file}: histogram of {histogram.title}", histogram, half=True),
        "missing": int(np.count_nonzero(~np.isfinite(found.differences))),
        "scatter": in_page(
            f"{file}: scatter plot of {len(found.points)} values",
            Scatter(found.points, "PyTorch value", "artifact value"),
            half=True,
        ),
        "points": len(found.points),
        "worst": untitled(("text", "largest difference", *cosines, "tokens"), rows, words=1),
    }


def _tensors(given: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{t.name} {t.dtype} [{', '.join('?' if n < 0 else str(n) for n in t.shape)}]" for t in given)
