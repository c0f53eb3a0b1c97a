from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.scheduling.cost import CostTable

POINTS = [(8, 400.0), (16, 600.0), (64, 2400.0)]

points = st.lists(
    st.tuples(st.integers(1, 2000), st.floats(0, 1e7, allow_nan=False, allow_subnormal=False)), min_size=1, max_size=8
)


@pytest.mark.parametrize(("tokens", "us"), POINTS)
def test_a_measured_length_costs_what_was_measured(tokens: int, us: float) -> None:
    """The table passes through its points."""
    assert CostTable(POINTS).alone_us(tokens) == pytest.approx(us)


@pytest.mark.parametrize(("tokens", "us"), [(12, 500.0), (32, 1200.0), (40, 1500.0)])
def test_between_points_the_cost_is_linear(tokens: int, us: float) -> None:
    """A length between two measured ones lies on the line between them."""
    assert CostTable(POINTS).alone_us(tokens) == pytest.approx(us)


@pytest.mark.parametrize(("tokens", "us"), [(128, 4800.0), (640, 24_000.0)])
def test_beyond_the_longest_the_cost_grows_in_proportion(tokens: int, us: float) -> None:
    """Twice the longest length costs twice as much."""
    assert CostTable(POINTS).alone_us(tokens) == pytest.approx(us)


def test_below_the_shortest_nothing_gets_cheaper() -> None:
    """What a run costs at least, a text of one token costs too."""
    assert CostTable(POINTS).alone_us(1) == 400.0


def test_the_order_of_points_does_not_matter() -> None:
    """Warm-up may report them as it likes."""
    assert CostTable(reversed(POINTS)).alone_us(40) == CostTable(POINTS).alone_us(40)


def test_a_noisy_measurement_never_makes_a_longer_text_cheaper() -> None:
    """A point below an earlier one is lifted to it."""
    table = CostTable([(8, 900.0), (16, 500.0), (32, 1000.0)])
    assert table.alone_us(16) == 900.0


@given(points, st.integers(1, 5000), st.integers(1, 5000))
@settings(derandomize=True, max_examples=300, deadline=None)
def test_the_cost_never_falls_with_length(measured: list[tuple[int, float]], one: int, other: int) -> None:
    """Whatever was measured, also twice at one length, the longer text costs at least as much."""
    table = CostTable(measured)
    shorter, longer = sorted((one, other))
    assert table.alone_us(shorter) <= table.alone_us(longer) * (1 + 1e-12)


@pytest.mark.parametrize("measured", [[], [(0, 1.0)], [(-1, 1.0)], [(8, -1.0)]])
def test_points_that_cannot_be_are_refused(measured: list[tuple[int, float]]) -> None:
    """No points, no length, a negative time."""
    with pytest.raises(ValueError, match="cost"):
        CostTable(measured)
