"""Writes `docs/metrics.md` from the catalogue: `python -m serving.operations.metrics_page docs/metrics.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from serving.errors import reasons
from serving.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.telemetry.catalogue import Metric

_HEAD = """# Metrics

Made from `serving/telemetry/catalogue.py` by `make docs`. `/metrics` on the ports of HTTP and of the probes answers
Prometheus's text format. A counter only grows while the process lives; a histogram has `_bucket`, `_sum` and
`_count`. Times of stages resolve 0.1 ms from 50 us to 3 ms, then a quarter, up to 60 s. Every request is counted
once, with the times that its client sees in `Server-Timing`. [alerts.md](alerts.md) says what to do when one of them
is wrong, [observability.md](observability.md) how they are scraped.
"""

_SECTIONS: Sequence[tuple[str, str, Sequence[Metric]]] = (
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


def render() -> str:
    """The page."""
    return _HEAD + "".join(_section(*section) for section in _SECTIONS)


def unit(name: str) -> str:
    """The unit that a metric's name ends in; empty where it counts or tells.

    >>> unit("bertserve_batch_actual_seconds_total"), unit("bertserve_state")
    ('seconds', '')
    """
    return _UNITS.get(name.removesuffix("_total").rpartition("_")[2], "")


def _section(title: str, text: str, metrics: Sequence[Metric]) -> str:
    known = ", ".join(f"`{reason}`" for reason in reasons())
    head = "| metric | type | unit | labels | what it says |\n|---|---|---|---|---|\n"
    return f"\n## {title}\n\n{text.format(reasons=known)}\n\n{head}" + "".join(map(_row, metrics))


def _row(metric: Metric) -> str:
    labels = "; ".join(f"`{name}`: {values}" for name, values in metric.labels.items())
    return f"| `{metric.name}` | {metric.kind} | {unit(metric.name)} | {labels} | {metric.text} |\n"


def main() -> None:
    """Writes the page to the path that is given."""
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
