"""HTML pages: one template shows every report. A page is one file without network access or scripts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bertserve.export.pages.tables import TONES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.export.pages.tables import Table

    Part: TypeAlias = "str | Mapping[str, object] | Table | Verdict | Tiles | Plots | Listing | Section"
    """A string is a paragraph, left out if it is empty; a dict shows names and values."""

_HERE = Path(__file__).parent
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, bidirectional overrides and surrogates. A page shows a replacement character for each."""


class Code(str):
    """A digest or a command, in a fixed-width font."""

    __slots__ = ()


class Tiles(dict[str, str]):
    """The most important figures, by name."""


class Plots(list[tuple[str, str]]):
    """Plots of `plots.in_page` with their captions; two stand side by side."""


@dataclass(slots=True, frozen=True)
class Verdict:
    """The result, in a box: lines of a leading word, which may be empty, and its sentence. `tone` is as in `TONES`."""

    lines: Sequence[tuple[str, str]]
    tone: str = ""


@dataclass(slots=True, frozen=True)
class Listing:
    """A list, folded under a summary if there is one."""

    lines: Sequence[str]
    summary: str = ""


@dataclass(slots=True, frozen=True)
class Section:
    """A box with a heading, which may be empty; in another section a smaller heading without a box."""

    heading: str
    parts: Sequence[Part]


def render(title: str, parts: Sequence[Part]) -> str:
    """Renders a page. All text is escaped: labels and quoted texts are untrusted.

    Raises:
        ModuleNotFoundError: Jinja2 is not installed.
    """
    import jinja2  # noqa: PLC0415  installed only where pages are made

    def visible(value: object) -> object:
        return value if hasattr(value, "__html__") else _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", str(value))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        finalize=visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(title=title, parts=parts, tones=TONES)
