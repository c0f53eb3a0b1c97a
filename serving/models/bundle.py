"""The model bundle: `<repository>/<model>/<version>/`, what `export` writes and `serve` opens.

A bundle is data from outside. `open_bundle` refuses it unless the manifest is well-formed, the directory
holds exactly the files that it lists, every file is a plain file with the listed size and SHA-256, every
ONNX file passes `onnx_scan` and takes and answers what the manifest says, and every TensorRT engine passes
`plan_scan`. Nothing here needs the library of an engine. `BundleWriter` makes a bundle visible in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.errors import BundleError
from serving.models import verified_dir
from serving.models.manifest import ENGINE_GRAPH, MANIFEST, MODEL_NAME, FileEntry, Manifest, problem
from serving.models.onnx_scan import UnsafeModelError, check_model_file
from serving.models.plan_scan import UnfitPlanError, check_plan_file
from serving.models.verified_dir import SealError, Staging, digest

if TYPE_CHECKING:
    from pathlib import Path

    from serving.models.manifest import Artifact


@dataclass(slots=True, frozen=True)
class Bundle:
    """A verified bundle on disk.

    Attributes:
        path: Its directory.
        manifest: What it says of itself.
        sha256: Of the manifest's bytes, and so of the whole: it lists every file's own.
        made_here: Further artifacts, which this node has made of it, and where each of them lies.
    """

    path: Path
    manifest: Manifest
    sha256: str
    made_here: tuple[tuple[Artifact, Path], ...] = ()

    @property
    def artifacts(self) -> list[Artifact]:
        """Its own, and those that this node has made."""
        return [*self.manifest.artifacts, *(artifact for artifact, _ in self.made_here)]

    def made_here_in(self, artifact: Artifact) -> Path | None:
        """The directory of an artifact that this node has made; None for one of the bundle's own."""
        return next((directory for made, directory in self.made_here if made.file == artifact.file), None)

    @property
    def has_engine_graph(self) -> bool:
        """Whether a node can build an engine of it for its own GPU."""
        return any(entry.file == ENGINE_GRAPH for entry in self.manifest.files)

    def artifact(self, precision: str, target: str = "cpu") -> Artifact | None:
        """The artifact of that precision for that target, if the bundle has one."""
        found = (a for a in self.manifest.artifacts if (a.precision, a.target) == (precision, target))
        return next(found, None)


def file_entry(path: Path) -> FileEntry:
    """The entry of the manifest that describes a file."""
    return FileEntry(file=path.name, sha256=digest(path), size_bytes=path.stat().st_size)


def open_bundle(path: Path) -> Bundle:
    """Verifies a bundle and reads its manifest.

    Args:
        path: `<repository>/<model>/<version>`.

    Raises:
        BundleError: The bundle is not what its manifest says, or holds what must not be served.
    """
    return _verify(path, path.parent.name, path.name)


def read_bundle(path: Path) -> Bundle:
    """Reads a bundle's manifest and looks at nothing else of it, for whoever lets it be verified afterwards.

    Args:
        path: `<repository>/<model>/<version>`.

    Raises:
        BundleError: The manifest is none, or not of this model and version.
    """
    return _read(path, path.parent.name, path.name)


def _read(path: Path, model: str, version: str) -> Bundle:
    try:
        manifest, sha256 = verified_dir.read(path, MANIFEST, Manifest)
    except SealError as error:
        raise BundleError(f"bundle {path}: {error}") from error
    if (wrong := problem(manifest, model, version)) is not None:
        raise BundleError(f"bundle {path}: {MANIFEST}: {wrong}")
    return Bundle(path, manifest, sha256)


def _verify(path: Path, model: str, version: str) -> Bundle:
    bundle = _read(path, model, version)
    try:
        _check(path, bundle.manifest)
    except SealError as error:
        raise BundleError(f"bundle {path}: {error}") from error
    return bundle


def _check(path: Path, manifest: Manifest) -> None:
    verified_dir.check(path, MANIFEST, manifest.entries())
    for artifact in manifest.artifacts:
        try:
            _check_artifact(path / artifact.file, artifact, manifest)
        except (UnsafeModelError, UnfitPlanError) as error:
            raise SealError(f"{artifact.file} {error}") from error
    if any(entry.file == ENGINE_GRAPH for entry in manifest.files):
        try:
            _check_graph(path / ENGINE_GRAPH, manifest)
        except UnsafeModelError as error:
            raise SealError(f"{ENGINE_GRAPH} {error}") from error


def _check_artifact(path: Path, artifact: Artifact, manifest: Manifest) -> None:
    """Looks into an artifact whose digest is right, and holds it against the manifest."""
    if artifact.engine is not None:
        check_plan_file(path, artifact.engine)
    else:
        _check_graph(path, manifest)


def _check_graph(path: Path, manifest: Manifest) -> None:
    graph = check_model_file(path)
    for kind, found, said in (("inputs", graph.inputs, manifest.inputs), ("outputs", graph.outputs, manifest.outputs)):
        if [tuple(tensor) for tensor in found] != [(spec.name, spec.dtype, spec.shape) for spec in said]:
            raise UnsafeModelError(f"has other {kind} than the manifest says")
    if graph.words - {manifest.vocab_size}:
        raise UnsafeModelError(f"knows {max(graph.words)} words, the manifest says {manifest.vocab_size}")


class BundleWriter(Staging):
    """Builds a bundle aside and moves it into place whole.

    Used as `Staging` is:

        with BundleWriter(Path("models"), "minilm") as writer:
            (writer.path / "model.fp32.onnx").write_bytes(...)
            bundle = writer.publish(manifest)
    """

    def __init__(self, repository: Path, model: str) -> None:
        if not MODEL_NAME.fullmatch(model):
            raise BundleError(
                f"model name {model!r}: use letters, digits, '.', '_' and '-', 128 at most, a letter or digit first"
            )
        super().__init__(repository / model)
        self.model = model

    def publish(self, manifest: Manifest) -> Bundle:
        """Writes the manifest, verifies the whole, makes it durable and moves it into place."""
        verified_dir.write(self.path, MANIFEST, manifest)
        bundle = _verify(self.path, self.model, str(self.version))
        return Bundle(self.move(), manifest, bundle.sha256)
