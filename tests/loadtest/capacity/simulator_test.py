from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertserve.loadtest.capacity.simulator import Arrival, Device, Outcome, Overhead, RequestOutcome, Variation, play
from bertserve.serving.scheduling.batcher import Policy
from bertserve.serving.scheduling.cost import CostPoint

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHED = Policy(1024, batch_invariant=[True], narrow=[False])
ONE_BY_ONE = Policy(1024, batch_invariant=[False], narrow=[False])
SIDE_BY_SIDE = Policy(1024, batch_invariant=[False], narrow=[True], group_tokens=16)


def wide(us: float, *batches: int) -> list[CostPoint]:
    """Batches of these sizes cost the same: whatever joins is free."""
    return [CostPoint("wide", 16, batch, us) for batch in batches or (1,)]


def device(points: Sequence[CostPoint], narrow_lanes: int = 0, **overhead: float) -> Device:
    return Device(points=points, narrow_lanes=narrow_lanes, overhead=Overhead(**overhead))


def arrivals(*times_ms: float, timeout_s: float = 100.0) -> list[Arrival]:
    return [Arrival(at / 1e3, (16,), timeout_s) for at in times_ms]


def simulate(*arguments: Any, **options: Any) -> list[Outcome]:
    return play(*arguments, **options).outcomes


def latencies_ms(outcomes: Sequence[Outcome]) -> list[float]:
    """How long each took; all of them were answered."""
    assert all(outcome.fate is RequestOutcome.ANSWERED for outcome in outcomes)
    return [outcome.latency_s * 1e3 for outcome in outcomes]


NARROW = CostPoint("narrow", 16, 1, 6000)
SLOW_FRONT = {"receive_us": 2000}
OVERHEAD = {"receive_us": 100, "token_us": 10, "reply_us": 200, "batch_us": 50, "wire_us": 90}
LATENCIES_MS: dict[str, tuple[Device, Policy, list[Arrival], list[float]]] = {
    "requests that never meet wait for nothing": (device(wide(4000)), ONE_BY_ONE, arrivals(0, 10, 20), [4, 4, 4]),
    "requests that meet wait for one another": (device(wide(4000)), ONE_BY_ONE, arrivals(0, 0, 0), [4, 8, 12]),
    "those that came meanwhile run together": (device(wide(4000, 1, 2, 4)), BATCHED, arrivals(0, 1, 2), [4, 7, 6]),
    # A lone request pays each part once, and a token's share for each of its tokens.
    "the overhead is on every way": (device(wide(4000), **OVERHEAD), ONE_BY_ONE, arrivals(0), [4.6]),
    # The second is received after the first, whose answer waits for that.
    "the front does one thing at a time": (device(wide(0), receive_us=1000), ONE_BY_ONE, arrivals(0, 0), [2, 2]),
    "a front beside the engine": (device(wide(10_000), **SLOW_FRONT), ONE_BY_ONE, arrivals(0, 5), [12, 17]),
    # A wide batch runs at half speed for the 2 ms in which the front receives another request.
    "a front on the engine's two cores slows it": (
        device(wide(10_000), **SLOW_FRONT, shared_cores=2),
        ONE_BY_ONE,
        arrivals(0, 5),
        [13, 18],
    ),
    # Wide batches also run at half speed for the 1 ms in which the core receives that request.
    "each process of several slows an engine on its cores": (
        device(wide(10_000), **SLOW_FRONT, core_us=1000, fronts=2, shared_cores=2),
        ONE_BY_ONE,
        arrivals(0, 5),
        [14.5, 19.5],
    ),
    "times of a server have the front in them": (
        Device(points=wide(4000), times=wide(10_000), overhead=Overhead(**SLOW_FRONT, shared_cores=2)),
        ONE_BY_ONE,
        arrivals(0, 5),
        [12, 17],
    ),
    "narrow lanes work side by side": (
        device([*wide(4000), NARROW], narrow_lanes=2),
        SIDE_BY_SIDE,
        arrivals(0, 1, 1),
        [4, 9, 9],
    ),
    # A wide lane that has become quick enough to carry more than the narrow ones still leaves company to them.
    "decisions rest on the warm-up, and batches take what they take now": (
        Device(points=[*wide(4000), NARROW], times=[*wide(2000), NARROW], narrow_lanes=2),
        SIDE_BY_SIDE,
        arrivals(0, 1, 1),
        [2, 7, 7],
    ),
    "all texts of a request are waited for": (
        device(wide(4000)),
        ONE_BY_ONE,
        [Arrival(0.0, (16, 16, 16), 100.0)],
        [12],
    ),
    "texts share the front's time for their request": (
        device(wide(0), receive_us=1000, text_us=200, token_us=10, reply_us=300),
        ONE_BY_ONE,
        [Arrival(0.0, (16, 16, 16), 100.0)],
        [1 + 3 * 0.2 + 48 * 0.01 + 0.3],
    ),
    "the core has its part in each text and each token": (
        device(wide(4000), **OVERHEAD, core_us=1000, core_token_us=100, fronts=2),
        ONE_BY_ONE,
        [Arrival(0.0, (16, 16), 100.0)],
        [0.1 + 32 * 0.01 + 2 * 1 + 32 * 0.1 + 2 * (0.09 + 4 + 0.05) + 0.2],
    ),
    "nothing arrives and nothing happens": (device(wide(4000)), ONE_BY_ONE, [], []),
}


