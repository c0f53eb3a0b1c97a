from __future__ import annotations

import pytest

from simulate.decision_bench import measure


@pytest.mark.parametrize("lanes", [1, 3])
def test_every_kind_of_decision_is_timed(lanes: int) -> None:
    """Beside a queue that stays as full as was asked."""
    times = measure(50, lanes, runs=20)
    assert {kind: len(values) >= 20 for kind, values in times.items()} == {"next": True, "submit": True, "refuse": True}
    assert all(value >= 0 for values in times.values() for value in values)
