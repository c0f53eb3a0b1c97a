"""Compiled kernels in the node's cache: what TensorRT for RTX compiles for a card takes its time at every start.

The engine process reads what is kept and writes what it compiled beside it; here that becomes an entry of the cache,
under the cache's own rules. The library itself refuses kernels of another card, driver or version.
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

from serving.engine.base import KernelFiles
from serving.models.cost_cache import bundle_of
from serving.models.node_cache import CacheError, CacheWriter, open_entry
from serving.models.verified_dir import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.models.repository import ServedModel

log = logging.getLogger("bertserve")

_FORGOTTEN_S = 86_400.0
"""More than any engine takes from its first kernel to its last."""


class KernelCache:
    """The kernels of a server's models; nothing where it has no cache."""

    def __init__(self, root: Path | None) -> None:
        """Names the place.

        Args:
            root: The node's cache.
        """
        self._root = root
        self._models: Sequence[ServedModel] = ()
        self._files: list[KernelFiles] = []

    def files(self, engine: str, models: Sequence[ServedModel]) -> list[KernelFiles]:
        """For each model where its kernels are read and written; empty where there are none."""
        self._files, self._models = [], models
        if self._root is not None and engine == "tensorrt":
            self._files = [self._of(self._root, model) for model in models]
        return self._files

    def keep(self) -> None:
        """Takes into the cache what the engine has written, beside the event loop."""
        if self._root is not None and self._files:
            threading.Thread(target=self._keep, args=(self._root, self._models, self._files)).start()
            self._files = []

    def _keep(self, root: Path, models: Sequence[ServedModel], files: Sequence[KernelFiles]) -> None:
        for model, file in zip(models, files, strict=True):
            written = Path(file.write)
            try:
                if written.exists() and digest(written) != file.sha256:
                    with CacheWriter(root, model.manifest.model, model.manifest.version) as writer:
                        (writer.path / _name(model)).write_bytes(written.read_bytes())
                        writer.publish(bundle_of(model), files=[_name(model)])
                written.unlink(missing_ok=True)
            except (CacheError, OSError) as error:
                log.warning("the kernels of %s were not kept: %s", model.name, error)

    def _of(self, root: Path, model: ServedModel) -> KernelFiles:
        # Servers of several containers may share a cache, and then process ids are no names.
        write = str(root / f".kernels-{uuid.uuid4().hex}")
        with contextlib.suppress(OSError):  # the engine says what it could not write
            root.mkdir(parents=True, exist_ok=True)
            _sweep(root)
        try:
            entry = open_entry(root, bundle_of(model))
        except CacheError as error:
            log.warning("the kernels of %s in the node's cache count for nothing: %s", model.name, error)
            entry = None
        known = [file for file in entry.derived.files if file.file == _name(model)] if entry else []
        if entry is None or not known:
            return KernelFiles(write=write)
        return KernelFiles(read=str(entry.path / known[0].file), sha256=known[0].sha256, write=write)


def _sweep(root: Path) -> None:
    """Removes what servers wrote that were killed before they could take it into the cache."""
    for file in root.glob(".kernels-*"):
        if file.stat().st_mtime < time.time() - _FORGOTTEN_S:
            file.unlink()


def _name(model: ServedModel) -> str:
    return f"kernels.{re.sub(r'[^A-Za-z0-9]+', '-', model.artifact.file)}.bin"
