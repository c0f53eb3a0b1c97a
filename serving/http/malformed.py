"""Why a body is not JSON, and where: only for bodies that the decoder has rejected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import orjson

from bertserve.serving.errors import MalformedRequest, quoted

if TYPE_CHECKING:
    from collections.abc import Collection

_MAX_COMMAS = 100_000
"""Of a body in which a text is searched for: more take tenths of a second."""


def malformed(data: bytes | memoryview, names: Collection[str]) -> MalformedRequest:
    """The error for a body that is not JSON. A place names only fields with these names."""
    data = bytes(data)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        found = f"0x{data[error.start]:02x} at byte {error.start}"
        return MalformedRequest(f"the body is not valid UTF-8: unexpected {found}")
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError as error:
        at = f"at byte {len(text[: error.pos].encode())}"
        if "surrogate" in error.msg:
            place = _half_of_a_pair(text, names)
            whose = f"the text at `{place}`" if place else "a text"
            return MalformedRequest(f"{whose} has half of a surrogate pair ({at}); cut texts between characters")
        found = f", found {quoted(text[error.pos])}" if error.pos < len(text) else ""
        return MalformedRequest(f"the body is not valid JSON: {error.msg} {at}{found}")
    return MalformedRequest("the body is not valid JSON: nested too deeply")


def _half_of_a_pair(text: str, names: Collection[str]) -> str | None:
    """The place of the first text with half of a surrogate pair, as msgspec writes places; None if it is not found."""
    if text.count(",") > _MAX_COMMAS:
        return None
    try:
        place = _place(json.loads(text), names)  # unlike the other libraries it accepts halves
    except (ValueError, RecursionError):
        return None
    return None if place is None else f"${place}"


def _place(value: object, names: Collection[str]) -> str | None:
    steps = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, below in steps:
        if isinstance(below, str):
            found = None if below.isascii() or _is_whole(below) else ""
        else:
            found = _place(below, names) if isinstance(below, dict | list) else None
        if found is not None:
            return (f"[{step}]" if isinstance(step, int) else f".{step}" if step in names else "[...]") + found
    return None


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
