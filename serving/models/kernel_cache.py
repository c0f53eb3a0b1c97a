"""Caches compiled kernels on the node: TensorRT for RTX and OpenVINO compile for long at each start.

The engine process reads the cached kernels and writes what it compiled to a file of its own, which is then added to the
cache. The engine refuses kernels of another device, driver, version or artifact. TensorRT checks this itself; for
OpenVINO, a digest of all of these stands in front of the kernels.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.models.node_cache import CacheError, add_file, open_entry
from bertserve.serving.models.verified_dir import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.models.artifact_selection import ServableArtifact

log = logging.getLogger("bertserve")

_FORGOTTEN_S = 86_400.0
"""Longer than any engine takes from its first kernel to its last."""


class KernelCache:
    """The compiled kernels of a server's models; none without a `root`."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._models: Sequence[ServableArtifact] = ()
        self._files: list[KernelFiles] = []

    def files(self, engine: str, models: Sequence[ServableArtifact]) -> list[KernelFiles]:
        """The kernel files of each model; empty without a cache or if the engine compiles nothing."""
        self._files, self._models = [], models
        if self._root is not None and ENGINES[engine].compiles:
            self._files = [_files(self._root, model) for model in models]
        return self._files

    def keep(self) -> None:
        """Adds the kernels that the engine wrote to the cache, in a thread."""
        if self._root is not None and self._files:
            threading.Thread(target=_keep, args=(self._root, self._models, self._files)).start()
            self._files = []


def _keep(root: Path, models: Sequence[ServableArtifact], files: Sequence[KernelFiles]) -> None:
    for model, file in zip(models, files, strict=True):
        written = Path(file.write)
        try:
            if written.exists() and digest(written) != file.sha256:
                add_file(root, model.bundle, _file_name(model), written.read_bytes())
        except (CacheError, OSError) as error:
            log.warning("cannot cache the kernels of %s: %s", model.name, error)
        finally:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)


def _files(root: Path, model: ServableArtifact) -> KernelFiles:
    # Servers in several containers may share a cache, so process ids are not unique.
    write = str(root / f".kernels-{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):  # the engine reports what it could not write
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
    try:
        entry = open_entry(root, model.bundle)
    except CacheError as error:
        log.warning("ignoring the cached kernels of %s: %s", model.name, error)
        entry = None
    file = entry.file(_file_name(model)) if entry else None
    if entry is None or file is None:
        return KernelFiles(write=write)
    return KernelFiles(read=str(entry.path / file.file), sha256=file.sha256, write=write)


def _sweep(root: Path) -> None:
    """Removes files of servers that were killed before they could add them to the cache."""
    for file in root.glob(".kernels-*"):
        if file.stat().st_mtime < time.time() - _FORGOTTEN_S:
            file.unlink()


def _file_name(model: ServableArtifact) -> str:
    return f"kernels.{re.sub(r'[^A-Za-z0-9]+', '-', model.artifacts[-1].file)}.bin"
