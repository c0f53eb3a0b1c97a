"""Directories that are filled out of sight and moved into place when they are whole.

The owner of a staging directory holds the kernel's lock (flock) on it, which ends with the owner however that ends: a
directory that can be locked is abandoned. A process id would not do: containers that share a volume number their
processes each for itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from typing import TYPE_CHECKING, Self, TypeVar

from serving.models.verified_dir import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

_FORGOTTEN_S = 86_400.0
"""More than any export takes."""

_ATTEMPTS = 10
"""How often other processes may come in between, each time within microseconds."""

_PLAIN_MODE = 0o666
"""The part of a directory's permissions that its files get: nothing in it is run."""

_LOST_RACES = FileNotFoundError, FileExistsError, BlockingIOError
"""What another process that removes the directory meanwhile makes of mkdir, of opening it, and of locking it.

`Path.mkdir(exist_ok=True)` raises FileExistsError where the directory that was in its way is gone when it looks.
"""

T = TypeVar("T")


def attempted(attempt: Callable[[], T], *lost_races: type[OSError]) -> T:
    """What an attempt returns; it is repeated a few times where another process came in between."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(*lost_races):
            return attempt()
    return attempt()


class StagingDir:
    """A hidden directory in `home`, named by `prefix` and a random part.

    Used in a `with` block: leaving it removes what is still there, and the directories above that were made for it
    and are empty. What killed processes left is removed by the next one: anything in `home` with that prefix.
    """

    def __init__(self, home: Path, prefix: str, mode: int = 0o777) -> None:
        self._home = home
        self._prefix = prefix
        self._mode = mode

    def __enter__(self) -> Self:
        self._new = [folder for folder in (self._home, *self._home.parents) if not folder.exists()]
        self._sweep()
        self.path, self._handle = attempted(self._make, *_LOST_RACES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)
        with contextlib.suppress(OSError):  # another process is at work in it, or has removed it
            for folder in self._new:
                folder.rmdir()

    def _make(self) -> tuple[Path, int]:
        """The directory and the descriptor that locks it.

        Raises:
            OSError: One of `_LOST_RACES`, where another process removes it, or its home.
        """
        self._home.mkdir(parents=True, exist_ok=True)
        path = self._home / f"{self._prefix}{secrets.token_hex(8)}"
        path.mkdir(self._mode)
        handle = _open(path)
        try:
            _lock(handle)
            path.stat()  # from now on nobody removes it, but it may have been removed before it was locked
        except BaseException:
            os.close(handle)
            raise
        return path, handle

    def _sweep(self) -> None:
        with contextlib.suppress(OSError):  # what is wrong with the home is reported when something is made in it
            for leftover in self._home.iterdir():
                if leftover.name.startswith(self._prefix):
                    _remove_abandoned(leftover)


@contextlib.contextmanager
def exclusive(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Lets one process at a time into the block, as far as the file system can lock directories.

    The directory is made where it is not there; what was made and is left empty is removed.

    Args:
        directory: What the processes share.
        on_wait: Called before waiting for another process.
    """
    made, handle = attempted(lambda: _take(directory, on_wait), *_LOST_RACES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # another process is at work in it
            for folder in made:
                folder.rmdir()
        os.close(handle)


def _take(directory: Path, on_wait: Callable[[], None]) -> tuple[list[Path], int]:
    """The directories that had to be made, innermost first, and the descriptor that locks the directory.

    Raises:
        OSError: One of `_LOST_RACES`, where another process removes it before it is locked.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    handle = _open(directory)
    try:
        try:
            _lock(handle)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        _check_there(directory, handle)
    except BaseException:
        os.close(handle)
        raise
    return made, handle


def _check_there(directory: Path, handle: int) -> None:
    if not os.path.samestat(directory.stat(), os.fstat(handle)):
        raise FileNotFoundError(errno.ENOENT, "another process has removed it meanwhile", directory)


class StagedVersion(StagingDir):
    """The next version below a directory; leaving the `with` block without `move` removes everything written."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ".staging-")

    def __enter__(self) -> Self:
        super().__enter__()
        self.version = max(versions(self._home), default=0) + 1
        return self

    def move(self) -> Path:
        """Makes what was written durable and moves it into place, which is returned.

        Some libraries leave files that only their owner can read. The server often runs as another user, so every file
        gets what the process's umask gives to any.

        Raises:
            FileExistsError: Another process has moved this version into place meanwhile.
        """
        mode = stat.S_IMODE(self.path.stat().st_mode) & _PLAIN_MODE
        for file in self.path.iterdir():
            file.chmod(mode)
            sync(file)
        sync(self.path)
        final = self._home / str(self.version)
        try:
            self.path.rename(final)
        except OSError as error:
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                raise
            raise FileExistsError(errno.EEXIST, "another process has written this version meanwhile", final) from error
        sync(self._home)
        return final


def _remove_abandoned(path: Path) -> None:
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
    """Locks a directory; False where its file system cannot do that.

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


def sync(path: Path) -> None:
    """Has the system write a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
