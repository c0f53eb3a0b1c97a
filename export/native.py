"""Engines for the GPU at hand, which go into the node's cache and not into the bundle."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from serving.bundle import BundleError, open_bundle
from serving.cache import CacheError, open_entry

if TYPE_CHECKING:
    from pathlib import Path

TIMINGS = "tensorrt.timings"
"""What TensorRT measured of its kernels on this GPU: the next build takes it from there."""


def recall_timings(cache: Path, before: Path, folder: Path) -> None:
    """Copies what the build of another version measured, where there is such a version.

    Args:
        cache: The node's cache.
        before: The bundle of that version.
        folder: Where to copy it to.
    """
    try:
        entry = open_entry(cache, open_bundle(before))
    except (BundleError, CacheError):  # nothing depends on it but time
        entry = None
    if entry is not None and any(known.file == TIMINGS for known in entry.derived.files):
        shutil.copyfile(entry.path / TIMINGS, folder / TIMINGS)
