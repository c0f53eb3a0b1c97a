from __future__ import annotations

import pytest

from loadtest.capacity.decision_bench import measure


@pytest.mark.parametrize("lanes", [1, 3])
def test_decisions_are_timed_beside_a_full_queue(lanes: int) -> None:
    """Every batch that leaves the queue is refilled, and every decision of a run has one time."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    times = measure(50, lanes, runs=20, clock=clock)
    assert len(times["next"]) == len(times["refuse"]) == 20
    assert len(times["submit"]) >= 20
    assert {round(value, 3) for values in times.values() for value in values} == {1.0}
