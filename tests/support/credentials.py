"""API keys for tests, and a server that asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND, THIRD = (f"{word}-key-of-the-tests/0123456789" for word in ("first", "second", "third"))
WRONG = "wrong" + FIRST[5:]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, *keys: str) -> Path:
    """A file of keys, put in the place of the one before in one move."""
    aside = path.with_suffix(".new")
    aside.write_text("# those of the tests\n\n" + "".join(f"{key}  # one of them\n" for key in keys), encoding="utf-8")
    return aside.replace(path)
