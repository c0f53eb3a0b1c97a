from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.errors import BertserveError, Overloaded
from serving.inference.dispatcher import Dispatcher
from serving.lifecycle import State
from serving.records import EncodedText, ModelIndex, Outcome, Timings
from serving.scheduling.admission import AdmissionLimits, Permit
from serving.scheduling.batcher import Assignment, Policy
from serving.scheduling.queue import WorkItem
from serving.telemetry.metrics import Metrics
from tests.support.costs import constant, model_costs
from tests.support.virtual_time import now, virtually


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and labels, as a scraper reads them."""
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def outcome(texts: int, *, truncated: int = 0) -> Outcome:
    """An answer to so many texts, with a time of its own for each stage."""
    timings = Timings(tokenize_us=100, queue_us=2000, compute_us=30_000, total_us=400_000)
    return Outcome(np.zeros((texts, 4), np.float32), "m", "1", timings, tokens=7 * texts, truncated_tokens=truncated)


def assignment(texts: int, *, padding: int = 0, predicted_us: float = 100.0) -> Assignment:
    """A batch of so many texts."""
    items = [WorkItem(ModelIndex(0), EncodedText(array("i", [1])), 1, None, 0) for _ in range(texts)]
    return Assignment(0, items, texts, 1, padding, 0.0, predicted_us)


def test_an_answered_request_is_recorded_once() -> None:
    """Its outcome, its texts and its tokens are counted."""
    metrics = Metrics()
    metrics.answered(outcome(3, truncated=5), "grpc")
    metrics.answered(outcome(1), "grpc")
    found = samples(metrics)
    assert found["bertserve_requests_total{model=m}{protocol=grpc}{reason=ok}"] == 2
    assert found["bertserve_texts_total"] == 4
    assert found["bertserve_tokens_total"] == 28
    assert found["bertserve_truncated_tokens_total"] == 5


@pytest.mark.parametrize(
    ("stage", "seconds"), [("tokenize", 1e-4), ("queue", 2e-3), ("compute", 3e-2), ("request", 0.4)]
)
def test_each_stage_has_its_own_time_in_seconds(stage: str, seconds: float) -> None:
    """The timings that the client sees, each in its own histogram."""
    metrics = Metrics()
    metrics.answered(outcome(1), "http")
    found = samples(metrics)
    labels = "{model=m}{protocol=http}" if stage == "request" else ""
    assert found[f"bertserve_{stage}_seconds_sum{labels}"] == pytest.approx(seconds)
    assert found[f"bertserve_{stage}_seconds_count{labels}"] == 1


def test_buckets_are_narrow_near_two_milliseconds() -> None:
    """A quantile near the target is known within half a millisecond."""
    metrics = Metrics()
    metrics.answered(outcome(1), "http")
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
    """One line for each."""
    metrics = Metrics()
    for reason in ("overloaded", "overloaded", "deadline_exceeded"):
        metrics.refused(reason, "http", "m")
    metrics.refused("overloaded", "grpc", "")
    found = {name: value for name, value in samples(metrics).items() if name.startswith("bertserve_requests") and value}
    assert found == {
        "bertserve_requests_total{model=m}{protocol=http}{reason=overloaded}": 2,
        "bertserve_requests_total{model=m}{protocol=http}{reason=deadline_exceeded}": 1,
        "bertserve_requests_total{model=}{protocol=grpc}{reason=overloaded}": 1,
    }


def test_a_refused_request_has_no_times() -> None:
    """Refusals are quick and would make the server look fast."""
    metrics = Metrics()
    metrics.refused("overloaded", "http", "m")
    assert not [name for name in samples(metrics) if name.startswith("bertserve_request_seconds")]


def test_batches_are_counted_by_size() -> None:
    """Each with the number of its texts."""
    metrics = Metrics()
    for size in (1, 8, 8):
        metrics.batch_started(assignment(size))
    found = samples(metrics)
    assert found["bertserve_batch_size_count"] == 3
    assert found["bertserve_batch_size_sum"] == 17
    assert found["bertserve_batch_size_bucket{le=1.0}"] == 1
    assert found["bertserve_text_tokens_count"] == 17


@pytest.mark.parametrize("state", State)
def test_exactly_one_state_is_shown(state: State) -> None:
    """The last one that was told."""
    metrics = Metrics()
    metrics.state(State.STARTING)
    metrics.state(state)
    found = {name: value for name, value in samples(metrics).items() if name.startswith("bertserve_state")}
    assert found == {f"bertserve_state{{state={other}}}": float(other is state) for other in State}


def test_deaths_of_the_engine_are_counted() -> None:
    """So that somebody notices."""
    metrics = Metrics()
    metrics.engine_died()
    assert samples(metrics)["bertserve_engine_restarts_total"] == 1


def test_padding_is_counted_beside_the_tokens() -> None:
    """So that its share can be seen."""
    metrics = Metrics()
    metrics.batch_started(assignment(4, padding=5))
    metrics.batch_started(assignment(4, padding=2))
    assert samples(metrics)["bertserve_padding_tokens_total"] == 7


def test_predictions_are_shown_beside_what_was() -> None:
    """Each batch's ratio, and both sums; a batch of an engine that has gone has no time."""
    metrics = Metrics()
    for occupied_us in (900.0, 1300.0, 0.0):
        metrics.batch_ended(assignment(1, predicted_us=1000.0), occupied_us)
    found = samples(metrics)
    assert found["bertserve_batch_cost_ratio_count"] == 2
    assert found["bertserve_batch_cost_ratio_bucket{le=1.0}"] == 1
    assert found["bertserve_batch_predicted_seconds_total"] == pytest.approx(2e-3)
    assert found["bertserve_batch_actual_seconds_total"] == pytest.approx(2.2e-3)
    assert [batch.occupied_us for batch in metrics.recent] == [900.0, 1300.0, 0.0]


