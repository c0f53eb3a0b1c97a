"""The model bundle: `<repository>/<model>/<version>/`, what `export` writes and `serve` opens.

A bundle is data from outside. `open_bundle` refuses it unless the manifest is well-formed, the directory
holds exactly the files that it lists, every file is a plain file with the listed size and SHA-256, every
ONNX file passes `onnx_scan` and takes and answers what the manifest says, and every TensorRT engine passes
`plan_scan`. Nothing here needs the library of an engine. `BundleWriter` builds a bundle in a hidden directory
beside its place and moves it there in one step, so that no half bundle is ever visible.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from serving.manifest import MANIFEST, MODEL_NAME, FileEntry, Manifest, problem
from serving.onnx_scan import UnsafeModelError, check_model_file
from serving.plan_scan import UnfitPlanError, check_plan_file

if TYPE_CHECKING:
    from types import TracebackType

    from serving.manifest import Artifact

MANIFEST_LIMIT_BYTES = 1 << 20

_STAGING = re.compile(r"\.staging-[0-9]+-([0-9]+)")


class BundleError(Exception):
    """A bundle that must not be served; the message names the bundle and what is wrong with it."""


@dataclass(slots=True, frozen=True)
class Bundle:
    """A verified bundle on disk."""

    path: Path
    manifest: Manifest

    def artifact(self, precision: str, target: str = "cpu") -> Artifact | None:
        """The artifact of that precision for that target, if the bundle has one."""
        found = (a for a in self.manifest.artifacts if (a.precision, a.target) == (precision, target))
        return next(found, None)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def _verify(path: Path, model: str, version: str) -> Bundle:
    manifest = _read_manifest(path)
    if (wrong := problem(manifest, model, version)) is not None:
        raise BundleError(f"bundle {path}: {MANIFEST}: {wrong}")
    expected = {entry.file: entry for entry in manifest.entries()}
    found = {entry.name for entry in os.scandir(path)} - {MANIFEST}
    if missing := sorted(expected.keys() - found):
        raise BundleError(f"bundle {path}: {missing[0]} is listed in the manifest and missing")
    if extra := sorted(found - expected.keys()):
        raise BundleError(f"bundle {path}: {extra[0]!r} is not listed in the manifest")
    for entry in expected.values():
        _check_file(path / entry.file, entry)
    for artifact in manifest.artifacts:
        try:
            _check_artifact(path / artifact.file, artifact, manifest)
        except (UnsafeModelError, UnfitPlanError) as error:
            raise BundleError(f"bundle {path}: {artifact.file} {error}") from error
    return Bundle(path, manifest)


def _check_artifact(path: Path, artifact: Artifact, manifest: Manifest) -> None:
    """Looks into an artifact whose digest is right, and holds it against the manifest."""
    if artifact.engine is not None:
        check_plan_file(path, artifact.engine)
        return
    graph = check_model_file(path)
    for kind, found, said in (("inputs", graph.inputs, manifest.inputs), ("outputs", graph.outputs, manifest.outputs)):
        if [tuple(tensor) for tensor in found] != [(spec.name, spec.dtype, spec.shape) for spec in said]:
            raise UnsafeModelError(f"has other {kind} than the manifest says")
    if graph.words - {manifest.vocab_size}:
        raise UnsafeModelError(f"knows {max(graph.words)} words, the manifest says {manifest.vocab_size}")


def read_artifact(path: Path, sha256: str) -> bytes:
    """Reads an artifact into memory and verifies the very bytes that will be loaded.

    Raises:
        BundleError: The file changed since the bundle was opened.
    """
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BundleError(f"bundle {path.parent}: {path.name} does not match its SHA-256 in the manifest")
    return data


def _read_manifest(path: Path) -> Manifest:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise BundleError(f"bundle {path}: no such directory") from None
    if not stat.S_ISDIR(mode):
        raise BundleError(f"bundle {path}: must be a directory, not a link or a file")
    try:
        status = (path / MANIFEST).lstat()
    except FileNotFoundError:
        raise BundleError(f"bundle {path}: {MANIFEST} is missing") from None
    _check_plain(path / MANIFEST, status)
    if status.st_size > MANIFEST_LIMIT_BYTES:
        raise BundleError(f"bundle {path}: {MANIFEST} has {status.st_size} bytes; {MANIFEST_LIMIT_BYTES} allowed")
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"bundle {path}: {MANIFEST} is not a manifest: {error}") from error


def _check_plain(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"bundle {path.parent}: {path.name} must be a plain file, not a link or a device")
    if status.st_nlink > 1:
        raise BundleError(f"bundle {path.parent}: {path.name} is a hard link to a file elsewhere")


def _check_file(path: Path, entry: FileEntry | Artifact) -> None:
    status = path.lstat()
    _check_plain(path, status)
    if status.st_size != entry.size_bytes:
        raise BundleError(
            f"bundle {path.parent}: {entry.file} has {status.st_size} bytes, the manifest says {entry.size_bytes}"
        )
    if digest(path) != entry.sha256:
        raise BundleError(f"bundle {path.parent}: {entry.file} does not match its SHA-256 in the manifest")


def versions(model_directory: Path) -> list[int]:
    """The version numbers below a model's directory, ascending; other names are left alone."""
    names = [entry.name for entry in os.scandir(model_directory) if entry.is_dir(follow_symlinks=False)]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name)


class BundleWriter:
    """Builds a bundle aside and moves it into place whole.

    Used in a `with` block: leaving it without `publish` removes everything written. What a killed export
    left behind is removed by the next one.

        with BundleWriter(Path("models"), "minilm") as writer:
            (writer.path / "model.fp32.onnx").write_bytes(...)
            bundle = writer.publish(manifest)
    """

    def __init__(self, repository: Path, model: str) -> None:
        if not MODEL_NAME.fullmatch(model):
            raise BundleError(
                f"model name {model!r}: use letters, digits, '.', '_' and '-', 128 at most, a letter or digit first"
            )
        self._repository = repository
        self._directory = repository / model
        self._model = model

    def __enter__(self) -> Self:
        """Makes the hidden directory."""
        self._new = [path for path in (self._directory, self._repository) if not path.exists()]
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self.version = max(versions(self._directory), default=0) + 1
        self.path = self._directory / f".staging-{self.version}-{os.getpid()}"
        self.path.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes whatever was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        for made in self._new:
            if not any(made.iterdir()):
                made.rmdir()

    def publish(self, manifest: Manifest) -> Bundle:
        """Writes the manifest, verifies the whole, makes it durable and moves it into place."""
        encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
        (self.path / MANIFEST).write_bytes(encoded + b"\n")
        _verify(self.path, self._model, str(self.version))
        for file in self.path.iterdir():
            _sync(file)
        _sync(self.path)
        final = self._directory / str(self.version)
        self.path.rename(final)
        _sync(self._directory)
        return Bundle(final, manifest)

    def _sweep(self) -> None:
        for leftover in self._directory.glob(".staging-*"):
            owner = _STAGING.fullmatch(leftover.name)
            if owner is None or not Path(f"/proc/{owner[1]}").exists():
                shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
