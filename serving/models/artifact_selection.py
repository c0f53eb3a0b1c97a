"""Selects the artifact that an engine runs, from a model's bundle and from what this node made of it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.engine.specs import ModelSpec
from bertserve.serving.errors import BundleError, StartupError
from bertserve.serving.host import command
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.models.manifest import MANIFEST, MODEL_NAME
from bertserve.serving.models.node_cache import with_proofs
from bertserve.serving.models.verified_dir import versions
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bertserve.serving.engine.kinds.kind import EngineKind
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Artifact, Manifest

log = logging.getLogger("bertserve")

_SMALL_BYTES = 128 << 20
"""See `ModelSpec.small`."""


@dataclass(frozen=True, kw_only=True)
class ServableArtifact:
    """A model and the artifact of its bundle that an engine runs.

    Attributes:
        second: The artifact that the engine runs beside it; see `EngineKind.second`.
    """

    bundle: Bundle
    artifact: Artifact
    second: Artifact | None = None

    # Cached because every request reads them.

    @cached_property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @cached_property
    def name(self) -> str:
        return self.manifest.model

    @cached_property
    def version(self) -> str:
        return str(self.manifest.version)

    @cached_property
    def artifacts(self) -> tuple[Artifact, ...]:
        return (self.artifact,) if self.second is None else (self.artifact, self.second)

    @property
    def proven(self) -> bool:
        """Whether every artifact that answers was compared with PyTorch."""
        return all(artifact.proven for artifact in self.artifacts)

    def spec(self) -> ModelSpec:
        spec = self._spec(self.artifact)
        return spec if self.second is None else msgspec.structs.replace(spec, second=self._spec(self.second))

    def _spec(self, artifact: Artifact) -> ModelSpec:
        manifest = self.manifest
        directory = self.bundle.made_here_in(artifact) or self.bundle.path
        return ModelSpec(
            name=manifest.model,
            path=str(directory / artifact.file),
            sha256=artifact.sha256,
            batch_invariant=artifact.batch_invariant,
            vocab_size=manifest.vocab_size,
            max_length=manifest.max_length,
            special_ids=manifest.special_ids,
            inputs=tuple(tensor.name for tensor in manifest.inputs),
            outputs=manifest.outputs,
            unattended=manifest.unattended,
            small=all(each.total_bytes <= _SMALL_BYTES for each in self.artifacts),
            build=artifact.engine,
            size_bytes=artifact.total_bytes,
            data_sha256="" if artifact.data is None else artifact.data.sha256,
        )


def verify_bundles(root: Path, cache: Path | None = None) -> list[Bundle]:
    """Verifies the newest version of each model in `<root>/<model>/<version>/`; adds what this node made of it.

    Raises:
        StartupError: There is no model, or one of them must not be served.
    """
    if not root.is_dir():
        what = "a file, not a directory" if root.exists() else "no such directory"
        raise StartupError(f"model repository {root}: {what}; {_make_one()}")
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and MODEL_NAME.fullmatch(entry.name))
        models = [(root / name, versions(root / name)) for name in names]
        newest = [directory / str(numbers[-1]) for directory, numbers in models if numbers]
        if not newest:
            raise StartupError(f"model repository {root}: {_instead(root)}")
        bundles = [open_bundle(path) for path in newest]
    except BundleError as error:
        raise StartupError(str(error)) from error
    except OSError as error:
        raise StartupError(f"model repository {root}: {error}") from error
    return bundles if cache is None else [with_proofs(cache, bundle) for bundle in bundles]


def _make_one() -> str:
    return f"make one with `{command('export')}`, or let the server export one with --model-id"


def _instead(root: Path) -> str:
    """Describes a directory without models, and says what to type."""
    above = Path(os.path.abspath(root)).parents  # noqa: PTH100  `resolve` would follow links
    if (root / MANIFEST).is_file():
        return f"is one version of a model, not a repository; use --models {above[1]}"
    if any((root / str(number) / MANIFEST).is_file() for number in versions(root)):
        return f"is one model, not a repository; use --models {above[0]}"
    if (root / "config.json").is_file():
        return f"is a checkpoint, not a repository; export and serve it with `{command(f'serve --model-id {root}')}`"
    return f"contains no model; {_make_one()}"


def runs_on_a_gpu(bundles: Sequence[Bundle]) -> bool:
    """Whether every model has an artifact that some GPU could run, or a graph to build one from."""
    engines = [kind for kind in ENGINES.values() if kind.on_gpu]
    return all(bool(bundle.engine_graphs) or any(_runnable(kind, bundle) for kind in engines) for bundle in bundles)


def _runnable(engine: EngineKind, bundle: Bundle, gpu: str = "") -> list[Artifact]:
    """The artifacts that an engine runs, on this kind of GPU if one is given."""
    return [artifact for artifact in bundle.artifacts if engine.runs(artifact.target, gpu)]


def select_artifact(
    bundle: Bundle, precision: str, engine: str, *, unproven: bool, target: str = ""
) -> ServableArtifact:
    """Selects the artifact for an engine: proven before unproven, then the fastest, then this node's own.

    Raises:
        BundleError: The bundle has none that may be served.
    """
    kind = ENGINES[engine]
    runnable = _runnable(kind, bundle, target)
    if not runnable:
        made_for = ", ".join(sorted({artifact.target for artifact in bundle.artifacts}))
        here = f"{engine} on {target}" if target and kind.per_gpu else engine
        other = f"select another --engine, or export one with `{command('export')}`"
        if kind.per_gpu and bundle.engine_graphs:
            build = command(f"build {bundle.path} --cache-dir DIR")
            other = f"build one with `{build}` before the server starts, with the same --cache-dir"
        offered = f"(it has: {made_for}){_refused(bundle)}"
        raise BundleError(f"bundle {bundle.path}: has no artifact for the engine {here} {offered}; {other}")
    wanted = kind.fastest if precision == "auto" else (precision,)
    fitting = [artifact for artifact in runnable if artifact.precision in wanted]
    if not fitting:
        offered = ", ".join(artifact.precision for artifact in runnable)
        raise BundleError(
            f"bundle {bundle.path}: has no {precision} artifact for the engine {engine} (it has: {offered})"
            f"{_refused(bundle)}; select another --precision, or export it with `{command('export')}`"
        )
    best = min(
        fitting,
        key=lambda artifact: (
            not artifact.proven,
            precision == "auto" and bool(artifact.reserved),
            wanted.index(artifact.precision),
            bundle.made_here_in(artifact) is None,
        ),
    )
    if not best.proven and not unproven:
        raise BundleError(
            f"bundle {bundle.path}: {best.file} is not proven (not compared with PyTorch); prove it with"
            f" `{command(f'verify {bundle.path} --cache-dir DIR')}` and serve it with the same --cache-dir, or set"
            " --allow-unproven"
        )
    by_default = precision == "auto"
    second = _second(bundle, best, kind.second, unproven=unproven, by_default=by_default)
    return ServableArtifact(bundle=bundle, artifact=best, second=second)


def without_second(
    servables: Sequence[ServableArtifact], engine: EngineKind, *, by_default: bool = False
) -> Iterator[str]:
    """Sentences that say why models run in the engine's first library alone."""
    lacking: list[str] = []
    for servable in servables if engine.second else ():
        made = [each for each in servable.bundle.artifacts if each.target == engine.second]
        if servable.second is not None or (by_default and made and _left_for_fp32(servable)):
            continue
        if made:
            yield f"only ONNX Runtime runs {servable.name}: {_unlike(servable.artifact, made, engine.library)}"
        else:
            lacking.append(servable.name)
    if lacking:
        yield f"only ONNX Runtime runs {', '.join(lacking)}: {engine.library} needs {engine.second_needs}"


