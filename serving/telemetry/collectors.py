"""Prometheus metrics that one thread feeds.

The library's own take a lock and several Python functions for each observation, nine times a request; on a
small machine that was a tenth of all that the server spends on a short text. Everything here happens on the
event loop, scraping included, so an addition is enough, and for a histogram a search before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from serving.telemetry.catalogue import Metric

    Values = Mapping[tuple[str, ...], float]
    """The samples of a metric, each by the values of its labels in their order; without labels, by ()."""


class Total(Collector):
    """A counter.

    Attributes:
        value: Its count; add to it.
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry) -> None:
        """Registers itself.

        Args:
            metric: What it is.
            registry: Where it is scraped.
        """
        self._metric = metric
        self.value: float = 0
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The count."""
        yield CounterMetricFamily(self._metric.name, self._metric.text, value=self.value)


class Tally(Collector):
    """A counter for each value of its only label.

    Attributes:
        counts: The counts; add to them.
    """

    def __init__(self, metric: Metric, registry: CollectorRegistry, counts: dict[str, int] | None = None) -> None:
        """Registers itself.

        Args:
            metric: What it is.
            registry: Where it is scraped.
            counts: Counts that somebody else keeps; None for its own.
        """
        self._metric = metric
        self.counts: dict[str, int] = Counter() if counts is None else counts
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Each count."""
        family = CounterMetricFamily(self._metric.name, self._metric.text, labels=list(self._metric.labels))
        for value, count in self.counts.items():
            family.add_metric([value], count)
        yield family


class Reading(Collector):
    """A counter or gauge that is read when it is scraped."""

    def __init__(self, metric: Metric, registry: CollectorRegistry, read: Callable[[], float | Values]) -> None:
        """Registers itself.

        Args:
            metric: What it is.
            registry: Where it is scraped.
            read: Gives its value, or that of each combination of its labels' values.
        """
        self._metric, self._read = metric, read
        self._family = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}[metric.kind]
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What is read now."""
        found = self._read()
        family = self._family(self._metric.name, self._metric.text, labels=list(self._metric.labels))
        for labels, value in ({(): found} if isinstance(found, int | float) else found).items():
            family.add_metric(labels, value)
        yield family


class Histogram(Collector):
    """Counts values by bucket."""

    def __init__(self, metric: Metric, registry: CollectorRegistry, buckets: Sequence[float]) -> None:
        """Registers itself.

        Args:
            metric: What it is.
            registry: Where it is scraped.
            buckets: Upper bounds, ascending, each inclusive; one without a bound is added.
        """
        self._metric = metric
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> Sequence[int]:
        """What each bucket holds by itself; last, what is beyond them."""
        return tuple(self._counts)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The cumulative counts, as the exposition format wants them."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._metric.name, self._metric.text, buckets=buckets, sum_value=self._sum)
