"""Origins of pages that may call from a browser (CORS)."""

from __future__ import annotations

import re

_HTTP = re.compile(r"https?://((\*\.)?[a-z0-9._-]+|\[[0-9a-f:.]+\])(:([0-9]{1,5}|\*))?")
_OTHER = re.compile(r"(?!https?:)[a-z][a-z0-9+.-]*://(\*|[\w.~%-]*(:[0-9]{1,5})?)", re.ASCII)
_ANY, _NULL = "*", "null"

_PARTS = {"*.": rb"[a-z0-9_-]+\.", ":*": rb"(:[0-9]+)?", "*": rb"[^/]*"}
"""What the wildcards of an origin match: one label, any port, all of a scheme."""


class Origins:
    """The allowed origins.

    Attributes:
        any: Whether all are allowed.
    """

    def __init__(self, listed: str) -> None:
        """Takes a list with commas that `check_origins` accepts."""
        names = listed.split(",") if listed else []
        self.any = names == [_ANY]
        self._exact = frozenset(name.encode() for name in names)
        wild = [_pattern(name) for name in names if _ANY in name and not self.any]
        self._wild = re.compile(b"|".join(wild)) if wild else None

    def __bool__(self) -> bool:
        return bool(self._exact)

    def allow(self, origin: bytes) -> bool:
        """Whether pages of an origin are allowed, by the header that a browser sends (RFC 6454, 6.2)."""
        if self.any or origin in self._exact:
            return True
        return self._wild is not None and self._wild.fullmatch(origin) is not None


def check_origins(listed: str) -> str:
    """Returns a list of origins; raises ValueError with the first that is none."""
    for name in listed.split(",") if listed not in {"", _ANY} else ():
        if name != _NULL and not _HTTP.fullmatch(name) and not _OTHER.fullmatch(name):
            raise ValueError(
                f"`{name}` is not an origin: must be `*` alone, or a list such as https://app.example,"
                "http://localhost:3000,app://obsidian.md,null, with wildcards such as https://*.app.example,"
                "http://localhost:*,vscode-webview://*"
            )
    return listed


def _pattern(name: str) -> bytes:
    parts = re.split(r"(\*\.|:\*|\*)", name)
    return b"".join(_PARTS.get(part, re.escape(part.encode())) for part in parts)
