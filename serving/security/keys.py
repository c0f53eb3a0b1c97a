"""API keys: a file of keys, and the check of requests.

The file has one key per line; blank lines and text after a `#` are ignored. Only digests of the keys are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import TYPE_CHECKING

from bertserve.serving.errors import CredentialsError, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_BYTES = 1 << 20

_KEY = re.compile(rb"[A-Za-z0-9._~+/-]{16,512}=*")
"""The syntax of `Authorization: Bearer` (RFC 6750, 2.1), and too long to guess."""

_REMEMBERED = 256


class ApiKeys:
    def __init__(self, path: Path) -> None:
        """Reads the file; raises CredentialsError if it holds no keys or an invalid line."""
        self.path = path
        self._listeners: list[Callable[[], None]] = []
        self.reload()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Calls the listener after each reload."""
        self._listeners.append(listener)

    def __len__(self) -> int:
        return len(self._digests)

    def reload(self) -> None:
        """Reloads the file. If that raises CredentialsError, the keys stay the same."""
        self._digests = read_keys(self.path)
        self._good: set[bytes] = set()
        for listener in self._listeners:
            listener()

    def allow(self, authorization: bytes | None) -> bool:
        """Whether the value of an `Authorization` header carries one of the keys.

        Accepted values are cached. The lookup leaks no timing: a set compares whole hashes, keyed with a secret of the
        process, before it compares bytes.
        """
        return authorization in self._good or (authorization is not None and self._prove(authorization))

    def _prove(self, authorization: bytes) -> bool:
        """Compares with every key, in a time that depends only on the number of keys."""
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = False
        for valid in self._digests:
            matches |= hmac.compare_digest(valid, digest)
        if not matches or scheme.lower() != b"bearer":
            return False
        if len(self._good) < _REMEMBERED:
            self._good.add(authorization)
        return True


def refusal(authorization: bytes | None) -> Unauthenticated:
    """The error for an `Authorization` header without a valid key."""
    if authorization is None:
        return Unauthenticated("missing API key; send `Authorization: Bearer KEY`")
    return Unauthenticated("invalid API key; send `Authorization: Bearer KEY` with a key of this server")


def read_keys(path: Path) -> list[bytes]:
    """The SHA-256 of each key in a file.

    Raises:
        CredentialsError: The file cannot be read, holds no key, or has an invalid line.
    """
    try:
        with path.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise CredentialsError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise CredentialsError(f"{path}: more than {MAX_BYTES} bytes")
    digests = []
    for number, line in enumerate(data.splitlines(), 1):
        key = line.partition(b"#")[0].strip()
        if key and not _KEY.fullmatch(key):
            raise CredentialsError(f"{path}, line {number}: a key must be 16 to 512 of A-Z a-z 0-9 . _ ~ + / -")
        if key:
            digests.append(hashlib.sha256(key).digest())
    if not digests:
        raise CredentialsError(f"{path}: contains no key")
    return digests
