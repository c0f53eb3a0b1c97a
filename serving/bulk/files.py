"""Durable files, and locks for folders with one owner."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from serving.models.staging_dir import sync

if TYPE_CHECKING:
    from pathlib import Path


def lock(path: Path, flags: int = os.O_RDONLY) -> int:
    """Locks a file or folder until the descriptor is closed; child processes do not inherit it.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    handle = os.open(path, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def move(staged: Path, path: Path) -> None:
    """Moves a written and flushed file into place; the move is durable when this returns."""
    staged.replace(path)
    sync(path.parent)
