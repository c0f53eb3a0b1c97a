"""Pages. A page is a template beside its benchmark, `<name>.md.j2`, filled with the figures of its store."""

from __future__ import annotations

import functools
import inspect
import re
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.report.sample import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BLOCK = re.compile(
    r"(?P<begin><!-- made: (?P<name>[a-z ]+) -->)\n(?P<made>.*?)\n(?P<end><!-- made until here -->)", re.DOTALL
)
_MARKED = re.compile(r"^(\||- |#|!\[|<!|\s)", re.MULTILINE)


def _fixed(value: object, decimals: int = 1, sign: str = "") -> str:
    """A number with this many decimals; `-` for no value."""
    return "-" if value is None or isinstance(value, jinja2.Undefined) else f"{value:{sign}.{decimals}f}"


def _spread(values: Spread | Iterable[float], decimals: int = 1, sign: str = "") -> str:
    """The median, with minimum and maximum in brackets."""
    return (values if isinstance(values, Spread) else Spread.of(list(values))).text(decimals, sign)


_FILTERS: dict[str, Callable[..., object]] = {
    "fixed": _fixed,
    "spread": _spread,
    "short": "{:g}".format,
    "thousands": "{:,.0f}".format,
    "central": statistics.median,
    "median": lambda values, decimals=1: _fixed(statistics.median(values), decimals),
}


def rendered(kind: type, name: str, **context: Any) -> str:  # noqa: ANN401  whatever a template takes
    """The template of that name beside the module of a class, rendered as Markdown."""
    made = _templates(Path(inspect.getfile(kind)).parent)
    text = re.sub(r"\n{3,}", "\n\n", made.get_template(f"{name}.md.j2").render(context)).strip()
    # A paragraph of prose is one line, however long the inserted values are.
    parts = (part if _MARKED.search(part) else " ".join(part.split()) for part in text.split("\n\n"))
    return "\n\n".join(parts) + "\n"


@functools.cache
def _templates(folder: Path) -> jinja2.Environment:
    loader = jinja2.FileSystemLoader([folder, Path(__file__).parent])
    made = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)  # noqa: S701  no HTML
    made.filters |= _FILTERS
    return made


def filled(text: str, made: str) -> str:
    """A handwritten page, with each generated block between the marks of that name.

    Raises:
        BenchError: A block has no place in the page.
    """
    tables = {match["name"]: match["made"].strip() for match in _BLOCK.finditer(made)}
    places = [match["name"] for match in _BLOCK.finditer(text)]
    if sorted(places) != sorted(tables):
        raise BenchError(f"the page must have a place for each of {', '.join(tables)}, and has {', '.join(places)}")
    return _BLOCK.sub(lambda match: f"{match['begin']}\n\n{tables[match['name']]}\n\n{match['end']}", text)
