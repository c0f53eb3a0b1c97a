"""Watches the model repository for new versions while the server runs.

A version is loaded once all files of its manifest have their full size and nothing has changed between two polls, so
that a version that is being copied is left alone. Only versions newer than the one that serves count. A refused version
is tried again when it has changed. One that failed for a temporary reason is tried again after a pause.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING

from serving.errors import BundleError, VersionNotLoaded, VersionRefused
from serving.models import verified_dir
from serving.models.bundle import read_bundle
from serving.models.manifest import MANIFEST

if TYPE_CHECKING:
    from pathlib import Path

    from serving.rollout.versions import Versions

log = logging.getLogger("bertserve.swap")

Signature = tuple[tuple[str, int, int, int], ...]
"""For each file: name, inode, modification time (ns), size."""

_PATIENT_LOOKS = 30
"""Polls of an incomplete, unchanged version after which the log reports it."""


class RepositoryWatch:
    def __init__(self, root: Path, versions: Versions, every_s: float) -> None:
        self._root = root
        self._versions = versions
        self._every_s = every_s
        self._seen: dict[tuple[str, int], tuple[Signature, int]] = {}
        self._tried: dict[tuple[str, int], Signature] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            for name, served in self._versions.served().items():
                try:
                    await self._follow(name, served)
                except Exception:  # boundary of the loop: an unforeseen error does not end the watch
                    log.exception("%s: scan for new versions failed; retrying", name)

    async def _follow(self, name: str, served: int) -> None:
        version = await asyncio.to_thread(self.look, name, served)
        if version is None:
            return
        try:
            await self._versions.swap(name, version)
        except VersionRefused:  # already logged
            pass
        except VersionNotLoaded:
            self._tried.pop((name, version), None)

    def look(self, name: str, served: int) -> int | None:
        """The newest version above the one that serves, if it is due."""
        try:
            newer = [version for version in verified_dir.versions(self._root / name) if version > served]
        except OSError as error:
            log.warning("cannot list the versions of %s: %s", name, error.strerror)
            return None
        for version in reversed(newer):
            if self._versions.unserved.waits((name, version)):  # no older version takes its place meanwhile
                return None
            if self._is_due(name, version):
                return version
        return None

    def _is_due(self, name: str, version: int) -> bool:
        key, path = (name, version), self._root / name / str(version)
        try:
            signature = _signature(path)
        except OSError:  # it is being removed
            return False
        if self._versions.unserved.is_left_out(key):
            self._tried.setdefault(key, signature)
        if self._tried.get(key) == signature:
            return False
        before, looks = self._seen.get(key, ((), 0))
        looks = looks + 1 if signature == before else 0
        self._seen[key] = signature, looks
        missing = _missing(path, signature)
        self._versions.unserved.incomplete(key, missing)
        if missing is not None:
            if looks == _PATIENT_LOOKS:
                log.warning("%s: version %d is still incomplete: %s", name, version, missing)
            return False
        if not looks:
            return False
        self._tried[key] = signature
        return True


def _signature(path: Path) -> Signature:
    with os.scandir(path) as entries:
        files = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return tuple(sorted((name, status.st_ino, status.st_mtime_ns, status.st_size) for name, status in files))


def _missing(path: Path, signature: Signature) -> str | None:
    """What a version lacks of the files in its manifest; None if it is complete."""
    sizes = {name: size for name, _, _, size in signature}
    if MANIFEST not in sizes:
        return f"{MANIFEST} is missing"
    try:
        entries = read_bundle(path).manifest.entries()
    except (BundleError, OSError) as error:
        return str(error)
    for entry in entries:
        if entry.file not in sizes:
            return f"{entry.file} is missing"
        if sizes[entry.file] < entry.size_bytes:
            return f"{entry.file} has {sizes[entry.file]} of {entry.size_bytes} bytes"
    return None
