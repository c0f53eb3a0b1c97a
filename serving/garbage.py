"""The garbage collector of a process that answers requests: these create no reference cycles, so it runs rarely."""

from __future__ import annotations

import gc

_THRESHOLDS = (100_000, 50, 100)


def collect_rarely() -> None:
    """Called before imports: their objects stay alive."""
    gc.set_threshold(*_THRESHOLDS)


def freeze() -> None:
    """Freezes the objects of a warm process, so that the garbage collector scans only new ones."""
    gc.collect()
    gc.freeze()
