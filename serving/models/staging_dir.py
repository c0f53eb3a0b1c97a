"""A directory that is written aside and moved into place when it is whole, and who owns it meanwhile.

Its owner holds the kernel's lock (flock) on it, which ends with the owner however that ends, so that what can be locked
is nobody's any more. A process id in the name would not tell: containers that share a volume count processes each for
itself, and see none of the others'.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

_FORGOTTEN_S = 86_400.0
"""More than any export takes."""

_ATTEMPTS = 10
"""Other processes may come in between as often, each time within the microseconds before the lock."""


class Aside:
    """A hidden directory of its own name.

    Used in a `with` block: leaving it removes what is still there, and the directories above that were made for it
    and are empty. What killed processes left is removed by the next one.

    Attributes:
        path: Where to write.
    """

    def __init__(self, home: Path, prefix: str) -> None:
        """Names the place.

        Args:
            home: Where to make it; need not be there yet.
            prefix: Of its name. Whatever else begins so in `home` is taken for a directory like it.
        """
        self._home = home
        self._prefix = prefix

    def __enter__(self) -> Self:
        """Makes and locks the directory."""
        self._new = [folder for folder in (self._home, *self._home.parents) if not folder.exists()]
        self._sweep()
        self.path, self._handle = self._make()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes what was not moved away."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)
        with contextlib.suppress(OSError):  # another process is at work in it, or has removed it
            for folder in self._new:
                folder.rmdir()

    def _make(self) -> tuple[Path, int]:
        """The directory and the descriptor that locks it."""
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                return self._try()
        return self._try()

    def _try(self) -> tuple[Path, int]:
        """The same.

        Raises:
            FileNotFoundError: Another process removed it, or where it lies, before it was locked.
            BlockingIOError: Another process is at that.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        path = self._home / f"{self._prefix}{uuid.uuid4().hex}"
        path.mkdir()
        handle = _open(path)
        try:
            _lock(handle)
            path.stat()  # from now on nobody removes it, but the lock may have been of what is no more
        except BaseException:
            os.close(handle)
            raise
        return path, handle

    def _sweep(self) -> None:
        with contextlib.suppress(OSError):  # what is wrong with the place is told when something is made in it
            for leftover in self._home.iterdir():
                if leftover.name.startswith(self._prefix):
                    _remove_abandoned(leftover)


def _remove_abandoned(path: Path) -> None:
    """Removes a directory whose owner lives no more."""
    with contextlib.suppress(OSError):  # it is owned, or no directory, or gone meanwhile, or not ours to read
        handle = _open(path)
        try:
            # Where only files are locked, as over NFS, nothing tells whether the owner lives. A leftover costs room on
            # a disk, a directory taken from its owner the work of hours: there only what is old goes.
            if _lock(handle) or os.fstat(handle).st_mtime < time.time() - _FORGOTTEN_S:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


def _open(path: Path) -> int:
    """A directory's descriptor. No program that this process runs inherits it: the lock would live on with that."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(handle: int) -> bool:
    """Locks a directory; whether its file system can do that.

    Raises:
        BlockingIOError: Another process has it locked.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True
