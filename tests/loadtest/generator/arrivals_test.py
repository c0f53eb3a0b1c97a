from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bertserve.loadtest.generator.arrivals import choices, schedule
from bertserve.loadtest.generator.scenario import SCENARIOS, Phase, Scenario

RATE = 500.0


def scenario(*phases: Phase, arrivals: str = "poisson") -> Scenario:
    return Scenario("test", "", phases, {8: 1.0}, arrivals=arrivals)


def test_a_schedule_is_the_same_every_time() -> None:
    """One seed gives one schedule, another seed another one."""
    asked = scenario(Phase(5, 1, 1))
    assert np.array_equal(schedule(asked, RATE, 7), schedule(asked, RATE, 7))
    assert not np.array_equal(schedule(asked, RATE, 7)[:100], schedule(asked, RATE, 8)[:100])


def test_constant_arrivals_keep_their_distance() -> None:
    """At a constant rate every gap is the same, and every second has as many arrivals."""
    times = schedule(scenario(Phase(3, 1, 1), arrivals="constant"), 10)
    assert times == pytest.approx(np.arange(30) / 10 + 0.05)


def test_poisson_arrivals_are_poisson() -> None:
    """Gaps are exponential: their mean and their deviation are one over the rate."""
    gaps = np.diff(schedule(scenario(Phase(100, 1, 1)), RATE))
    assert gaps.mean() == pytest.approx(1 / RATE, rel=0.03)
    assert gaps.std() == pytest.approx(1 / RATE, rel=0.03)


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_brings_what_its_phases_say(name: str, arrivals: str) -> None:
    """Each phase has as many arrivals as the area below its rate, within four standard deviations."""
    asked = dataclasses.replace(SCENARIOS[name].lasting(40), arrivals=arrivals)
    times = schedule(asked, RATE)
    assert (np.diff(times) >= 0).all()
    begin = 0.0
    for phase in asked.phases:
        expected = RATE * phase.seconds * (phase.begin + phase.end) / 2
        found = ((times >= begin) & (times < begin + phase.seconds)).sum()
        assert abs(found - expected) <= 4 * expected**0.5 + 1
        begin += phase.seconds
    assert times[0] >= 0
    assert times[-1] < begin


def test_a_ramp_grows_evenly() -> None:
    """A load that starts from nothing has a quarter of its requests in its first half; one that ends in it, three."""
    up, down = (schedule(scenario(Phase(10, *ends), arrivals="constant"), RATE) for ends in ((0, 1), (1, 0)))
    assert (up < 5).mean() == pytest.approx(0.25, abs=0.01)
    assert (down < 5).mean() == pytest.approx(0.75, abs=0.01)


def test_a_phase_without_load_has_no_arrivals() -> None:
    """Silence between two phases stays silent."""
    times = schedule(scenario(Phase(1, 1, 1), Phase(1, 0, 0), Phase(1, 1, 1)), RATE)
    assert not ((times >= 1) & (times < 2)).any()
    assert (times >= 2).any()


def test_kinds_are_drawn_by_their_weights() -> None:
    """Each kind has its share, and one seed gives one order."""
    drawn = choices([70.0, 20.0, 10.0], 20_000, 1)
    assert np.bincount(drawn) / 20_000 == pytest.approx([0.7, 0.2, 0.1], abs=0.015)
    assert np.array_equal(drawn, choices([70.0, 20.0, 10.0], 20_000, 1))
