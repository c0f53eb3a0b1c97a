"""Durable files, and what one process at a time works in: what both stores need of the disk."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

from serving.models.staging_dir import sync

if TYPE_CHECKING:
    from pathlib import Path


def lock(path: Path, flags: int = os.O_RDONLY) -> int:
    """Locks a file or folder; the lock ends when the descriptor is closed, which no child process inherits.

    Raises:
        BlockingIOError: Another process has it locked.
    """
    handle = os.open(path, flags, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Writes all of it: a write takes less than it is given where the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def move(staged: Path, path: Path) -> None:
    """Moves a file that is written and flushed to its place; it is there durably when this returns."""
    staged.replace(path)
    sync(path.parent)
