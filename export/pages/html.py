"""HTML pages: renders a report's template over the base template and style sheet that all reports share."""

from __future__ import annotations

import re
from pathlib import Path

from export.pages.tables import TONES

_SHARED = Path(__file__).parent
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, bidirectional overrides and surrogates. A page shows a replacement character for each."""


def render(template: Path, **values: object) -> str:
    """Renders a template that extends `base.html`. All text is escaped: labels and quoted texts are untrusted.

    Raises:
        ModuleNotFoundError: Jinja2 is not installed.
    """
    import jinja2  # noqa: PLC0415  installed only where pages are made

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
