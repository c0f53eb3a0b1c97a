"""HTML pages: the template of a report, over the base template and the style sheet that all of them share."""

from __future__ import annotations

import re
from pathlib import Path

from export.pages.tables import TONES

_SHARED = Path(__file__).parent
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, overrides of the writing direction and halves of characters: a page shows that they are there."""


def render(template: Path, **values: object) -> str:
    """Fills a template, which extends `base.html`. Every text is escaped: labels and quoted texts are strangers' words.

    Raises:
        ModuleNotFoundError: Jinja2 is not installed.
    """
    import jinja2  # noqa: PLC0415  installed with what makes pages alone

    def visible(value: object) -> object:
        return value if hasattr(value, "__html__") else _INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", str(value))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, _SHARED]),
        autoescape=True,
        finalize=visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["tones"] = TONES
    return environment.get_template(template.name).render(values)
