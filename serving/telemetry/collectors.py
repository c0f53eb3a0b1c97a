"""Prometheus metrics that one thread feeds.

The library's own take a lock and several Python functions for each observation, nine times a request; on a
small machine that was a tenth of all that the server spends on a short text. Here the event loop does everything,
scraping included, so an addition is enough, and for a histogram a search before it.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from serving.telemetry.catalogue import Metric

    Values = Mapping[Any, float]
    """The samples of a metric, by the value of its only label, or by those of its labels in their order."""


class Reading(Collector):
    """A counter or gauge that is read when it is scraped.

    `read` returns its value, or a value for each combination of its labels' values (for each value of an only label).
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry, read: Callable[[], float | Values]) -> None:
        self._metric, self._read = metric, read
        self._family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[metric.kind]
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        values = self._read()
        family = self._family(self._metric.name, self._metric.text, labels=list(self._metric.labels))
        for labels, value in ({(): values} if isinstance(values, int | float) else values).items():
            family.add_metric([labels] if isinstance(labels, str) else labels, value)
        yield family


class Histogram(Collector):
    """Counts values by bucket; bounds are ascending and inclusive, and one bucket without a bound is added."""

    def __init__(self, metric: Metric, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        self._metric = metric
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> Sequence[int]:
        """What each bucket holds by itself; last, what is beyond them."""
        return tuple(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._metric.name, self._metric.text, buckets=buckets, sum_value=self._sum)