@pytest.mark.parametrize("case", LATENCIES_MS)
def test_requests_take_as_long_as_a_server_would_need(case: str) -> None:
    """Each row says what a request waits for."""
    *world, expected = LATENCIES_MS[case]
    assert latencies_ms(simulate(*world)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fronts", "core_us", "us_of_each"),
    [(1, 0, 150), (1, 1000, 150), (3, 0, 150 / 3), (3, 80, 80)],
)
def test_a_fast_engine_answers_at_the_rate_of_the_front_or_of_the_core(
    fronts: int, core_us: float, us_of_each: float
) -> None:
    """Requests that come at once are answered as fast as the slowest stage lets them; fronts get nearly equal parts."""
    quick = device(wide(0), receive_us=140, reply_us=10, core_us=core_us, fronts=fronts)
    found = latencies_ms(simulate(quick, ONE_BY_ONE, arrivals(*[0] * 3000)))
    assert max(found) == pytest.approx(3000 * us_of_each / 1e3, rel=0.08)


def test_batches_of_a_server_have_its_mean_and_its_spread() -> None:
    """Far apart, so that none waits for another, and what lasts has passed before the next one."""
    seen = Device(points=wide(4000), times=wide(8000), variations={"wide": Variation(0.2, 0.5)})
    found = latencies_ms(simulate(seen, ONE_BY_ONE, arrivals(*range(0, 20_000_000, 10_000))))
    assert statistics.fmean(found) == pytest.approx(8, rel=0.02)
    assert statistics.stdev(found) == pytest.approx(0.2 * 8, rel=0.1)


@pytest.mark.parametrize(("lasting", "least", "most"), [(0.0, -0.1, 0.1), (0.8, 0.7, 0.9)])
def test_what_slows_a_machine_down_lasts(lasting: float, least: float, most: float) -> None:
    """A batch each 10 ms: its neighbours have that share of the variance in common."""
    seen = Device(points=wide(1000), times=wide(1000), variations={"wide": Variation(0.2, lasting)})
    found = latencies_ms(simulate(seen, ONE_BY_ONE, arrivals(*range(0, 40_000, 10))))
    assert least < statistics.correlation(found[1:], found[:-1]) < most


def test_a_deadline_refuses_or_ends_a_request() -> None:
    """What an idle engine cannot keep is hopeless; what the queue does not let it keep is overload."""
    hopeless = simulate(device(wide(4000)), ONE_BY_ONE, arrivals(0, timeout_s=0.003))
    assert hopeless == [Outcome(RequestOutcome.HOPELESS, 0.0)]
    busy = simulate(device(wide(4000)), ONE_BY_ONE, arrivals(0, 0, 0, timeout_s=0.006))
    assert [outcome.fate for outcome in busy] == [
        RequestOutcome.ANSWERED,
        RequestOutcome.OVERLOADED,
        RequestOutcome.OVERLOADED,
    ]


