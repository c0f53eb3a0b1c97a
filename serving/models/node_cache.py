"""The node's cache: `<cache-dir>/<model>/<version>/<n>/`, what this node made of a bundle.

It holds what is true on this node alone: proofs that artifacts answer as PyTorch does on this device with these
libraries, engines built for its GPU, and files that make later builds and starts faster. `derived.json` names the
bundle by its manifest's SHA-256 and lists every file. A cache is untrusted input, and the rules for bundles apply to
it. An invalid entry is ignored: the bundle is then served, or refused, as if there were no cache.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import msgspec

from bertserve.serving import host
from bertserve.serving.engine.kinds import engine_for
from bertserve.serving.models import earlier_schemas, verified_dir
from bertserve.serving.models.bundle import check_artifact, file_entry
from bertserve.serving.models.manifest import Accuracy, Artifact, FileEntry, Invariance, Parity, problem
from bertserve.serving.models.staging_dir import StagedVersion, attempt
from bertserve.serving.models.verified_dir import UnverifiedError, versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Target

DERIVED = "derived.json"
SCHEMA_VERSION = 1

_KEPT = 3
"""Entries of a bundle that are kept. A server that restarts its engine reads the entry that was newest when it started,
and has itself added its costs and kernels since."""

_SHOWN_DIGITS = 12

_WRITING = threading.Lock()
"""Held while an entry is written: the next thread carries over what the one before has published."""

log = logging.getLogger("bertserve")


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Agreement of one artifact's answers with PyTorch's, measured on this node.

    Attributes:
        file: The artifact's file, in the bundle or among the engines.
        device: As `device_of` names it.
        libraries: Versions of the libraries that ran it, by name.
    """

    file: str
    device: str
    libraries: dict[str, str]
    parity: Parity
    invariance: Invariance
    batch_invariant: bool
    accuracy: tuple[Accuracy, ...] = ()

    @classmethod
    def of(cls, artifact: Artifact) -> Proof:
        """The proof from an artifact's figures, which this node has just measured."""
        if artifact.parity is None or artifact.invariance is None:
            raise ValueError(f"{artifact.file} was not compared")
        return cls(
            file=artifact.file,
            device=device_of(artifact.target),
            libraries=libraries_of(artifact.target),
            parity=artifact.parity,
            invariance=artifact.invariance,
            batch_invariant=artifact.batch_invariant,
            accuracy=artifact.accuracy,
        )


