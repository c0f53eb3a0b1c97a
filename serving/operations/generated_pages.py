"""Pages made from code: settings and metrics.

`python -m bertserve.serving.operations.generated_pages docs/reference` writes them.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.serving.errors import reasons
from bertserve.serving.settings import GROUPS, bounds_of, default_of, flag_of, is_for_tests, kind_of, words_of
from bertserve.serving.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from bertserve.serving.telemetry.catalogue import Metric

_SETTINGS_HEAD = """# Settings of `bertserve serve`

Generated from `serving/settings.py` by `make docs`. The command line overrides the environment, which overrides the
TOML file of `--config`, which overrides the default. `--max-queue-tokens` is `max_queue_tokens` in the file and
`BERTSERVE_MAX_QUEUE_TOKENS` in the environment. Unknown names and bad values are listed together before any port opens,
with exit code 2. `bertserve serve --help` shows the common options, `--help-all` all of them.

On Kubernetes set `enableServiceLinks: false`: a Service named `bertserve-http` would otherwise put
`BERTSERVE_HTTP_PORT=tcp://...` into the environment. Such values are recognized as addresses and ignored.
"""

_METRICS_HEAD = """# Metrics

Generated from `serving/telemetry/catalogue.py` by `make docs`. `/metrics` on the HTTP port and on the metrics port
returns Prometheus's text format. A counter only grows while the process lives. A histogram has `_bucket`, `_sum` and
`_count`. Names end in their unit. Stage histograms have 0.1 ms buckets from 50 us to 3 ms, then buckets 25% apart up to
60 s. Every request counts once, with the times of its `Server-Timing`.
[Alerts](alerts.md) says what to do when a metric is wrong, [monitoring](../guides/observability.md) how to scrape.
"""

_METRICS_SECTIONS: Sequence[tuple[str, str, Sequence[Metric]]] = (
    (
        "The server",
        "Values of `reason` besides `ok`:\n\n{reasons}\n\nEvery reply with an error counts, whatever was requested.",
        catalogue.SERVER,
    ),
    (
        "Processes",
        "`process_*` leaves out front processes. Those of the engine process are absent while there is none.",
        catalogue.PROCESS,
    ),
)

_CODE = " " * 4


def settings_page() -> str:
    return _SETTINGS_HEAD + "".join(map(_group, GROUPS))


def _group(group: type[BaseModel]) -> str:
    lines = [_setting(name, field) for name, field in group.model_fields.items() if not is_for_tests(name)]
    head = "| option | default | allowed | description |\n|---|---|---|---|\n"
    return f"\n## {group.__name__}\n\n{group.__doc__}\n\n{head}" + "".join(lines)


def _setting(name: str, field: FieldInfo) -> str:
    kind, default = kind_of(field), default_of(field)
    words = ["true", "false"] if kind is bool else words_of(field)
    allowed = ", ".join(f"`{word}`" for word in words) or bounds_of(field)
    text = " ".join((field.description or "").split())
    return f"| `{flag_of(name)}` | {default and f'`{default}`'} | {allowed} | {text} |\n"


def metrics_page() -> str:
    return _METRICS_HEAD + "".join(_section(*section) for section in _METRICS_SECTIONS)


def _section(title: str, text: str, metrics: Sequence[Metric]) -> str:
    reason_names = textwrap.fill(", ".join(reasons()), 120, initial_indent=_CODE, subsequent_indent=_CODE)
    head = "| metric | type | description |\n|---|---|---|\n"
    return f"\n## {title}\n\n{text.format(reasons=reason_names)}\n\n{head}" + "".join(map(_metric, metrics))


def _metric(metric: Metric) -> str:
    labels = "; ".join(f"`{name}`: {values}" if values else f"`{name}`" for name, values in metric.labels.items())
    return f"| `{metric.name}` | {metric.kind} | {metric.text}{labels and f' Labels: {labels}.'} |\n"


def main() -> None:
    docs = Path(sys.argv[1])
    (docs / "settings.md").write_text(settings_page(), encoding="utf-8")
    (docs / "metrics.md").write_text(metrics_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
