"""Verified directories: a manifest lists every other file with its size and SHA-256.

Bundles and cache entries are such directories. Their content is untrusted: only plain files count, no link may lead
out, and unlisted files are refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

MANIFEST_LIMIT_BYTES = 1 << 20

Schema = TypeVar("Schema")


class Entry(Protocol):
    """A file in a manifest: its plain name, and its SHA-256 in hexadecimal."""

    @property
    def file(self) -> str: ...

    @property
    def sha256(self) -> str: ...

    @property
    def size_bytes(self) -> int: ...


class UnverifiedError(Exception):
    """A directory does not match its manifest. The message follows the directory's path and a colon."""


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(path: Path, name: str, decode: Callable[[bytes], Schema]) -> tuple[Schema, str]:
    """Reads the manifest `name` in a directory; returns what `decode` makes of it, and the SHA-256 of its bytes.

    Raises:
        UnverifiedError: It is missing, no plain file, too large, or invalid.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise UnverifiedError("no such directory") from None
    if not stat.S_ISDIR(mode):
        raise UnverifiedError("must be a directory, not a link or a file")
    try:
        status = (path / name).lstat()
    except FileNotFoundError:
        raise UnverifiedError(f"{name} is missing") from None
    _check_plain(name, status)
    if status.st_size > MANIFEST_LIMIT_BYTES:
        raise UnverifiedError(f"{name} has {status.st_size} bytes; the maximum is {MANIFEST_LIMIT_BYTES}")
    content = (path / name).read_bytes()
    try:
        return decode(content), hashlib.sha256(content).hexdigest()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        # The error may quote the file, and ends up on terminals and in logs.
        words = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in str(error))
        raise UnverifiedError(f"{name} is not a valid manifest: {words}") from error


def check(path: Path, name: str, entries: Iterable[Entry]) -> None:
    """Checks that a directory holds the manifest `name`, the files as listed, and no others.

    The listed names must have been checked to be plain.

    Raises:
        UnverifiedError: The directory differs.
    """
    expected = {entry.file: entry for entry in entries}
    present = {entry.name for entry in os.scandir(path)} - {name}
    if missing := sorted(expected.keys() - present):
        raise UnverifiedError(f"{missing[0]} is listed in the manifest but missing")
    if extra := sorted(present - expected.keys()):
        raise UnverifiedError(f"{extra[0]!r} is not listed in the manifest")
    for file, entry in expected.items():
        status = (path / file).lstat()
        _check_plain(file, status)
        if status.st_size != entry.size_bytes:
            raise UnverifiedError(f"{file} has {status.st_size} bytes, but the manifest says {entry.size_bytes}")
        if digest(path / file) != entry.sha256:
            raise UnverifiedError(f"{file} does not match its SHA-256 in the manifest")


def _check_plain(name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UnverifiedError(f"{name} must be a plain file, not a link or a device")
    if status.st_nlink > 1:
        raise UnverifiedError(f"{name} is a hard link to a file elsewhere")


def write(path: Path, name: str, manifest: msgspec.Struct) -> None:
    (path / name).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def versions(directory: Path) -> list[int]:
    """Version numbers below a model's directory, ascending. Other names are ignored."""
    names = [entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and str(int(name)) == name)
