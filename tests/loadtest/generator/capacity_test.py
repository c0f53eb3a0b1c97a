from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

from loadtest.generator.records import RECORD
from loadtest.generator.scenario import SCENARIOS
from loadtest.generator.search import search
from loadtest.report.page import capacity_report
from loadtest.report.progress import Progress
from loadtest.report.result import Result
from loadtest.report.slo import parse_slo

if TYPE_CHECKING:
    from loadtest.generator.measure import Measurement
    from loadtest.report.slo import Objective

SECONDS = 1.0


@dataclass
class Queue:
    """A server with a known capacity: beyond it every request waits.

    `shaky` is the width of the edge; the runs of `slow_runs` meet a neighbour and miss whatever the rate.
    """

    capacity: float
    shaky: float = 0.0
    slow_runs: tuple[int, ...] = ()
    slo: tuple[Objective, ...] = parse_slo("p99=10ms")
    seed: int = 1
    rates: list[float] = field(default_factory=list)

    def facts(self, *_: object) -> dict[str, str]:
        """What a report needs."""
        return {"target": "http://t", "date": "today"}

    def run(self, _: object, rate: float, seed: int, *__: object, check: bool) -> Result:
        """One run: fast below the capacity, slow above."""
        assert not check
        self.rates.append(rate)
        edge = self.capacity * (1 + self.shaky * np.random.default_rng(seed).uniform(-1, 1))
        records = np.zeros(int(rate * SECONDS) or 1, RECORD)
        records["done"] = 0.001 if rate <= edge and len(self.rates) not in self.slow_runs else 0.5
        result = Result({}, SECONDS)
        result.take(records, [""], ["8 tokens"])
        return result


def searched(queue: Queue, rate: float) -> Any:
    """A search from a rate on."""
    scenario = replace(SCENARIOS["steady"].lasting(SECONDS), rate=rate)
    return search(cast("Measurement", queue), scenario, Progress(SECONDS))


@pytest.mark.parametrize("capacity", [30.0, 333.0])
@pytest.mark.parametrize("rate", [50.0, 900.0])
def test_the_edge_is_found_from_below_and_from_above(capacity: float, rate: float) -> None:
    """Whatever rate the search starts with, it ends with the capacity between two near rates."""
    found = searched(Queue(capacity), rate)
    assert found.highest <= capacity < found.lowest_missed
    assert found.lowest_missed / found.highest < 1.09
    assert found.confidence().startswith("held in 3 of 3 runs")


def test_an_edge_that_shakes_is_measured_again() -> None:
    """Where chance decides single runs, the rates at the edge are judged by several."""
    queue = Queue(400.0, shaky=0.05)
    found = searched(queue, 100.0)
    assert queue.rates.count(found.highest) >= 2
    assert 0.85 * 400 <= found.highest <= 1.1 * 400


@pytest.mark.parametrize("slow", [1, 2, 3, 5, 8])
def test_a_single_bad_run_does_not_decide(slow: int) -> None:
    """A run that a neighbour spoiled, early or late in the search, moves the result by nothing."""
    found = searched(Queue(333.0, slow_runs=(slow,)), 50.0)
    assert 333 / 1.09 < found.highest <= 333


def test_a_server_that_never_holds_has_no_capacity() -> None:
    """The search ends at one request a second, and says so."""
    found = searched(Queue(0.1), 64.0)
    assert found.highest is None
    assert "none" in found.text()
    assert found.as_json()["capacity_per_s"] is None
    assert "none of the rates" in capacity_report(found)


def test_the_curve_is_drawn() -> None:
    """The page shows latency over rate, and every run with its verdict."""
    html = capacity_report(searched(Queue(333.0), 50.0))
    assert html.count('<svg class="wide"') == 2
    assert "missed" in html
