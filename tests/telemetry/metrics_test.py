from __future__ import annotations

from array import array
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bertserve.serving.errors import BertserveError, Overloaded
from bertserve.serving.inference.dispatcher import Dispatcher
from bertserve.serving.inference.requests import Outcome, Timings
from bertserve.serving.lifecycle import State
from bertserve.serving.records import EncodedText, ModelIndex
from bertserve.serving.scheduling.admission import AdmissionLimits, Permit
from bertserve.serving.scheduling.batcher import Assignment, Policy
from bertserve.serving.scheduling.queue import WorkItem
from bertserve.serving.telemetry.metrics import Metrics
from tests.support.costs import constant, model_costs
from tests.support.schedulers import submit
from tests.support.virtual_time import now, virtually

if TYPE_CHECKING:
    from collections.abc import Callable


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels, as a scraper reads them."""
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def outcome(texts: int, *, truncated: int = 0) -> Outcome:
    timings = Timings(tokenize_us=100, queue_us=2000, compute_us=30_000, total_us=400_000)
    return Outcome(np.zeros((texts, 4), np.float32), "m", "1", timings, tokens=7 * texts, truncated_tokens=truncated)


def assignment(texts: int, *, padding: int = 0, predicted_us: float = 100.0) -> Assignment:
    items = [WorkItem(ModelIndex(0), EncodedText(array("i", [1])), 1, None, 0) for _ in range(texts)]
    return Assignment(0, items, texts, 1, padding, 0.0, predicted_us)


def two_answers(metrics: Metrics) -> None:
    metrics.count_outcome(outcome(3, truncated=5), "grpc")
    metrics.count_outcome(outcome(1), "grpc")


def three_batches(metrics: Metrics) -> None:
    for size, padding in ((1, 0), (8, 5), (8, 2)):
        metrics.batch_started(assignment(size, padding=padding))


def ended_batches(metrics: Metrics) -> None:
    """The last one was of an engine that has gone; it has no time."""
    for occupied_us in (900.0, 1300.0, 0.0):
        metrics.batch_ended(assignment(1, predicted_us=1000.0), occupied_us)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            two_answers,
            {
                "requests_total{model=m}{protocol=grpc}{reason=ok}": 2,
                "tokens_total": 28,
                "truncated_tokens_total": 5,
                "tokenize_seconds_sum": 2e-4,
                "queue_seconds_sum": 4e-3,
                "compute_seconds_sum": 6e-2,
                "request_seconds_sum{model=m}{protocol=grpc}": 0.8,
                "request_seconds_count{model=m}{protocol=grpc}": 2,
            },
        ),
        (
            three_batches,
            {
                "batch_size_count": 3,
                "batch_size_sum": 17,
                "batch_size_bucket{le=1.0}": 1,
                "padding_tokens_total": 7,
            },
        ),
        (
            ended_batches,
            {
                "batch_predicted_seconds_total": 2e-3,
                "batch_actual_seconds_total": 2.2e-3,
            },
        ),
        (Metrics.engine_died, {"engine_restarts_total": 1}),
    ],
)
def test_what_is_recorded_is_counted(record: Callable[[Metrics], None], expected: dict[str, float]) -> None:
    """In the metrics of this server alone."""
    metrics, other = Metrics(), Metrics()
    record(metrics)
    found, untouched = samples(metrics), samples(other)
    assert {name: found[f"bertserve_{name}"] for name in expected} == pytest.approx(expected)
    assert not any(untouched.get(f"bertserve_{name}") for name in expected)


def test_the_times_of_batches_are_remembered() -> None:
    metrics = Metrics()
    ended_batches(metrics)
    assert [batch.occupied_us for batch in metrics.recent] == [900.0, 1300.0, 0.0]


def test_buckets_are_narrow_near_two_milliseconds() -> None:
    """A quantile near the target is known within half a millisecond."""
    metrics = Metrics()
    metrics.count_outcome(outcome(1), "http")
    bounds = [
        float(name.partition("le=")[2].partition("}")[0])
        for name in samples(metrics)
        if name.startswith("bertserve_request_seconds_bucket")
    ]
    assert bounds == sorted(bounds)
    edges = [(low, high) for low, high in pairwise(bounds) if low <= 2e-3 < high]
    assert all(high - low < 0.7e-3 for low, high in edges)
    assert bounds[0] == 5e-5
    assert {0.05, 0.1, 0.2, 1.0} <= set(bounds), "objectives are round numbers"
    assert bounds[-2] == 60


def test_refusals_are_counted_by_their_reason() -> None:
    """They have no times: they are quick, and would make the server look fast."""
    metrics = Metrics()
    for reason in ("overloaded", "overloaded", "deadline_exceeded"):
        metrics.refused(reason, "http", "m")
    metrics.refused("overloaded", "grpc", "")
    assert not [name for name in samples(metrics) if name.startswith("bertserve_request_seconds")]
    found = {name: value for name, value in samples(metrics).items() if name.startswith("bertserve_requests") and value}
    assert found == {
        "bertserve_requests_total{model=m}{protocol=http}{reason=overloaded}": 2,
        "bertserve_requests_total{model=m}{protocol=http}{reason=deadline_exceeded}": 1,
        "bertserve_requests_total{model=}{protocol=grpc}{reason=overloaded}": 1,
    }


@pytest.mark.parametrize("state", State)
def test_exactly_one_state_is_shown(state: State) -> None:
    metrics = Metrics()
    metrics.state(State.STARTING)
    metrics.state(state)
    found = {name: value for name, value in samples(metrics).items() if name.startswith("bertserve_state")}
    assert found == {f"bertserve_state{{state={other}}}": float(other is state) for other in State}


def followed() -> tuple[Metrics, Dispatcher]:
    """A dispatcher whose batches take 10 ms, and its metrics."""
    metrics = Metrics()
    dispatcher = Dispatcher(Policy(64, [True], [False]), AdmissionLimits(100), metrics, now)
    metrics.follow(dispatcher)
    dispatcher._scheduler.engine_up(1, [model_costs(constant(10_000))])
    return metrics, dispatcher


@virtually
async def test_the_queue_is_read_when_it_is_scraped() -> None:
    """What waits now, what was refused and which deadlines were missed so far."""
    metrics, dispatcher = followed()
    submit(dispatcher._scheduler, 8, 8, timeout=1.0)
    dispatcher.missed(Permit(dispatcher.admission, ModelIndex(0), 2, 1.0))
    dispatcher._non_finite += 3
    with dispatcher.admission.reserve(60, 0.0), pytest.raises(Overloaded):
        dispatcher.admission.reserve(41, 0.0)
    found = samples(metrics)
    assert found["bertserve_queue_texts"] == 2
    assert found["bertserve_refusals_total{reason=queue_full}"] == 1
    assert found["bertserve_refusals_total{reason=predicted_late}"] == 0
    assert found["bertserve_deadline_misses_total{where=queue}"] == 1
    assert found["bertserve_non_finite_outputs_total"] == 3
    assert found["bertserve_predicted_wait_seconds"] == 2 * 157e-6  # 64 share 10 ms, each rounded up
    assert found["bertserve_admitted_limit_tokens"] == 100


@virtually
async def test_a_restart_of_the_engine_is_no_load() -> None:
    """Autoscalers add replicas by the predicted wait: only work counts there, though admission knows of the restart."""
    metrics, dispatcher = followed()
    dispatcher.engine_restarts(20.0)
    submit(dispatcher._scheduler, 8, 8)
    assert dispatcher.load().wait_s > 20.0
    found = samples(metrics)
    assert 0 < found["bertserve_predicted_wait_seconds"] == pytest.approx(2 * 157e-6)


def test_every_metric_has_the_servers_prefix() -> None:
    """One look at a dashboard's list shows what is ours; processes have the names that every exporter gives them."""
    metrics = Metrics()
    metrics.count_outcome(outcome(1), "http")
    assert all(name.startswith(("bertserve_", "process_")) for name in samples(metrics))


def test_every_reason_of_an_error_is_there_from_the_start() -> None:
    """A counter that is first seen at 1 has no rate: the alert would miss the first error."""
    found = samples(Metrics())
    kinds = [BertserveError, *_below(BertserveError)]
    assert len(kinds) > 20
    names = [f"bertserve_requests_total{{model=}}{{protocol=http}}{{reason={kind.reason}}}" for kind in kinds]
    assert {found[name] for name in names} == {0}


def _below(kind: type[BertserveError]) -> list[type[BertserveError]]:
    children = kind.__subclasses__()
    return [*children, *(found for child in children for found in _below(child))]