def _unlike(first: Artifact, others: Sequence[Artifact], library: str) -> str:
    """Why none of a library's artifacts may answer in place of the first one; see `_second`."""
    alike = [other for other in others if other.precision == first.precision]
    if not alike:
        return f"its artifact for {library} is {others[0].precision}, and {first.precision} is served"
    best = min(alike, key=lambda other: not other.proven)
    if not best.proven:
        return f"{best.file} is not proven"
    if best.batch_invariant != first.batch_invariant:
        return f"only one of {first.file} and {best.file} is batch-invariant"
    return f"{best.file} {best.reserved}"


def log_agreement(servable: ServableArtifact) -> None:
    """Logs a model whose INT8 agrees with PyTorch too seldom. Called if no precision was requested."""
    name, task = servable.name, servable.manifest.task
    for artifact in servable.artifacts:
        if artifact.reserved:
            log.warning(
                "%s: serving %s because there is no fp32 artifact: it %s", name, artifact.file, artifact.reserved
            )
            return
        if (few := few_agree(artifact, task)) and "agreement" not in {*artifact.limits, *artifact.waived}:
            advice = "export it again to serve fp32 by default, or set --precision fp32"
            log.warning("%s: serving %s: it %s; %s", name, artifact.file, few, advice)
            return
    if (left := _left_for_fp32(servable)) is not None:
        log.info("%s: serving fp32: %s %s; set --precision int8 to serve INT8", name, left.file, left.reserved)


def _left_for_fp32(servable: ServableArtifact) -> Artifact | None:
    """The reserved artifact in whose place fp32 is served; None if there is none."""
    if servable.artifact.precision != "fp32":
        return None
    return next((artifact for artifact in servable.bundle.artifacts if artifact.reserved), None)


def few_agree(artifact: Artifact, task: str) -> str:
    """Why INT8 is not served by default, as half a sentence; empty if it is."""
    parity, least = artifact.evidence.parity, TASKS[task].served_agreement
    if artifact.precision != "int8" or parity is None or parity.agreement is None or parity.agreement >= least:
        return ""
    return (
        f"gives PyTorch's answer to {parity.agreement:.1%} of the {parity.texts} texts of its proof,"
        f" less than {least:.0%}"
    )


def _refused(bundle: Bundle) -> str:
    """The artifacts that this node refuses to serve, as the end of an error message."""
    return "".join(f"; on this processor {file} {sentence}" for file, sentence in bundle.refused.items())


def _second(bundle: Bundle, first: Artifact, target: str, *, unproven: bool, by_default: bool) -> Artifact | None:
    """The artifact for the second library. It may answer in place of the first, so both are batched alike."""
    alike = [
        artifact
        for artifact in bundle.artifacts
        if artifact.target == target
        and (artifact.precision, artifact.batch_invariant) == (first.precision, first.batch_invariant)
        and (artifact.proven or unproven)
        and (first.reserved or not artifact.reserved or not by_default)
    ]
    return min(alike, key=lambda artifact: not artifact.proven, default=None)