@virtually
async def test_the_queue_is_read_when_it_is_scraped() -> None:
    """What waits now, what was refused and which deadlines were missed so far."""
    metrics = Metrics()
    dispatcher = Dispatcher(Policy(64, [True], [False]), AdmissionLimits(100), metrics, now)
    metrics.follow(dispatcher)
    scheduler = dispatcher._scheduler
    scheduler.engine_up(1, [model_costs(constant(10_000))])
    items = [WorkItem(ModelIndex(0), EncodedText(array("i", range(8))), 8, None, 0) for _ in range(2)]
    with Permit(scheduler.admission, ModelIndex(0), 2, 1.0) as permit:
        permit.confirm([8, 8], 0.0)
        scheduler.submit(items, permit, 0.0)
    dispatcher.missed(Permit(dispatcher.admission, ModelIndex(0), 2, 1.0))
    dispatcher._non_finite += 3
    with dispatcher.admission.reserve(60, 0.0), pytest.raises(Overloaded):
        dispatcher.admission.reserve(41, 0.0)
    found = samples(metrics)
    assert found["bertserve_queue_texts"] == 2
    assert found["bertserve_queue_tokens"] == 16
    assert found["bertserve_queue_work_seconds"] == 2 * 157e-6  # 64 share 10 ms, each rounded up
    assert found["bertserve_refusals_total{reason=queue_full}"] == 1
    assert found["bertserve_refusals_total{reason=predicted_late}"] == 0
    assert found["bertserve_deadline_misses_total{where=queue}"] == 1
    assert found["bertserve_non_finite_outputs_total"] == 3
    assert found["bertserve_predicted_wait_seconds"] == found["bertserve_queue_work_seconds"]
    assert found["bertserve_admitted_limit_tokens"] == 100


@virtually
async def test_a_restart_of_the_engine_is_no_load() -> None:
    """Autoscalers add replicas by the predicted wait: only work counts there, though admission knows of the restart."""
    metrics = Metrics()
    dispatcher = Dispatcher(Policy(64, [True], [False]), AdmissionLimits(100), metrics, now)
    metrics.follow(dispatcher)
    dispatcher._scheduler.engine_up(1, [model_costs(constant(10_000))])
    dispatcher.engine_restarts(20.0)
    items = [WorkItem(ModelIndex(0), EncodedText(array("i", range(8))), 8, None, 0) for _ in range(2)]
    with Permit(dispatcher.admission, ModelIndex(0), 2, now() + 60.0) as permit:
        permit.confirm([8, 8], now())
        dispatcher._scheduler.submit(items, permit, now())
        assert dispatcher.load().wait_s > 20.0
        found = samples(metrics)
    assert 0 < found["bertserve_predicted_wait_seconds"] == pytest.approx(found["bertserve_queue_work_seconds"])


def test_registries_are_independent() -> None:
    """Two servers in one process do not count each other's requests."""
    first, second = Metrics(), Metrics()
    first.refused("overloaded", "http", "")
    assert samples(second)["bertserve_requests_total{model=}{protocol=http}{reason=overloaded}"] == 0


def test_every_metric_has_the_servers_prefix() -> None:
    """One look at a dashboard's list shows what is ours; processes have the names that every exporter gives them."""
    metrics = Metrics()
    metrics.answered(outcome(1), "http")
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
