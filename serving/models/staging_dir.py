"""Directories that are filled out of sight and moved into place in one step.

The owner of a staging directory holds the kernel's lock (flock) on it. The lock ends with the owner, however that ends,
so a directory that can be locked is abandoned. A process id would not do: containers that share a volume number their
processes independently.
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

from bertserve.serving.models.verified_dir import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

_FORGOTTEN_S = 86_400.0
"""Longer than any export takes."""

_ATTEMPTS = 10
"""Maximum attempts. Each race with another process takes microseconds."""

_PLAIN_MODE = 0o666
"""The part of a directory's permissions that its files get: none is executable."""

_LOST_RACES = FileNotFoundError, FileExistsError, BlockingIOError
"""Errors of mkdir, open and flock if another process removes the directory meanwhile.

`Path.mkdir(exist_ok=True)` raises FileExistsError if the existing directory is gone when it checks.
"""

T = TypeVar("T")


def attempt(attempt: Callable[[], T], *lost_races: type[OSError]) -> T:
    """Returns the result of an attempt, which is repeated a few times after a lost race with another process."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(*lost_races):
            return attempt()
    return attempt()


class StagingDir:
    """A hidden directory in `home`, named by `prefix` and a random part.

    Leaving its `with` block removes what is still there, and parent directories that were made for it and are empty.
    The next staging directory removes leftovers of killed processes: anything in `home` with that prefix.
    """

    def __init__(self, home: Path, prefix: str, mode: int = 0o777) -> None:
        self._home = home
        self._prefix = prefix
        self._mode = mode

    def __enter__(self) -> Self:
        self._new = [folder for folder in (self._home, *self._home.parents) if not folder.exists()]
        self._sweep()
        self.path, self._handle = attempt(self._make, *_LOST_RACES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)
        with contextlib.suppress(OSError):  # another process uses it or has removed it
            for folder in self._new:
                folder.rmdir()

    def _make(self) -> tuple[Path, int]:
        """Makes the directory; returns its path and the descriptor that locks it.

        Raises:
            OSError: One of `_LOST_RACES`: another process removed it or its home.
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
        with contextlib.suppress(OSError):  # errors of the home are reported when something is made in it
            for leftover in self._home.iterdir():
                if leftover.name.startswith(self._prefix):
                    _remove_abandoned(leftover)


@contextlib.contextmanager
def exclusive(directory: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Lets one process at a time into the block, as far as the file system can lock directories.

    Missing directories are made, and removed again if they are left empty.

    Args:
        directory: The directory that the processes share.
        on_wait: Called before waiting for another process.
    """
    made, handle = attempt(lambda: _take(directory, on_wait), *_LOST_RACES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # another process uses it
            for folder in made:
                folder.rmdir()
        os.close(handle)


def _take(directory: Path, on_wait: Callable[[], None]) -> tuple[list[Path], int]:
    """Locks a directory; returns the directories made for it, innermost first, and the locking descriptor.

    Raises:
        OSError: One of `_LOST_RACES`: another process removed it before it was locked.
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
        raise FileNotFoundError(errno.ENOENT, "another process has removed it", directory)


class StagedVersion(StagingDir):
    """The next version below a directory. Leaving the `with` block without `move` removes everything written."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, ".staging-")

    def __enter__(self) -> Self:
        super().__enter__()
        self.version = max(versions(self._home), default=0) + 1
        return self

    def move(self) -> Path:
        """Syncs the files to disk, moves them into place and returns the new path.

        Some libraries write files that only their owner can read, but the server often runs as another user. So every
        file gets the permissions that the process's umask allows.

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
            raise FileExistsError(errno.EEXIST, "another process has written this version", final) from error
        sync(self._home)
        return final


def _remove_abandoned(path: Path) -> None:
    with contextlib.suppress(OSError):  # owned, no directory, already gone, or not readable
        handle = _open(path)
        try:
            # On file systems that lock only files, such as NFS, the owner may be alive. A leftover costs disk space; a
            # directory taken from its owner costs hours of work. So only old ones are removed there.
            if _lock(handle) or os.fstat(handle).st_mtime < time.time() - _FORGOTTEN_S:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


def _open(path: Path) -> int:
    """Opens a directory. Programs that this process runs do not inherit the descriptor, which would keep the lock."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(handle: int) -> bool:
    """Locks a directory; False if its file system cannot do that.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def sync(path: Path) -> None:
    """Syncs a file, or the entries of a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
