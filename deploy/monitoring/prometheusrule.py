"""Writes `prometheusrule.yaml`: the rules of `rules.yaml`, comments and all, as the Prometheus operator wants them."""

from __future__ import annotations

import textwrap
from pathlib import Path

_HERE = Path(__file__).parent
_HEAD = """\
# Made from rules.yaml by `make docs`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: bertserve
  labels:
    app.kubernetes.io/name: bertserve
spec:
"""


def rendered() -> str:
    """The whole file."""
    return _HEAD + textwrap.indent((_HERE / "rules.yaml").read_text(encoding="utf-8"), "  ")


if __name__ == "__main__":
    (_HERE / "prometheusrule.yaml").write_text(rendered(), encoding="utf-8")
