"""Compiled kernels in the node's cache, because TensorRT for RTX and OpenVINO compile for long at each start.

The engine process reads the cached kernels and writes what it compiled to a file of its own, which is then added to
the cache. Kernels of another device, driver, version or artifact are refused in the engine: by TensorRT itself, and for
OpenVINO by a digest of all that in front of them.
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

from serving.engine.kinds import ENGINES
from serving.engine.specs import KernelFiles
from serving.models.node_cache import CacheError, add_file, open_entry
from serving.models.verified_dir import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.models.artifact_selection import ServableArtifact

log = logging.getLogger("bertserve")

_FORGOTTEN_S = 86_400.0
"""More than any engine takes from its first kernel to its last."""


class KernelCache:
    """The kernels of a server's models; without a `root` there are none."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._models: Sequence[ServableArtifact] = ()
        self._files: list[KernelFiles] = []

    def files(self, engine: str, models: Sequence[ServableArtifact]) -> list[KernelFiles]:
        """For each model where its kernels are read and written; empty where there are none."""
        self._files, self._models = [], models
        if self._root is not None and ENGINES[engine].compiles:
            self._files = [_files(self._root, model) for model in models]
        return self._files

    def keep(self) -> None:
        """Adds to the cache what the engine has written, in a thread."""
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
            log.warning("the kernels of %s were not kept: %s", model.name, error)
        finally:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)


def _files(root: Path, model: ServableArtifact) -> KernelFiles:
    # Servers of several containers may share a cache, and then process ids are no names.
    write = str(root / f".kernels-{uuid.uuid4().hex}")
    with contextlib.suppress(OSError):  # the engine says what it could not write
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
    try:
        entry = open_entry(root, model.bundle)
    except CacheError as error:
        log.warning("the kernels of %s in the node's cache count for nothing: %s", model.name, error)
        entry = None
    file = entry.file(_file_name(model)) if entry else None
    if entry is None or file is None:
        return KernelFiles(write=write)
    return KernelFiles(read=str(entry.path / file.file), sha256=file.sha256, write=write)


def _sweep(root: Path) -> None:
    """Removes what servers left that were killed before they could add it to the cache."""
    for file in root.glob(".kernels-*"):
        if file.stat().st_mtime < time.time() - _FORGOTTEN_S:
            file.unlink()


def _file_name(model: ServableArtifact) -> str:
    return f"kernels.{re.sub(r'[^A-Za-z0-9]+', '-', model.artifacts[-1].file)}.bin"
