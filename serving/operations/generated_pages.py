"""Pages made from code: `python -m serving.operations.generated_pages docs` writes the settings and the metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.errors import reasons
from serving.settings import ENVIRONMENT_PREFIX, bounds_of, documented, flag_of, kind_of
from serving.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.telemetry.catalogue import Metric

_SETTINGS_HEAD = """# Settings of `bertserve serve`

Made from `serving/settings.py` by `make docs`. A setting comes from its default, then a TOML file given by
`--config`, then the environment, then the command line; the last wins. Unknown names and bad values are
listed together before any port opens, with exit code 2.

On Kubernetes set `enableServiceLinks: false`: a Service named `bertserve-http` would otherwise put
`BERTSERVE_HTTP_PORT=tcp://...` into the environment. Such values are recognised as addresses and ignored.

| option | environment | default | allowed | what it does |
|---|---|---|---|---|
"""

_METRICS_HEAD = """# Metrics

Made from `serving/telemetry/catalogue.py` by `make docs`. `/metrics` on the ports of HTTP and of the probes answers
Prometheus's text format. A counter only grows while the process lives; a histogram has `_bucket`, `_sum` and
`_count`. Times of stages resolve 0.1 ms from 50 us to 3 ms, then a quarter, up to 60 s. Every request is counted
once, with the times that its client sees in `Server-Timing`. [alerts.md](alerts.md) says what to do when one of them
is wrong, [observability.md](observability.md) how they are scraped.
"""

_METRICS_SECTIONS: Sequence[tuple[str, str, Sequence[Metric]]] = (
    (
        "The server",
        "An error's `reason` is one of {reasons}. What is answered with an error counts, whatever was asked.",
        catalogue.SERVER,
    ),
    (
        "Triton's names",
        "The numbers of v2's statistics: answers on any route, failures of v2 alone; durations in microseconds.",
        catalogue.TRITON,
    ),
    (
        "Processes",
        "The server process holds sockets, text and queues, the engine process the models.",
        catalogue.PROCESS,
    ),
    ("GPUs", "Triton's names again. A server that computes on a CPU has none of these.", catalogue.GPU),
)

_UNITS = {"seconds": "seconds", "bytes": "bytes", "tokens": "tokens", "texts": "texts", "us": "microseconds"}


def settings_page() -> str:
    return _SETTINGS_HEAD + "".join(_setting(name, schema) for name, schema in documented().items())


def _setting(name: str, schema: dict[str, Any]) -> str:
    default = schema.get("default")
    shown = "" if default in (None, "") else f"`{default}`".lower() if isinstance(default, bool) else f"`{default}`"
    variable = ENVIRONMENT_PREFIX + name.upper()
    return f"| `{flag_of(name)}` | `{variable}` | {shown} | {_allowed(schema)} | {schema['description']} |\n"


def _allowed(schema: dict[str, Any]) -> str:
    kind = kind_of(schema)
    if "enum" in kind:
        return ", ".join(f"`{word}`" for word in kind["enum"])
    if kind["type"] == "boolean":
        return "`true`, `false`"
    return bounds_of(kind)


def metrics_page() -> str:
    return _METRICS_HEAD + "".join(_section(*section) for section in _METRICS_SECTIONS)


def unit(name: str) -> str:
    """The unit that a metric's name ends in, if it has one.

    >>> unit("bertserve_batch_actual_seconds_total"), unit("bertserve_state")
    ('seconds', '')
    """
    return _UNITS.get(name.removesuffix("_total").rpartition("_")[2], "")


def _section(title: str, text: str, metrics: Sequence[Metric]) -> str:
    reason_names = ", ".join(f"`{reason}`" for reason in reasons())
    head = "| metric | type | unit | labels | what it says |\n|---|---|---|---|---|\n"
    return f"\n## {title}\n\n{text.format(reasons=reason_names)}\n\n{head}" + "".join(map(_metric, metrics))


def _metric(metric: Metric) -> str:
    labels = "; ".join(f"`{name}`: {values}" for name, values in metric.labels.items())
    return f"| `{metric.name}` | {metric.kind} | {unit(metric.name)} | {labels} | {metric.text} |\n"


def main() -> None:
    docs = Path(sys.argv[1])
    (docs / "settings.md").write_text(settings_page(), encoding="utf-8")
    (docs / "metrics.md").write_text(metrics_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
