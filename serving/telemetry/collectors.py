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

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import CollectorRegistry


class Total(Collector):
    """A counter.

    Attributes:
        value: Its count; add to it.
    """

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        """Registers itself.

        Args:
            name: Of the metric, without `_total`.
            text: What it counts.
            registry: Where it is scraped.
        """
        self._name, self._text = name, text
        self.value = 0
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The count."""
        yield CounterMetricFamily(self._name, self._text, value=self.value)


class Tally(Collector):
    """A counter for each value of a label.

    Attributes:
        counts: The counts; add to them.
    """

    def __init__(
        self, name: str, text: str, label: str, registry: CollectorRegistry, counts: dict[str, int] | None = None
    ) -> None:
        """Registers itself.

        Args:
            name: Of the metric, without `_total`.
            text: What it counts.
            label: Name of the label.
            registry: Where it is scraped.
            counts: Counts that somebody else keeps; None for its own.
        """
        self._name, self._text, self._label = name, text, label
        self.counts: dict[str, int] = Counter() if counts is None else counts
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Each count."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in self.counts.items():
            family.add_metric([value], count)
        yield family


class Histogram(Collector):
    """Counts values by bucket."""

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        """Registers itself.

        Args:
            name: Of the metric, its unit included.
            text: What it measures.
            buckets: Upper bounds, ascending, each inclusive; one without a bound is added.
            registry: Where it is scraped.
        """
        self._name, self._text = name, text
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The cumulative counts, as the exposition format wants them."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            self._name, self._text, buckets=list(zip(names, accumulate(self._counts), strict=True)), sum_value=self._sum
        )