class Derived(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node made of one bundle.

    Attributes:
        bundle: SHA-256 of the bundle's manifest.
        engines: Native engines, whose files lie beside this manifest.
        files: Other files there, such as timing caches and cost tables.
    """

    schema_version: int
    model: str
    version: int
    bundle: str
    created: str
    proofs: tuple[Proof, ...] = ()
    engines: tuple[Artifact, ...] = ()
    files: tuple[FileEntry, ...] = ()

    def entries(self) -> list[FileEntry | Artifact]:
        return [*self.engines, *self.files]


def device_of(target: Target) -> str:
    """The device that runs a target's artifacts: a GPU if the target needs one and there is one, else the CPU."""
    return (host.gpu() if engine_for(target).on_gpu else "") or host.cpu()


def libraries_of(target: Target) -> dict[str, str]:
    """Versions of the libraries that run a target's artifacts here, by name; empty if none is installed."""
    return host.installed_versions(*engine_for(target).packages)


class CacheError(Exception):
    """An entry of the cache must not be used. The message names the directory and the reason."""


@dataclass(slots=True, frozen=True)
class CacheEntry:
    """A verified entry of the cache."""

    path: Path
    derived: Derived

    def file(self, name: str) -> FileEntry | None:
        return next((file for file in self.derived.files if file.file == name), None)


def open_entry(root: Path, bundle: Bundle) -> CacheEntry | None:
    """Verifies and reads the newest entry of a verified bundle; None if there is none.

    Raises:
        CacheError: The entry is of another bundle, damaged, or must not be used.
    """
    directory = root / bundle.manifest.model / str(bundle.manifest.version)
    try:
        _check_directory(directory)
        numbers = versions(directory) if directory.is_dir() else []
        return _verify(directory / str(numbers[-1]), bundle) if numbers else None
    except (UnverifiedError, OSError) as error:
        raise CacheError(f"cache {directory}: {error}") from error


def with_engines(root: Path, bundle: Bundle) -> Bundle:
    """The bundle with the engines that this node built from it, proven or not; raises CacheError."""
    entry = open_entry(root, bundle)
    if entry is None:
        return bundle
    return replace(bundle, made_here=tuple((artifact, entry.path) for artifact in entry.derived.engines))


def with_proofs(root: Path, bundle: Bundle) -> Bundle:
    """The bundle with this node's engines, and with its proofs of artifacts that came without one.

    An entry that must not be used is ignored, and the log says why.
    """
    try:
        entry = open_entry(root, bundle)
    except CacheError as error:
        log.warning("%s; prove it again with `%s`", error, host.command("verify"))
        return bundle
    if entry is None:
        return bundle
    proofs = {proof.file: proof for proof in entry.derived.proofs}
    own, made = (
        tuple(_proven(artifact, proofs.get(artifact.file), bundle.path) for artifact in artifacts)
        for artifacts in (bundle.manifest.artifacts, entry.derived.engines)
    )
    manifest = msgspec.structs.replace(bundle.manifest, artifacts=own)
    return replace(bundle, manifest=manifest, made_here=tuple((artifact, entry.path) for artifact in made))


def is_proven_here(root: Path, bundle: Bundle, artifact: Artifact) -> bool:
    """Whether this node has proven an artifact with its current device and libraries; raises CacheError."""
    entry = open_entry(root, bundle)
    proofs = entry.derived.proofs if entry else ()
    return any(proof.file == artifact.file and _stale(proof, artifact) is None for proof in proofs)


class CacheWriter(StagedVersion):
    """Makes the next entry of a bundle in a staging directory and moves it into place in one step.

    with CacheWriter(root, "minilm", 1) as writer:
        (writer.path / "model.sm75.fp16.engine").write_bytes(...)
        writer.publish(bundle, engines=[...])
    """

    def __init__(self, root: Path, model: str, version: int) -> None:
        directory = root / model / str(version)
        try:
            _check_directory(directory)
        except UnverifiedError as error:
            raise CacheError(f"cache {directory}: {error}") from error
        super().__init__(directory)
        self._root = root

    def __enter__(self) -> Self:
        """Waits for other threads that write to the cache, then makes the staging directory."""
        _WRITING.acquire()
        try:
            return super().__enter__()
        except BaseException:
            _WRITING.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            _WRITING.release()

    def publish(
        self,
        bundle: Bundle,
        *,
        proofs: Mapping[str, Proof | None] | None = None,
        engines: Sequence[Artifact] = (),
        files: Sequence[str] = (),
    ) -> CacheEntry:
        """Writes the manifest, verifies the entry, syncs it to disk and moves it into place.

        Carries over everything in the newest entry of the same bundle that is not replaced.

        Args:
            bundle: The bundle that everything was made from.
            proofs: By the artifact's file; None if the artifact does not answer as PyTorch does.
            engines: New engines; their files lie in `path`.
            files: Names of other files in `path`.

        Raises:
            CacheError: The result must not be used.
        """
        made = {engine.file: engine for engine in engines} | {name: file_entry(self.path / name) for name in files}
        # An old proof was of the engine that had the name before.
        judged = dict.fromkeys((engine.file for engine in engines), None) | dict(proofs or {})
        return attempt(lambda: self._publish(bundle, made, judged), FileExistsError)

    def _publish(
        self, bundle: Bundle, made: dict[str, FileEntry | Artifact], judged: dict[str, Proof | None]
    ) -> CacheEntry:
        """Makes one attempt to publish.

        Raises:
            FileExistsError: Another process has published meanwhile; its content must be carried over too.
        """
        # Read the number first: an entry that is published after this has the same number.
        self.version = max(versions(self.path.parent), default=0) + 1
        taken: dict[str, FileEntry | Artifact] = {}
        earlier: dict[str, Proof | None] = {}
        with contextlib.suppress(CacheError):  # an entry that must not be used is replaced
            if before := open_entry(self._root, bundle):
                taken = {entry.file: entry for entry in before.derived.entries() if entry.file not in made}
                earlier = {proof.file: proof for proof in before.derived.proofs}
                for file in taken:
                    shutil.copyfile(before.path / file, self.path / file)
        entries = (taken | made).values()
        derived = Derived(
            schema_version=SCHEMA_VERSION,
            model=bundle.manifest.model,
            version=bundle.manifest.version,
            bundle=bundle.sha256,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            proofs=tuple(proof for proof in (earlier | judged).values() if proof is not None),
            engines=tuple(entry for entry in entries if isinstance(entry, Artifact)),
            files=tuple(entry for entry in entries if isinstance(entry, FileEntry)),
        )
        verified_dir.write(self.path, DERIVED, derived)
        try:
            _verify(self.path, bundle)
        except UnverifiedError as error:
            raise CacheError(f"cache {self.path}: {error}") from error
        try:
            entry = CacheEntry(self.move(), derived)
        except FileExistsError:
            for file in taken:
                (self.path / file).unlink()
            raise
        for outdated in versions(entry.path.parent)[:-_KEPT]:
            shutil.rmtree(entry.path.parent / str(outdated), ignore_errors=True)
        return entry


def add_file(root: Path, bundle: Bundle, name: str, content: bytes) -> None:
    """Adds a file to the cached files of a bundle; raises CacheError if the result must not be used."""
    with CacheWriter(root, bundle.manifest.model, bundle.manifest.version) as writer:
        (writer.path / name).write_bytes(content)
        writer.publish(bundle, files=[name])


def _check_directory(directory: Path) -> None:
    """Rejects links, which could lead out of the cache."""
    for path in (directory.parent, directory):
        if path.is_symlink():
            raise UnverifiedError(f"{path} must be a directory, not a link")


def _verify(path: Path, bundle: Bundle) -> CacheEntry:
    derived, _ = verified_dir.read(path, DERIVED, _decode)
    if (broken := next((sentence for is_broken, sentence in _rules(derived, bundle) if is_broken), None)) is not None:
        raise UnverifiedError(f"{DERIVED}: {broken}")
    verified_dir.check(path, DERIVED, derived.entries())
    for artifact in derived.engines:
        check_artifact(path / artifact.file, bundle.manifest, artifact.engine)
    return CacheEntry(path, derived)


def _decode(content: bytes) -> Derived:
    fields = msgspec.json.decode(content, type=dict[str, Any])
    engines = msgspec.convert(fields.get("engines", []), list[dict[str, Any]])
    return msgspec.convert(fields | {"engines": earlier_schemas.whole(engines)}, Derived)


def _rules(derived: Derived, bundle: Bundle) -> Iterator[tuple[bool, str]]:
    """The rules for a manifest, each as half a sentence. Later rules rely on earlier ones."""
    manifest = bundle.manifest
    yield derived.schema_version != SCHEMA_VERSION, f"schema version must be {SCHEMA_VERSION}"
    yield (
        (derived.model, derived.version, derived.bundle) != (manifest.model, manifest.version, bundle.sha256),
        f"it was made for another bundle ({derived.bundle[:_SHOWN_DIGITS]!r}, not {bundle.sha256[:_SHOWN_DIGITS]!r})",
    )
    # A cache may hold what a bundle may: engines like the bundle's own, and files with plain names.
    artifacts = derived.engines or manifest.artifacts
    whole = msgspec.structs.replace(manifest, artifacts=artifacts, files=(*manifest.files, *derived.files))
    wrong = problem(whole, manifest.model, str(manifest.version))
    yield wrong is not None, str(wrong)
    yield any(entry.file == DERIVED for entry in derived.files), "a file's name is not a plain name"
    yield (
        any(engine.engine is None or engine.proven for engine in derived.engines),
        "an engine is not an unproven TensorRT engine",
    )
    names = {artifact.file for artifact in manifest.artifacts}
    yield not names.isdisjoint(entry.file for entry in derived.entries()), "a file has the name of a file in the bundle"
    files = [proof.file for proof in derived.proofs]
    yield (
        not names.union(engine.file for engine in derived.engines).issuperset(files),
        "it has a proof of an unknown artifact",
    )
    yield len(set(files)) != len(files), "an artifact is proven twice"
    words = [word for proof in derived.proofs for word in (proof.device, *proof.libraries, *proof.libraries.values())]
    yield not all(word.isprintable() for word in words), "a device or library name is not printable"
    yield not all(proof.device and proof.libraries for proof in derived.proofs), "a proof lacks its device or libraries"


def _proven(artifact: Artifact, proof: Proof | None, bundle: Path) -> Artifact:
    if artifact.proven or proof is None:
        return artifact
    if (reason := _stale(proof, artifact)) is not None:
        log.warning("bundle %s: ignoring the cached proof of %s: %s", bundle, artifact.file, reason)
        return artifact
    return msgspec.structs.replace(
        artifact,
        parity=proof.parity,
        invariance=proof.invariance,
        batch_invariant=proof.batch_invariant,
        accuracy=proof.accuracy,
    )


def _stale(proof: Proof, artifact: Artifact) -> str | None:
    """Why a proof no longer holds here; None if it does."""
    libraries = libraries_of(artifact.target)
    if proof.libraries != libraries:
        return f"it was made with {_named(proof.libraries)}, but {_named(libraries) or 'no such library'} is installed"
    if proof.device != (here := device_of(artifact.target)):
        return f"it was made on {proof.device}, but this is {here}"
    return None


def _named(libraries: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(libraries.items()))
