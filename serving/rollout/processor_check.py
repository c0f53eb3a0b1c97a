"""Compares INT8 with PyTorch on this processor if the export proved it on one with other instructions.

Kernels for 8-bit products differ more between processors than others do, and a library that computes them wrongly
reports no error. So a few texts whose PyTorch answers lie in the bundle are computed before the artifact is served.
`python -m bertserve.export.proof.sample` does this in a process of its own. An artifact that breaks its limits is left
out, and the next best one is served. The node's cache keeps the findings.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import time
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving import host
from bertserve.serving.engine.children import module_command
from bertserve.serving.engine.kinds import engine_for
from bertserve.serving.models.node_cache import CacheError, add_file, is_proven_here, libraries_of, open_entry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bertserve.serving.models.artifact_selection import ServableArtifact
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Artifact

log = logging.getLogger("bertserve")

_LIMIT_S = 300.0
"""One or two seconds are usual; an emulated processor takes a hundred times as long."""

_LARGEST_BYTES = 1 << 16


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The finding for one artifact on this node.

    Attributes:
        artifact: SHA-256 of its file.
        libraries: Versions of the libraries that ran it, by name.
        sentence: Text for people that follows the file's name.
    """

    artifact: str
    device: str
    libraries: dict[str, str]
    may_serve: bool
    sentence: str


class ProcessorCheck:
    """The findings of one server. Without a `cache`, each start makes them anew."""

    def __init__(self, cache: Path | None, threads: int) -> None:
        self._cache = cache
        self._threads = threads
        self._found: dict[str, Finding] = {}

    def refused(self, servable: ServableArtifact) -> dict[str, str]:
        """Why artifacts must not be served here, by file. Compares those that have no finding yet."""
        unknown = [artifact for artifact in servable.artifacts if self._is_unknown(servable.bundle, artifact)]
        if unknown:
            self._compare(servable.bundle, unknown)
        found = {artifact.file: self._found.get(artifact.sha256) for artifact in servable.artifacts}
        return {file: each.sentence for file, each in found.items() if each is not None and not each.may_serve}

    def _is_unknown(self, bundle: Bundle, artifact: Artifact) -> bool:
        if artifact.precision != "int8" or engine_for(artifact.target).on_gpu or not artifact.proven:
            return False
        if set(artifact.proven_on) == set(host.integer_kernels()) or artifact.sha256 in self._found:
            return False
        if self._cache is None:
            return True
        try:
            if is_proven_here(self._cache, bundle, artifact):
                return False
            finding = _read(self._cache, bundle, artifact)
        except (CacheError, OSError, ValueError) as error:
            log.warning("%s: ignoring the cached check of %s: %s", bundle.manifest.model, artifact.file, error)
            return True
        if finding is not None:
            self._found[artifact.sha256] = finding
        return finding is None

    def _compare(self, bundle: Bundle, artifacts: Sequence[Artifact]) -> None:
        """Compares artifacts, and logs and keeps the findings. Artifacts that cannot be compared are served."""
        started, here = time.perf_counter(), ", ".join(host.integer_kernels())
        model, files = bundle.manifest.model, [artifact.file for artifact in artifacts]
        answer, problem = _run_samples(bundle.path, files, self._threads)
        for artifact in artifacts:
            there = ", ".join(artifact.proven_on) or "an unknown processor"
            why = f"{model}: {artifact.file} was proven on {there}; this processor has {here}"
            if artifact.file not in answer:
                log.warning("%s. Serving it unchecked, because the comparison failed: %s", why, problem)
                continue
            may_serve, sentence = answer[artifact.file]
            finding = _finding(artifact, sentence, may_serve=may_serve)
            self._found[artifact.sha256] = finding
            passed = time.perf_counter() - started
            if may_serve:
                log.info("%s. Compared a few texts in %.1f s: %s", why, passed, sentence)
            else:
                log.error("%s. Not serving it: on a few texts, compared in %.1f s, it %s", why, passed, sentence)
            self._keep(bundle, artifact, finding)

    def _keep(self, bundle: Bundle, artifact: Artifact, finding: Finding) -> None:
        if self._cache is None:
            return
        try:
            add_file(self._cache, bundle, _file_name(artifact), msgspec.json.encode(finding))
        except (CacheError, OSError) as error:
            log.warning("cannot cache the check of %s: %s", artifact.file, error)


def _run_samples(bundle: Path, files: Sequence[str], threads: int) -> tuple[Mapping[str, tuple[bool, str]], str]:
    """By file, whether an artifact may be served and what was found; else the reason why nothing was compared."""
    if not host.installed_versions("safetensors"):
        return {}, host.installing("verify")
    command = module_command("bertserve.export.proof.sample", str(bundle), str(threads), *files)
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {}, f"it took more than {_LIMIT_S:g} s"
    except OSError as error:  # too little memory or too many processes
        return {}, f"it cannot be started: {error}"
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        return {}, last or f"it exited with status {done.returncode}"
    # A library may have printed something before.
    answer: dict[str, tuple[bool, str]] = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    return answer, ""


def _read(root: Path, bundle: Bundle, artifact: Artifact) -> Finding | None:
    """The cached finding for this artifact, processor and library; None if there is none."""
    entry = open_entry(root, bundle)
    file = entry.file(_file_name(artifact)) if entry else None
    if entry is None or file is None or file.size_bytes > _LARGEST_BYTES:
        return None
    finding = msgspec.json.decode((entry.path / file.file).read_bytes(), type=Finding)
    return finding if finding == _finding(artifact, finding.sentence, may_serve=finding.may_serve) else None


def _finding(artifact: Artifact, sentence: str, *, may_serve: bool) -> Finding:
    return Finding(artifact.sha256, host.cpu(), libraries_of(artifact.target), may_serve, sentence)


def _file_name(artifact: Artifact) -> str:
    return f"processor.{re.sub(r'[^A-Za-z0-9]+', '-', artifact.file)}.json"
