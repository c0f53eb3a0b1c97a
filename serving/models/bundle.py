"""The model bundle: `<repository>/<model>/<version>/`, written by `export` and opened by `serve`.

A bundle is untrusted input. `open_bundle` refuses it unless:

- the manifest is well-formed,
- the directory holds exactly the listed files, each a plain file with the listed size and SHA-256,
- every artifact passes `artifact_scan`.

Nothing here needs an engine's library. `BundleWriter` makes a bundle visible in one step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bertserve.serving.engine.specs import DATA_SUFFIX
from bertserve.serving.errors import BundleError
from bertserve.serving.models import earlier_schemas, verified_dir
from bertserve.serving.models.artifact_scan import UnsafeArtifactError, check_model_file, check_plan_file
from bertserve.serving.models.manifest import ENGINE_GRAPHS, MANIFEST, MODEL_NAME, FileEntry, Manifest, problem
from bertserve.serving.models.staging_dir import StagedVersion
from bertserve.serving.models.verified_dir import UnverifiedError, digest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bertserve.serving.engine.specs import EngineBuild
    from bertserve.serving.models.manifest import Artifact, Precision

log = logging.getLogger("bertserve")


@dataclass(slots=True, frozen=True)
class Bundle:
    """A verified bundle on disk.

    Attributes:
        sha256: Digest of the manifest, and so of the whole bundle: the manifest lists the digest of every file.
        made_here: Artifacts that this node made of the bundle, each with its directory.
        refused: By file, why an artifact must not be served on this node.
    """

    path: Path
    manifest: Manifest
    sha256: str
    made_here: tuple[tuple[Artifact, Path], ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def artifacts(self) -> list[Artifact]:
        own = [artifact for artifact in self.manifest.artifacts if artifact.file not in self.refused]
        return [*own, *(artifact for artifact, _ in self.made_here)]

    def verify(self, file: str) -> None:
        """Raises BundleError: the file has changed since the bundle was verified."""
        sha256 = next(entry.sha256 for entry in self.manifest.files if entry.file == file)
        if digest(self.path / file) != sha256:
            raise BundleError(f"bundle {self.path}: {file} changed while loading")

    def made_here_in(self, artifact: Artifact) -> Path | None:
        """The directory of an artifact that this node made; None for one of the bundle's own."""
        return next((directory for made, directory in self.made_here if made.file == artifact.file), None)

    @property
    def engine_graphs(self) -> dict[Precision, Path]:
        """The graphs from which a node can build engines for its GPU, by precision; fp16 is first."""
        files = {entry.file for entry in self.manifest.files}
        return {precision: self.path / file for precision, file in ENGINE_GRAPHS.items() if file in files}

    def artifact(self, precision: str, target: str = "cpu") -> Artifact | None:
        return next((a for a in self.manifest.artifacts if (a.precision, a.target) == (precision, target)), None)


def file_entry(path: Path) -> FileEntry:
    return FileEntry(file=path.name, sha256=digest(path), size_bytes=path.stat().st_size)


def data_entry(graph: Path) -> FileEntry | None:
    """The file with a graph's weights; None if they lie in the graph."""
    path = graph.with_name(f"{graph.name}{DATA_SUFFIX}")
    return file_entry(path) if path.is_file() else None


def open_bundle(path: Path) -> Bundle:
    """Verifies a bundle and reads its manifest; `path` is `<repository>/<model>/<version>`.

    Raises:
        BundleError: The bundle does not match its manifest, or holds what must not be served.
    """
    return _verify(read_bundle(path))


def read_bundle(path: Path) -> Bundle:
    """Reads only a bundle's manifest. The engine process verifies the bundle later.

    Raises:
        BundleError: The manifest is invalid, or of another model or version.
    """
    return _read(path, path.parent.name, path.name)


def warn_of_schema(bundle: Bundle) -> None:
    """Logs what the export of a bundle did not prove, if the manifest has an earlier schema."""
    manifest = bundle.manifest
    if unproven := earlier_schemas.UNPROVEN.get(manifest.schema_version):
        log.warning(
            "%s: version %d has a manifest of schema %d: %s; export it again",
            *(manifest.model, manifest.version, manifest.schema_version, unproven),
        )


def _read(path: Path, model: str, version: str) -> Bundle:
    try:
        manifest, sha256 = verified_dir.read(path, MANIFEST, earlier_schemas.decode)
    except UnverifiedError as error:
        raise BundleError(f"bundle {path}: {error}") from error
    if (broken := problem(manifest, model, version)) is not None:
        raise BundleError(f"bundle {path}: {MANIFEST}: {broken}")
    return Bundle(path, manifest, sha256)


def _verify(bundle: Bundle) -> Bundle:
    path, manifest = bundle.path, bundle.manifest
    graphs = [graph.name for graph in bundle.engine_graphs.values()]
    builds = {artifact.file: artifact.engine for artifact in manifest.artifacts} | dict.fromkeys(graphs)
    try:
        verified_dir.check(path, MANIFEST, manifest.entries())
        for file, build in builds.items():
            check_artifact(path / file, manifest, build)
    except UnverifiedError as error:
        raise BundleError(f"bundle {path}: {error}") from error
    return bundle


def check_artifact(path: Path, manifest: Manifest, build: EngineBuild | None) -> None:
    """Scans a graph or, with `build`, an engine whose digest is right; raises UnverifiedError."""
    try:
        if build is not None:
            check_plan_file(path, build)
        else:
            data = manifest.data_of(path.name)
            check_model_file(path, None if data is None else data.file)
    except UnsafeArtifactError as error:
        raise UnverifiedError(f"{path.name} {error}") from error


class BundleWriter(StagedVersion):
    """Builds a bundle in a staging directory and moves it into place in one step.

    with BundleWriter(Path("models"), "minilm") as writer:
        (writer.path / "model.fp32.onnx").write_bytes(...)
        bundle = writer.publish(manifest)
    """

    def __init__(self, repository: Path, model: str) -> None:
        if not MODEL_NAME.fullmatch(model):
            raise BundleError(
                f"model name {model!r}: use letters, digits, '.', '_' and '-', 128 at most, a letter or digit first"
            )
        self.directory = repository / model
        super().__init__(self.directory)
        self.model = model

    def publish(self, manifest: Manifest) -> Bundle:
        """Writes the manifest, verifies the bundle, syncs it to disk and moves it into place."""
        verified_dir.write(self.path, MANIFEST, manifest)
        bundle = _verify(_read(self.path, self.model, str(self.version)))
        return Bundle(self.move(), manifest, bundle.sha256)
