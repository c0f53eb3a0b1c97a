"""`report.html`: what an export made and how far it was proven, as one page that needs no network and no script."""

from __future__ import annotations

import importlib.resources
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from export.charts.distributions import distances, scatter
from export.recipe import limits_of
from export.report.markup import Markup, element, join
from export.report.terminal import answer, end_to_end, executor, ranges, size
from export.tasks.limits import Limits
from export.texts.corpus import shown
from serving.models.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from export.proof.parity import Comparison, Reference
    from export.report.latency import Latency
    from serving.models.manifest import Artifact, Manifest

_WORST = 5
_NO_LIMIT = Limits()
_OF_ITS_GRAPH = "The figures below are those of the graph that it was built of, computed on a CPU. "
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(slots=True, frozen=True)
class Finding:
    """What was seen of one artifact beside what the manifest keeps.

    Attributes:
        comparison: Its answers beside PyTorch's, text by text.
        latencies: How long it took; empty where its speed here says nothing.
    """

    comparison: Comparison
    latencies: Sequence[Latency]


@dataclass(slots=True, frozen=True)
class Machine:
    """What the latencies were measured on."""

    processor: str
    threads: int


def render(manifest: Manifest, reference: Reference, findings: Mapping[str, Finding], machine: Machine) -> str:
    """The page.

    Args:
        manifest: The bundle's, its entry of the report left out.
        reference: The texts, and PyTorch's answers.
        findings: By the file of the artifact; unproven ones have none.
        machine: Where it was measured.
    """
    parts = [
        _head(manifest, reference),
        _verdict(manifest),
        element("h2", "Artifacts"),
        _artifacts(manifest),
        _accuracy(manifest),
        _latency(findings, machine),
        *(_section(artifact, manifest, reference, findings.get(artifact.file)) for artifact in manifest.artifacts),
        _contents(manifest),
    ]
    style = (importlib.resources.files("export.report") / "page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{manifest.model} version {manifest.version}"),
        element("style", Markup(style)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', *parts), lang='en')}\n"


def _head(manifest: Manifest, reference: Reference) -> Markup:
    source = manifest.source
    facts = {
        "Task": answer(manifest),
        "Longest input": f"{manifest.max_length} tokens",
        "Made from": join(source.name, f" ({source.architecture})"),
        "Checkpoint's SHA-256": element("code", source.sha256),
        "Made on": manifest.created.replace("T", " "),
        "Compared with": f"PyTorch {manifest.tools.get('torch', '')}, fp32, on {len(reference.texts)} texts, "
        "each alone, and padded in mixed batches",
        "End-to-end check": end_to_end(manifest),
    }
    return join(element("h1", f"{manifest.model} version {manifest.version}"), _facts(facts))


def _verdict(manifest: Manifest) -> Markup:
    artifacts = manifest.artifacts
    proven = [artifact for artifact in artifacts if artifact.proven]
    kept = [artifact for artifact in proven if not artifact.waived]
    sentences = [f"{len(kept)} of {len(artifacts)} artifacts were run and keep every limit beside PyTorch."]
    sentences += [
        f"{a.file} breaks limits that the recipe let pass: {', '.join(a.waived)}." for a in artifacts if a.waived
    ]
    sentences += [f"{a.file} is not served by default: it {a.reserved}." for a in artifacts if a.reserved]
    sentences += [
        f"{a.file} is unproven: it is for {executor(a)} and was not run here. "
        f"{_OF_ITS_GRAPH if a.graph else ''}“bertserve verify” proves it where it can run."
        for a in artifacts
        if not a.proven
    ]
    complete = len(kept) == len(artifacts)
    kind = "verdict" if complete else "verdict warn"
    return element("div", *(element("p", sentence) for sentence in sentences), class_=kind)


def _artifacts(manifest: Manifest) -> Markup:
    rows = [
        [
            element("code", artifact.file),
            artifact.precision,
            executor(artifact),
            _Number(size(artifact.total_bytes)),
            _status(artifact),
            _invariant(artifact),
        ]
        for artifact in manifest.artifacts
    ]
    return _table(["file", "precision", "runs on", _Number("size"), "beside PyTorch", "batch-invariant"], rows)


def _status(artifact: Artifact) -> Markup:
    if not artifact.proven:
        return element("span", "its graph alone, on a CPU" if artifact.graph else "unproven", class_="warn-word")
    if artifact.waived:
        return element("span", "limits waived", class_="warn-word")
    return element("span", "proven, on a CPU" if artifact.target == "cuda" else "proven", class_="good")


def _invariant(artifact: Artifact) -> str:
    if not artifact.proven:
        return "unproven"
    return "yes" if artifact.batch_invariant else "no: run text by text, unpadded"


def _accuracy(manifest: Manifest) -> Markup | None:
    rows = [
        [
            element("code", artifact.file),
            figure.metric,
            f"{figure.examples} of {figure.reference}",
            _Number(f"{figure.pytorch:.2f}"),
            _Number(f"{figure.artifact:.2f}"),
            _Number(f"{figure.artifact - figure.pytorch:+.2f}"),
        ]
        for artifact in manifest.artifacts
        for figure in artifact.evidence.accuracy
    ]
    if not rows:
        return None
    titles = ["artifact", "metric", "over", _Number("PyTorch"), _Number("artifact"), _Number("difference")]
    return join(element("h2", "Accuracy on labelled text"), _table(titles, rows))


def _latency(findings: Mapping[str, Finding], machine: Machine) -> Markup | None:
    cells = {file: {(c.batch, c.tokens): c for c in found.latencies} for file, found in findings.items()}
    lengths = sorted({tokens for grid in cells.values() for _, tokens in grid})
    if not lengths:
        return None
    rows: list[list[str]] = []
    for file, grid in cells.items():
        for batch in sorted({batch for batch, _ in grid}):
            found = [grid.get((batch, tokens)) for tokens in lengths]
            figures = [_Number("not measured" if cell is None else _milliseconds(cell.p50_ms)) for cell in found]
            rows.append([element("code", file), _Number(str(batch)), *figures])
    note = (
        f"Median of the engine's time alone on the machine of this export ({machine.processor}, {machine.threads} "
        f"{'thread' if machine.threads == 1 else 'threads'}), in a few runs: an order of magnitude, no benchmark. An "
        "artifact that is not batch-invariant is never batched; one for a GPU is only proven here, not timed."
    )
    titles = ["artifact", _Number("batch"), *(_Number(f"{tokens} tokens") for tokens in lengths)]
    return join(element("h2", "Latency"), _table(titles, rows), element("p", note, class_="faint"))


def _section(artifact: Artifact, manifest: Manifest, reference: Reference, finding: Finding | None) -> Markup:
    limits = limits_of(artifact, manifest.task)
    return join(
        element("h2", artifact.file),
        element("p", f"{artifact.precision} for {executor(artifact)}, {size(artifact.total_bytes)}", class_="faint"),
        _waived(artifact),
        _engine(artifact),
        None if artifact.quantisation is None else element("p", "Activations: ", ranges(artifact.quantisation), "."),
        _figures(artifact, limits),
        None if finding is None else _charts(finding.comparison, limits),
        None if finding is None else _worst(finding.comparison, reference),
        _operators(artifact),
        element("p", "SHA-256 ", element("code", artifact.sha256), class_="faint"),
    )


def _waived(artifact: Artifact) -> Markup | None:
    if not artifact.waived:
        return None
    sentence = f"Shipped although it breaks these limits, as the recipe asked: {', '.join(artifact.waived)}."
    return element("p", sentence, class_="notice")


def _engine(artifact: Artifact) -> Markup | None:
    build = artifact.engine
    if build is None:
        return None
    profiles = "; ".join(
        " to ".join(f"{batch} x {tokens}" for batch, tokens in (profile.min, profile.opt, profile.max))
        for profile in build.profiles
    )
    return _facts(
        {
            "TensorRT": f"{build.version} ({build.flavour})",
            "Compute capability": build.compute_capability,
            "Profiles (batch x tokens: least, usual, most)": profiles,
        }
    )


def _figures(artifact: Artifact, limits: Limits) -> Markup | None:
    parity, invariance = artifact.evidence.parity, artifact.evidence.invariance
    if parity is None or invariance is None:
        return None
    waived = artifact.waived
    rows = [
        _most("largest difference", parity.max_abs_difference, limits.max_abs_difference, "max_abs_difference", waived),
        _least("mean cosine", parity.cosine_mean, limits.cosine_mean, "cosine_mean", waived),
        _least("cosine, 1st percentile", parity.cosine_p01, limits.cosine_p01, "cosine_p01", waived),
        _least("least cosine", parity.cosine_min, limits.cosine_min, "cosine_min", waived),
        _least("same decisions", parity.agreement, limits.agreement, "agreement", waived),
        *(
            _most(f"points of {f.metric} lost", f.pytorch - f.artifact, limits.metric_loss, "metric_loss", waived)
            for f in artifact.evidence.accuracy
        ),
        *_end_to_end(artifact, limits),
        _most("padded or batched: largest difference", invariance.max_abs_difference, limits.invariance_difference),
        _least("padded or batched: least cosine", invariance.cosine_min, limits.invariance_cosine),
    ]
    return _table(["figure", _Number("found"), _Number("limit"), ""], [row for row in rows if row])


def _end_to_end(artifact: Artifact, limits: Limits) -> list[list[str]]:
    found, waived = artifact.end_to_end, artifact.waived
    if found is None:
        return []
    limit, title = limits.max_abs_difference, f"end to end, {found.texts} texts"
    return [
        _most(f"{title}: largest difference", found.max_difference, limit, "max_abs_difference", waived),
        _least(f"{title}: mean cosine", found.cosine_mean, limits.cosine_mean, "cosine_mean", waived),
        _least(f"{title}: same decisions", found.agreement, limits.agreement, "agreement", waived),
    ]


def _most(name: str, found: float, limit: float, key: str = "", waived: Sequence[str] = ()) -> list[str]:
    limited = math.isfinite(limit)
    return [
        name,
        _Number(f"{found:.2e}"),
        _Number(f"at most {limit:g}" if limited else ""),
        _kept(found <= limit, key, waived) if limited else "",
    ]


def _least(name: str, found: float | None, limit: float, key: str = "", waived: Sequence[str] = ()) -> list[str]:
    if found is None:
        return []
    limited = limit not in (_NO_LIMIT.cosine_min, _NO_LIMIT.agreement)
    return [
        name,
        _Number(f"{found:.6f}"),
        _Number(f"at least {limit:g}" if limited else ""),
        _kept(found >= limit, key, waived) if limited else "",
    ]


def _kept(kept: bool, key: str, waived: Sequence[str]) -> Markup:  # noqa: FBT001  the answer to one question
    if kept:
        return element("span", "kept", class_="good")
    if not key:
        return element("span", "not batch-invariant", class_="faint")
    return element("span", "broken, waived" if key in waived else "broken", class_="warn-word")


def _charts(comparison: Comparison, limits: Limits) -> Markup:
    if comparison.cosines is None or math.isfinite(limits.max_abs_difference):
        most = limits.max_abs_difference
        histogram = distances(comparison.differences, "largest difference", most if math.isfinite(most) else None)
    else:
        named = [(limits.cosine_min, "least cosine allowed"), (limits.cosine_mean, "mean cosine allowed")]
        bound, name = next(((1 - limit, name) for limit, name in named if limit != _NO_LIMIT.cosine_min), (None, ""))
        histogram = distances(1 - comparison.cosines, "1 - cosine", bound, name)
    missing = int(np.count_nonzero(~np.isfinite(comparison.differences)))
    caption = "How far each text's answer lies from PyTorch's: the farther left, the closer."
    if missing:
        caption += f" {missing} texts have answers that are not numbers; they are left out."
    return element(
        "div",
        element("figure", Markup(histogram), element("figcaption", caption)),
        element(
            "figure",
            Markup(scatter(comparison.points, "PyTorch's number", "artifact's number")),
            element("figcaption", f"{len(comparison.points)} of the raw numbers; on the line they are PyTorch's own."),
        ),
        class_="charts",
    )


def _worst(comparison: Comparison, reference: Reference) -> Markup:
    rows = [
        [
            _Number(f"{comparison.differences[index]:.2e}"),
            *([] if comparison.cosines is None else [_Number(f"{1 - comparison.cosines[index]:.2e}")]),
            _Number(str(len(reference.encoded[index].ids))),
            _Quote(shown(reference.texts[index])),
        ]
        for index in comparison.worst_first()[:_WORST].tolist()
    ]
    measured = ["largest difference", *([] if comparison.cosines is None else ["1 - cosine"]), "tokens"]
    titles = [*map(_Number, measured), _Quote("text")]
    return join(element("h3", "The texts farthest from PyTorch"), _table(titles, rows))


def _operators(artifact: Artifact) -> Markup | None:
    if not artifact.operators:
        return None
    counts = ", ".join(f"{count} {name}" for name, count in artifact.operators.items())
    return join(element("h3", "Fused and quantised operators"), element("p", counts))


def _contents(manifest: Manifest) -> Markup:
    tensors = {
        title: ", ".join(f"{t.name} {t.dtype} [{', '.join('?' if n < 0 else str(n) for n in t.shape)}]" for t in given)
        for title, given in (("Inputs", manifest.inputs), ("Outputs", manifest.outputs))
    }
    facts = {
        **tensors,
        "Hidden size": str(manifest.hidden_size),
        **({"A vector's components": str(manifest.vector_size)} if manifest.pooling else {}),
        "Vocabulary": f"{manifest.vocab_size} tokens",
        "Special tokens": ", ".join(f"{role} {token}" for role, token in manifest.special_ids.items()),
        "Tools": ", ".join(f"{name} {version}" for name, version in manifest.tools.items()),
    }
    files = [
        [element("code", f.file), _Number(size(f.size_bytes)), element("code", f.sha256)]
        for f in manifest.entries()
        if isinstance(f, FileEntry)
    ]
    return join(
        element("h2", "The bundle"),
        _facts(facts),
        _folded(f"{len(manifest.labels)} labels", (f"{index} {name}" for index, name in enumerate(manifest.labels))),
        _folded(f"{len(manifest.prompts)} prompts", (f"{name}: {words!r}" for name, words in manifest.prompts.items())),
        _table(["file", _Number("size"), "SHA-256"], files),
    )


def _folded(title: str, lines: Iterable[str]) -> Markup | None:
    items = [element("li", line) for line in lines]
    return element("details", element("summary", title), element("ul", *items)) if items else None


def _facts(facts: Mapping[str, str]) -> Markup:
    return element(
        "dl", *(part for name, value in facts.items() for part in (element("dt", name), element("dd", value)))
    )


class _Number(str):
    """A cell that stands to the right."""

    __slots__ = ()


class _Quote(str):
    """A cell that may be long."""

    __slots__ = ()


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    head = element("tr", *(element("th", title, class_=_kind(title)) for title in titles))
    body = [element("tr", *(element("td", cell, class_=_kind(cell)) for cell in row)) for row in rows]
    table = element("table", element("thead", head), element("tbody", *body))
    return element("div", table, class_="scroll")


def _kind(cell: str) -> str | None:
    if isinstance(cell, _Number):
        return "number"
    return "quote" if isinstance(cell, _Quote) else None


def _milliseconds(value: float) -> str:
    return f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"  # noqa: PLR2004  three digits
