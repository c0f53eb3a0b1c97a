"""Writes `docs/settings.md` from the settings: `python -m serving.operations.settings_page docs/settings.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from serving.settings import ENVIRONMENT_PREFIX, Settings, flag_of

_HEAD = """# Settings of `bertserve serve`

Made from `serving/settings.py` by `make docs`. A setting comes from its default, then a TOML file given by
`--config`, then the environment, then the command line; the last wins. Unknown names and bad values are
listed together before any port opens, with exit code 2.

On Kubernetes set `enableServiceLinks: false`: a Service named `bertserve-http` would otherwise put
`BERTSERVE_HTTP_PORT=tcp://...` into the environment. Such values are recognised as addresses and ignored.

| option | environment | default | allowed | what it does |
|---|---|---|---|---|
"""


def render() -> str:
    """The page."""
    schema = Settings.model_json_schema()["properties"]
    return _HEAD + "".join(_row(name, schema[name]) for name in Settings.model_fields)


def _row(name: str, schema: dict[str, Any]) -> str:
    default = schema.get("default")
    shown = "" if default in (None, "") else f"`{default}`".lower() if isinstance(default, bool) else f"`{default}`"
    variable = ENVIRONMENT_PREFIX + name.upper()
    return f"| `{flag_of(name)}` | `{variable}` | {shown} | {_allowed(schema)} | {schema['description']} |\n"


def _allowed(schema: dict[str, Any]) -> str:
    choices = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    (kind,) = choices
    if "enum" in kind:
        return ", ".join(f"`{word}`" for word in kind["enum"])
    if kind["type"] == "boolean":
        return "`true`, `false`"
    if "maximum" not in kind:
        return ""
    least = f"{kind['minimum']:,}" if "minimum" in kind else f"above {kind['exclusiveMinimum']:,}"
    return f"{least} to {kind['maximum']:,}"


def main() -> None:
    """Writes the page to the path that is given."""
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
