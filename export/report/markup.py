"""HTML and SVG by construction: every text is escaped, since labels and quoted texts are strangers' words."""

from __future__ import annotations

import re
from html import escape

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, overrides of the writing direction and halves of characters: a page shows that they are there."""

_EMPTY = frozenset({"meta"})
"""Elements that have no end tag."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(words: str) -> Markup:
    """Text as HTML."""
    return Markup(escape(_INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", words)))


def join(*parts: str | None) -> Markup:
    """Parts one after another; what is not `Markup` is text, None is nothing."""
    return Markup("".join(part if isinstance(part, Markup) else text(part) for part in parts if part is not None))


def element(name: str, /, *children: str | None, **attributes: str | float | None) -> Markup:
    """An element.

    Args:
        name: Its tag.
        *children: What it holds: `Markup`, or text to be escaped; None is nothing.
        **attributes: By name, `_` for `-` and at the end where Python has the word to itself; None leaves one out.
    """
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{named}>" if name in _EMPTY else f"<{name}{named}>{join(*children)}</{name}>")
