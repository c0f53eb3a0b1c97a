"""The metrics count as the library's own do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bertserve.serving.telemetry.catalogue import Metric
from bertserve.serving.telemetry.metrics import Histograms, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUNDS = (0.001, 0.0025, 0.01, 1.0)


def scraped(registry: prometheus_client.CollectorRegistry) -> dict[tuple[str, str], float]:
    text = prometheus_client.generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, "".join(sample.labels.values())): sample.value for sample in samples}


@given(st.lists(st.one_of(st.floats(0, 2), st.sampled_from(BOUNDS)), max_size=50))
def test_it_is_the_librarys_histogram(values: Sequence[float]) -> None:
    """Same names, labels, bounds, cumulative counts and sum, whatever is observed; bounds are inclusive."""
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    mine = Histograms(Metric("x_seconds", "histogram", "A time.", {"model": ""}), ours, BOUNDS)
    library = prometheus_client.Histogram("x_seconds", "A time.", ["model"], buckets=BOUNDS, registry=theirs)
    for value in values:
        model = "slow" if value > 1 else "fast"
        mine.by_labels[model,].observe(value)
        library.labels(model).observe(value)
    assert scraped(ours) == scraped(theirs)


@given(st.dictionaries(st.sampled_from(["ok", "overloaded", 'a "quoted" one']), st.integers(0, 1000)))
def test_a_reading_of_one_label_is_the_librarys_counter(counts: dict[str, int]) -> None:
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    Reading(Metric("x_total", "counter", "Things.", {"reason": ""}), ours, lambda: counts)
    library = prometheus_client.Counter("x", "Things.", ["reason"], registry=theirs)
    for value, count in counts.items():
        library.labels(value).inc(count)
    assert scraped(ours) == scraped(theirs)


@given(st.dictionaries(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), st.floats(-5, 5)))
def test_a_reading_is_the_librarys_gauge(values: dict[tuple[str, str], float]) -> None:
    """Same names, labels and values, read at each scrape."""
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    Reading(Metric("x", "gauge", "Things.", {"one": "", "other": ""}), ours, lambda: values)
    library = prometheus_client.Gauge("x", "Things.", ["one", "other"], registry=theirs)
    for labels, value in values.items():
        library.labels(*labels).set(value)
    assert scraped(ours) == scraped(theirs)


def test_a_reading_may_be_a_counter() -> None:
    counted = {"now": 1.0}
    registry = prometheus_client.CollectorRegistry()
    Reading(Metric("x_total", "counter", "Things."), registry, lambda: counted["now"])
    assert scraped(registry) == {("x_total", ""): 1.0}
    counted["now"] = 2.0
    assert scraped(registry) == {("x_total", ""): 2.0}