def test_more_tokens_than_the_queue_holds_are_refused() -> None:
    """The bound on tokens in flight counts what runs, too."""
    found = simulate(device(wide(4000)), ONE_BY_ONE, arrivals(0, 0, 0), max_queue_tokens=40)
    assert [outcome.fate for outcome in found] == [
        RequestOutcome.ANSWERED,
        RequestOutcome.ANSWERED,
        RequestOutcome.OVERLOADED,
    ]
    never = simulate(device(wide(4000)), ONE_BY_ONE, arrivals(0), max_queue_tokens=15)
    assert [outcome.fate for outcome in never] == [RequestOutcome.INVALID]


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_poisson_arrivals_wait_as_the_formula_says(load: float) -> None:
    """M/D/1: the mean wait is load / (2 (1 - load)) services (Pollaczek and Khinchin)."""
    service_s, count = 0.002, 8_000
    dice, at = random.Random(7), 0.0
    schedule = []
    for _ in range(count):
        at += dice.expovariate(load / service_s)
        schedule.append(Arrival(at, (16,), 1000.0))
    policy = Policy(16, batch_invariant=[False], narrow=[False])
    outcomes = simulate(device(wide(service_s * 1e6)), policy, schedule)
    waited = sum(outcome.latency_s for outcome in outcomes) / count - service_s
    assert waited == pytest.approx(service_s * load / (2 * (1 - load)), rel=0.08)


def test_the_spread_that_was_measured_varies_the_times() -> None:
    """Half of the batches lie between the quartiles, and the same seed gives the same times."""
    points = [CostPoint("wide", 16, 1, 1000, spread_us=200)]
    schedule = arrivals(*range(0, 20_000, 10))
    found = latencies_ms(simulate(device(points), ONE_BY_ONE, schedule))
    assert found == latencies_ms(simulate(device(points), ONE_BY_ONE, schedule))
    assert found != latencies_ms(simulate(device(points), ONE_BY_ONE, schedule, seed=2))
    ordered = sorted(found)
    quartiles = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    assert quartiles[1] - quartiles[0] == pytest.approx(0.2, rel=0.15)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Device, Policy, list[Arrival]]:
    """A device, a policy and up to 60 requests that come close together."""
    narrow_lanes = draw(st.sampled_from([0, 2, 3]))
    kinds = ["wide", *(["narrow"] if narrow_lanes else [])]
    points = [
        CostPoint(kind, tokens, batch, 300.0 + 20 * tokens * batch, draw(st.sampled_from([0.0, 100.0])))
        for kind in kinds
        for tokens in (8, 64, 256)
        for batch in (1, 2, 8)
    ]
    overhead = Overhead(
        receive_us=draw(st.sampled_from([0.0, 200.0])),
        token_us=draw(st.sampled_from([0.0, 2.0])),
        reply_us=draw(st.sampled_from([0.0, 100.0])),
        batch_us=draw(st.sampled_from([0.0, 50.0])),
        core_us=draw(st.sampled_from([0.0, 40.0])),
        fronts=draw(st.sampled_from([1, 3])),
        wire_us=draw(st.sampled_from([0.0, 80.0])),
        shared_cores=draw(st.sampled_from([0, 1, 2])),
    )
    policy = Policy(
        draw(st.sampled_from([64, 512])),
        batch_invariant=[draw(st.booleans())],
        narrow=[narrow_lanes > 0],
        group_tokens=64,
        prefetch_tokens=72,
    )
    lengths = st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple)
    timeouts, classes = st.sampled_from([0.002, 0.02, 2.0]), st.sampled_from([0, 4])
    rows = draw(st.lists(st.tuples(st.integers(0, 100), lengths, timeouts, classes), max_size=60))
    schedule = [Arrival(at / 1e3, texts, timeout, priority) for at, texts, timeout, priority in sorted(rows)]
    return Device(points=points, narrow_lanes=narrow_lanes, overhead=overhead), policy, schedule


@given(worlds())
@settings(deadline=None, max_examples=150)
def test_every_request_ends_once_and_in_its_own_time(
    world: tuple[Device, Policy, list[Arrival]],
) -> None:
    """As many outcomes as requests; none before its arrival, none answered in less than an idle engine takes."""
    device, policy, schedule = world
    found = simulate(device, policy, schedule, max_queue_tokens=2000)
    assert len(found) == len(schedule)
    overhead = device.overhead
    for arrival, outcome in zip(schedule, found, strict=True):
        fixed_s = (overhead.receive_us + overhead.reply_us + overhead.batch_us) / 1e6
        fixed_s += overhead.core_us / 1e6 if overhead.fronts > 1 else 0.0
        if outcome.fate is RequestOutcome.ANSWERED:
            assert outcome.latency_s >= fixed_s
        else:
            assert 0 <= outcome.latency_s <= arrival.timeout_s + sum(a.timeout_s for a in schedule) + 60
    assert found == simulate(device, policy, schedule, max_queue_tokens=2000)
