"""Sealed directories: a manifest in them lists every other file with its size and SHA-256.

Bundles are sealed, and so is what a node makes of them. What is read here comes from outside: only plain files
count, no link leads out, and nothing may lie there that is not listed. `Staging` makes a sealed directory aside and
moves it into place in one step, so that no half of one is ever visible.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

import msgspec

from serving.models.staging_dir import Aside

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MANIFEST_LIMIT_BYTES = 1 << 20

Schema = TypeVar("Schema", bound=msgspec.Struct)


class Entry(Protocol):
    """What a manifest says of a file."""

    @property
    def file(self) -> str:
        """Its plain name."""

    @property
    def sha256(self) -> str:
        """Of its content, in hexadecimal."""

    @property
    def size_bytes(self) -> int:
        """Its size."""


class SealError(Exception):
    """A directory is not what its manifest says; worded to follow the directory's path and a colon."""


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path, name: str, schema: type[Schema]) -> tuple[Schema, str]:
    """Reads a manifest.

    Args:
        path: The directory.
        name: Of the manifest in it.
        schema: What it must be.

    Returns:
        What it says, and the SHA-256 of its bytes.

    Raises:
        SealError: It is missing, no plain file, too large, or something else.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise SealError("no such directory") from None
    if not stat.S_ISDIR(mode):
        raise SealError("must be a directory, not a link or a file")
    try:
        status = (path / name).lstat()
    except FileNotFoundError:
        raise SealError(f"{name} is missing") from None
    _check_plain(name, status)
    if status.st_size > MANIFEST_LIMIT_BYTES:
        raise SealError(f"{name} has {status.st_size} bytes; {MANIFEST_LIMIT_BYTES} allowed")
    content = (path / name).read_bytes()
    try:
        return msgspec.json.decode(content, type=schema), hashlib.sha256(content).hexdigest()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The words of the error may be the file's own, and they end on terminals and in logs.
        raise SealError(f"{name} is not a manifest: {_printable(str(error))}") from error


def _printable(words: str) -> str:
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in words)


def check(path: Path, name: str, entries: Iterable[Entry]) -> None:
    """Checks that a directory holds its manifest and the files that are listed, as they are listed, and no others.

    Args:
        path: The directory.
        name: Of the manifest in it.
        entries: What the manifest says of the other files; their names must have been found to be plain.

    Raises:
        SealError: It does not.
    """
    expected = {entry.file: entry for entry in entries}
    found = {entry.name for entry in os.scandir(path)} - {name}
    if missing := sorted(expected.keys() - found):
        raise SealError(f"{missing[0]} is listed in the manifest and missing")
    if extra := sorted(found - expected.keys()):
        raise SealError(f"{extra[0]!r} is not listed in the manifest")
    for entry in expected.values():
        _check_file(path / entry.file, entry)


def _check_file(path: Path, entry: Entry) -> None:
    status = path.lstat()
    _check_plain(entry.file, status)
    if status.st_size != entry.size_bytes:
        raise SealError(f"{entry.file} has {status.st_size} bytes, the manifest says {entry.size_bytes}")
    if digest(path) != entry.sha256:
        raise SealError(f"{entry.file} does not match its SHA-256 in the manifest")


def _check_plain(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SealError(f"{name} must be a plain file, not a link or a device")
    if status.st_nlink > 1:
        raise SealError(f"{name} is a hard link to a file elsewhere")


def write(path: Path, name: str, manifest: msgspec.Struct) -> None:
    """Writes a manifest as people can read it."""
    (path / name).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def versions(place: Path) -> list[int]:
    """The version numbers below a model's directory, ascending; other names are left alone."""
    names = [entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name)


_PLAIN_MODE = 0o666
"""Of a directory's permissions those that its files share: nothing in it is run."""


class Staging(Aside):
    """Fills the next version of a directory, aside.

    Used in a `with` block: leaving it without `move` removes everything written.

    Attributes:
        version: The next number below the place.
        path: Where to write.
    """

    def __init__(self, place: Path) -> None:
        super().__init__(place, ".staging-")
        self._place = place

    def __enter__(self) -> Self:
        """Makes the hidden directory."""
        super().__enter__()
        self.version = max(versions(self._place), default=0) + 1
        return self

    def move(self) -> Path:
        """Makes what was written durable and moves it into place, which is returned.

        Libraries that write aside by themselves leave files that only their owner can read. Who serves is often another
        user, so every file gets what the process's umask gives to any.

        Raises:
            FileExistsError: Another process has moved this version into place meanwhile.
        """
        mode = stat.S_IMODE(self.path.stat().st_mode) & _PLAIN_MODE
        for file in self.path.iterdir():
            file.chmod(mode)
            _sync(file)
        _sync(self.path)
        final = self._place / str(self.version)
        try:
            self.path.rename(final)
        except OSError as error:
            if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                raise
            raise FileExistsError(errno.EEXIST, "another process has written this version meanwhile", final) from error
        _sync(self._place)
        return final


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
