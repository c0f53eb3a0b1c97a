"""What the page of queries beside a bulk job says of its measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from loadtest.benchmarks.bulk_beside_online import ALONE, BESIDE, BULK_ALONE, BulkBesideOnlineBenchmark, BulkJob
from loadtest.benchmarks.drive import Workload
from loadtest.benchmarks.runner import parser
from loadtest.benchmarks.store import Store
from loadtest.generator.run import Kind
from tests.support.clients import metric
from tests.support.server import ONE_AT_A_TIME, Server
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path


def queries(p99_ms: float, **more: float) -> dict[str, Any]:
    return {
        "p50_ms": 10.0,
        "p99_ms": p99_ms,
        "offered_per_s": 50.0,
        "good_per_s": 50.0,
        "refused_per_s": 0.0,
        "missed_per_s": 0.0,
        "failed_otherwise": 0.0,
        "bulk_failed": 0.0,
        **more,
    }


def page_of(tmp_path: Path, p99_ms: float, bulk_per_s: float, share: float) -> str:
    """The page of two rounds with these figures beside queries of 100 ms and a bulk job of 100 texts a second."""
    steps: dict[str, Any] = {"capacity": {"capacity_per_s": 100.0}}
    for number in (1, 2):
        steps[f"turn {number} {ALONE}"] = queries(100.0)
        steps[f"turn {number} {BESIDE}"] = queries(p99_ms, bulk_per_s=bulk_per_s, bulk_share=0.5)
        steps[f"turn {number} {BULK_ALONE}"] = {"bulk_per_s": 100.0, "bulk_failed": 0.0}
    steps["turn 1 overload"] = queries(100.0, bulk_per_s=5.0, bulk_share=share)
    facts = {"machine": {}, "model": "minilm", "version": "1", "seconds": 15.0}
    store = Store(tmp_path / "bulk.json", facts, steps)
    return (
        BulkBesideOnlineBenchmark(parser([BulkBesideOnlineBenchmark]).parse_args(["bulk-beside-online"]))
        .page(store)
        .markdown(store)
    )


@pytest.mark.parametrize(
    ("p99_ms", "bulk_per_s", "share", "met"), [(109.0, 41.0, 0.05, "yes"), (111.0, 39.0, 0.03, "**no**")]
)
def test_the_page_judges_what_was_measured(
    tmp_path: Path, p99_ms: float, bulk_per_s: float, share: float, met: str
) -> None:
    """By ratios within a round: p99 beside bulk over p99 alone, and bulk work over half of what it does alone."""
    found = page_of(tmp_path, p99_ms, bulk_per_s, share)
    assert f"| as asked |  | {met} | {met} |" in found
    assert f"| {met} |\n" in found.partition("While queries overload")[2]


def test_the_job_keeps_bulk_work_under_way(models: Path) -> None:
    """Several requests at once, in the class of bulk work, until the block ends."""
    workload = Workload(tuple(Kind(str(at), "embed", 1.0, (f"text {at}",)) for at in range(16)), (4,) * 16)
    with Server(models, *ONE_AT_A_TIME, "--fake-ms", "10") as server:
        with BulkJob(int(server.http.rpartition(":")[2]), workload) as job:
            wait_for(lambda: metric(server, "bertserve_bulk_queue_texts") > 1, "bulk work that waits")
            wait_for(lambda: len(job.answered) > 1, "answers")
        assert job.failed == 0
        assert job.per_s(job.answered[0], job.answered[-1]) > 0
        assert metric(server, "bertserve_queue_texts") == 0
