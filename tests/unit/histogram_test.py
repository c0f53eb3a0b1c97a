"""The histogram counts as the library's own does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serving.telemetry.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence

BOUNDS = (0.001, 0.0025, 0.01, 1.0)


def scraped(registry: prometheus_client.CollectorRegistry) -> dict[tuple[str, str], float]:
    """Every sample by name and bound."""
    text = prometheus_client.generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, sample.labels.get("le", "")): sample.value for sample in samples}


@given(st.lists(st.one_of(st.floats(0, 2), st.sampled_from(BOUNDS)), max_size=50))
def test_it_is_the_librarys_histogram(values: Sequence[float]) -> None:
    """Same names, bounds, cumulative counts and sum, whatever is observed; bounds are inclusive."""
    ours, theirs = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    mine = Histogram("x_seconds", "A time.", BOUNDS, ours)
    library = prometheus_client.Histogram("x_seconds", "A time.", buckets=BOUNDS, registry=theirs)
    for value in values:
        mine.observe(value)
        library.observe(value)
    assert scraped(ours) == scraped(theirs)
