"""Metrics under Triton's names (docs/user_guide/metrics.md of Triton), for its dashboards and autoscalers.

Triton's counters end without `_total`, which the client library cannot write, so these few lines are written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.telemetry import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from serving.inference.served_models import Repository
    from serving.models.statistics import Duration, ModelStatistics
    from serving.records import ModelIndex
    from serving.telemetry.catalogue import Metric

_NS_PER_US = 1000

_COUNTS: Sequence[tuple[Metric, Callable[[ModelStatistics], int]]] = (
    (catalogue.TRITON_SUCCESS, lambda model: model.inference_stats.success.count),
    (catalogue.TRITON_FAILURE, lambda model: model.inference_stats.fail.count),
    (catalogue.TRITON_COUNT, lambda model: model.inference_count),
    (catalogue.TRITON_EXECUTIONS, lambda model: model.execution_count),
    (catalogue.TRITON_REQUEST, lambda model: _us(model.inference_stats.success)),
    (catalogue.TRITON_QUEUE, lambda model: _us(model.inference_stats.queue)),
    (catalogue.TRITON_INPUT, lambda model: _us(model.inference_stats.compute_input)),
    (catalogue.TRITON_INFER, lambda model: _us(model.inference_stats.compute_infer)),
    (catalogue.TRITON_OUTPUT, lambda model: _us(model.inference_stats.compute_output)),
)


def exposition(
    repository: Repository, statistics: Sequence[ModelStatistics], waiting: Mapping[ModelIndex, int]
) -> bytes:
    """The metrics of each model, as text; arguments as for `Metrics.follow_models`."""
    parts: list[str] = []
    for metric, value in _COUNTS:
        parts += _family(metric, [(model.name, model.version, value(model)) for model in statistics])
    pending = [(model.name, model.version, waiting.get(model.index, 0)) for model in repository.models]
    parts += _family(catalogue.TRITON_PENDING, pending)
    return "".join(parts).encode()


def _family(metric: Metric, samples: Sequence[tuple[str, str, int]]) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.text}\n# TYPE {metric.name} {metric.kind}\n"
    for model, version, value in samples:  # the names of models hold nothing that would have to be escaped
        yield f'{metric.name}{{model="{model}",version="{version}"}} {value}\n'


def _us(duration: Duration) -> int:
    return duration.ns // _NS_PER_US
