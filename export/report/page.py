"""`report.html`: the result of an export and its proof, as one page without network access or scripts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bertserve.export.pages import html
from bertserve.export.pages.plots import Histogram, Scatter, in_page
from bertserve.export.pages.tables import Table, untitled
from bertserve.export.recipe import limits_of
from bertserve.export.report.terminal import accuracy, answer, end_to_end, executor, ranges, size
from bertserve.export.tasks.limits import Limits
from bertserve.export.texts.corpus import shown
from bertserve.serving.models.manifest import FileEntry
from bertserve.serving.tasks.base import size_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bertserve.export.proof.parity import Comparison, Reference
    from bertserve.export.report.latency import Latency
    from bertserve.serving.models.manifest import Artifact, Manifest, Parity
    from bertserve.serving.records import TensorSpec

    Figure = tuple[str, float | None, str]
    """A label, a value, and the name of its limit."""

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
    about = {
        "Task": answer(manifest),
        "Longest input": f"{manifest.max_length} tokens",
        "Source": f"{manifest.source.name} ({manifest.source.architecture})",
        "Checkpoint's SHA-256": html.Code(manifest.source.sha256),
        "Created": manifest.created.replace("T", " "),
        "Compared with": f"PyTorch {manifest.tools.get('torch', '')}, fp32, on {len(reference.texts)} texts, each"
        " alone, and padded in mixed batches",
        "End-to-end check": end_to_end(manifest),
    }
    return html.render(
        f"{manifest.model} version {manifest.version}",
        [
            about,
            _verdict(manifest.artifacts),
            html.Section("Artifacts", [_artifacts(manifest.artifacts)]),
            *_filled("Accuracy on labeled text", accuracy(manifest.artifacts)),
            *_filled("Latency", _latency(findings, machine)),
            *(_section(artifact, manifest, reference, findings.get(artifact.file)) for artifact in manifest.artifacts),
            html.Section("The bundle", list(_bundle(manifest))),
        ],
    )


def _verdict(artifacts: Sequence[Artifact]) -> html.Verdict:
    clean = sum(artifact.proven and not artifact.waived for artifact in artifacts)
    lines = [f"{clean} of {len(artifacts)} artifacts were run and meet every limit of the comparison with PyTorch."]
    lines += [f"{a.file} breaks limits that the export waived: {', '.join(a.waived)}." for a in artifacts if a.waived]
    lines += [f"{a.file} is not served by default: it {a.reserved}." for a in artifacts if a.reserved]
    lines += [
        f"{a.file} is unproven: it is for {executor(a)} and was not run here."
        f"{' The figures below are for the graph that it was built from, on a CPU.' if a.graph else ''}"
        " Run “bertserve verify” on a machine that can run it."
        for a in artifacts
        if not a.proven
    ]
    return html.Verdict([("", line) for line in lines], "caution" if clean < len(artifacts) else "")


def _artifacts(artifacts: Sequence[Artifact]) -> Table:
    columns = ("file", "precision", "runs on", "vs PyTorch", "batch-invariant", "size")
    rows = [(a.file, a.precision, executor(a), _status(a), _invariant(a), size(a.total_bytes)) for a in artifacts]
    return untitled(columns, rows, words=5)


def _filled(heading: str, table: Table) -> list[html.Section]:
    return [html.Section(heading, [table])] if table.rows else []


def _bundle(manifest: Manifest) -> Iterator[html.Part]:
    facts = {
        "Inputs": _tensors(manifest.inputs),
        "Outputs": _tensors(manifest.outputs),
        "Hidden size": manifest.hidden_size,
        **({"Vector size": size_of(manifest, "pooled")} if manifest.embedding else {}),
        "Vocabulary": f"{manifest.vocab_size} tokens",
        "Special tokens": ", ".join(f"{name} {number}" for name, number in manifest.special_ids.items()),
        "Tools": ", ".join(f"{name} {version}" for name, version in manifest.tools.items()),
    }
    yield facts
    if labels := [f"{index} {label}" for index, label in enumerate(manifest.labels.names if manifest.labels else ())]:
        yield html.Listing(labels, f"{len(labels)} labels")
    if prompts := [f"{name}: {words!r}" for name, words in manifest.prompts.items()]:
        yield html.Listing(prompts, f"{len(prompts)} prompts")
    files = [entry for entry in manifest.entries() if isinstance(entry, FileEntry)]
    yield {f"{entry.file}, {size(entry.size_bytes)}": html.Code(entry.sha256) for entry in files}


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


def _latency(findings: Mapping[str, Finding], machine: Machine) -> Table:
    grids = {file: {(cell.batch, cell.tokens): cell for cell in found.latencies} for file, found in findings.items()}
    lengths = sorted({tokens for grid in grids.values() for _, tokens in grid})
    rows = [
        (file, str(batch), *(_milliseconds(grid.get((batch, tokens))) for tokens in lengths))
        for file, grid in grids.items()
        for batch in sorted({batch for batch, _ in grid})
    ]
    note = (
        f"Median engine time on the machine of this export ({machine.processor}, {machine.threads}"
        f" {'thread' if machine.threads == 1 else 'threads'}), over a few runs: a rough estimate, not a benchmark. An"
        " artifact that is not batch-invariant is never batched. A GPU artifact is verified here, not timed."
    )
    return Table("", note, ("artifact", "batch", *(f"{tokens} tokens" for tokens in lengths)), rows, words=1)


def _milliseconds(cell: Latency | None) -> str:
    if cell is None:
        return "not measured"
    return f"{cell.p50_ms:.2f} ms" if cell.p50_ms < 100 else f"{cell.p50_ms:.0f} ms"  # noqa: PLR2004  three digits


def _section(artifact: Artifact, manifest: Manifest, reference: Reference, finding: Finding | None) -> html.Section:
    limits = limits_of(artifact, manifest.task)
    figures = [*_figures(artifact, limits), *_figures_of_others(artifact)]
    return html.Section(
        artifact.file,
        [
            _facts(artifact),
            *([untitled(("figure", "found", "limit", "verdict"), figures, words=1)] if figures else []),
            *(_comparison(artifact.file, finding.comparison, limits, reference) if finding else []),
        ],
    )


def _facts(artifact: Artifact) -> dict[str, object]:
    facts: dict[str, object] = {"For": f"{executor(artifact)}, {artifact.precision}, {size(artifact.total_bytes)}"}
    if artifact.waived:
        waived = ", ".join(artifact.waived)
        facts["Caution"] = f"Written although it breaks these limits, which the export waived: {waived}."
    if artifact.engine is not None:
        build = artifact.engine
        facts["TensorRT"] = f"{build.version} ({build.flavour}), compute capability {build.compute_capability}"
        shapes = [(profile.min, profile.opt, profile.max) for profile in build.profiles]
        profiles = (" to ".join(f"{batch} x {tokens}" for batch, tokens in each) for each in shapes)
        facts["Profiles (batch x tokens: min, opt, max)"] = "; ".join(profiles)
    if artifact.quantisation is not None:
        facts["Activations"] = ranges(artifact.quantisation)
    if artifact.operators:
        operators = (f"{count} {name}" for name, count in artifact.operators.items())
        facts["Fused and quantized operators"] = ", ".join(operators)
    return {**facts, "SHA-256": html.Code(artifact.sha256)}


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
    yield from _judge(artifact, limits, figures)


def _figures_of_others(artifact: Artifact) -> Iterator[tuple[str, str, str, str]]:
    """The figures of the other tasks that a graph answers."""
    for task, parity in artifact.also.items():
        figures = [(f"{task}: {what}", value, name) for what, value, name in _of_parity(parity)]
        yield from _judge(artifact, limits_of(artifact, task), figures)


def _of_parity(parity: Parity) -> list[Figure]:
    return [
        ("largest difference", parity.max_abs_difference, "max_abs_difference"),
        ("mean cosine", parity.cosine_mean, "cosine_mean"),
        ("cosine, 1st percentile", parity.cosine_p01, "cosine_p01"),
        ("minimum cosine", parity.cosine_min, "cosine_min"),
        ("matching decisions", parity.agreement, "agreement"),
    ]


def _judge(artifact: Artifact, limits: Limits, figures: Sequence[Figure]) -> Iterator[tuple[str, str, str, str]]:
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


def _comparison(file: str, found: Comparison, limits: Limits, reference: Reference) -> list[html.Part]:
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
    caption = "Distance of each text's answer from PyTorch's: farther left is closer."
    if missing := int(np.count_nonzero(~np.isfinite(found.differences))):
        caption += f" {missing} texts with answers that are not numbers are left out."
    values = Scatter(found.points, "PyTorch value", "artifact value")
    plots = (
        (f"{file}: histogram of {histogram.title}", histogram, caption),
        (
            f"{file}: scatter plot of {len(found.points)} values",
            values,
            f"{len(found.points)} raw values; points on the line equal PyTorch's.",
        ),
    )
    columns = ("text", "largest difference", *cosines, "tokens")
    return [
        html.Plots([(in_page(title, plot, half=True), words) for title, plot, words in plots]),
        html.Section("The texts farthest from PyTorch", [untitled(columns, rows, words=1)]),
    ]


def _tensors(given: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{t.name} {t.dtype} [{', '.join('?' if n < 0 else str(n) for n in t.shape)}]" for t in given)
