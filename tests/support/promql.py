"""What PromQL expressions ask for."""

from __future__ import annotations

import re

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LABELS = re.compile(r"\{[^}]*\}")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAME = re.compile(r"\b[a-zA-Z_:][a-zA-Z0-9_:]*\b(?!\s*\()")
_RANGE = re.compile(r"\[[^\]]*\]")
_WORDS = {"or", "and", "unless", "offset", "bool"}


def names(expression: str) -> set[str]:
    bare = expression
    for pattern in (_STRING, _LABELS, _GROUPING, _RANGE):
        bare = pattern.sub(" ", bare)
    return set(_NAME.findall(bare)) - _WORDS


def plain(expression: str) -> str:
    """An expression of a dashboard with Grafana's variables filled in."""
    expression = expression.replace("$__rate_interval", "10s").replace("$__range", "1h")
    return re.sub(r"\$(job|instance|model)\b", ".*", expression)
