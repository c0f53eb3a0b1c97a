"""`bertserve doctor`: one screen about this machine, or the same as JSON."""

from __future__ import annotations

import json
import sys
import textwrap
from typing import TYPE_CHECKING

from serving.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.operations.doctor import Finding

_HELP = """usage: bertserve doctor [--json] [options of `bertserve serve`]

Says what this machine can run and what to install for more, and whether `bertserve serve` with the same options,
environment and file would start: 0 if it would, 1 if not, 2 if the options are wrong. Nothing is loaded or changed.

  * could be better    ! would stop `serve`"""

_MARKS = {"ok": " ", "note": "*", "bad": "!"}
_NAME_WIDTH = 16
_WIDTH = 98
_MARGIN = " " * (_NAME_WIDTH + 4)


def main(argv: list[str]) -> int:
    """Prints the report; returns 0, or 1 where something would stop `serve`, or 2 for wrong options."""
    if {"-h", "--help"} & set(argv):
        print(_HELP)
        return 0
    from serving.settings import Settings  # noqa: PLC0415  after what needs none of it

    try:
        settings = Settings.load([word for word in argv if word != "--json"])
    except StartupError as error:
        print(f"bertserve doctor: {error}", file=sys.stderr)
        return error.exit_code
    from serving.operations.doctor import examine  # noqa: PLC0415

    findings = examine(settings)
    print(_json(findings) if "--json" in argv else text(findings))
    return int(any(finding.state == "bad" for finding in findings))


def text(findings: Sequence[Finding]) -> str:
    """The report for a terminal."""
    lines: list[str] = []
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            lines.append(topic)
        first, *rest = textwrap.wrap(finding.value, _WIDTH) or [""]
        lines.append(f" {_MARKS[finding.state]} {finding.name:<{_NAME_WIDTH}} {first}".rstrip())
        lines += [f"{_MARGIN}{more}" for more in [*rest, *([f"-> {finding.advice}"] if finding.advice else [])]]
    wrong = sum(finding.state == "bad" for finding in findings)
    lines.append(f"`bertserve serve` would not start: {wrong} wrong" if wrong else "`bertserve serve` would start")
    return "\n".join(lines)


def _json(findings: Sequence[Finding]) -> str:
    ok = all(finding.state != "bad" for finding in findings)
    return json.dumps({"ok": ok, "findings": [finding._asdict() for finding in findings]}, indent=1)
