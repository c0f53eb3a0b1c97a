from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from loadtest.benchmarks import simulator
from loadtest.benchmarks.drive import Recorded, Requests, Workload, even
from loadtest.benchmarks.runner import Benchmark, parser
from loadtest.benchmarks.scheduling import OVERLOADS, REPLAYED, SHARES, SchedulingBenchmark, SimulatedBenchmark
from loadtest.benchmarks.store import Store
from loadtest.errors import BenchError
from loadtest.generator.records import PACK, RECORD

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = (10, 20, 30)
FAULTS = ("", "429 Too Many Requests", "cannot connect: refused", "504 Gateway Timeout")


def recorded(*rows: tuple[float, float, int, int], queue_us: float = 0.0, compute_us: float = 1000.0) -> Recorded:
    """A run of (intended, done, kind, fault)."""
    found = Recorded({}, 10.0)
    packed = b"".join(
        PACK(at, at, at, done, 5.0, queue_us, compute_us, 2000.0, kind, fault) for at, done, kind, fault in rows
    )
    found.take(np.frombuffer(packed, RECORD), FAULTS, [str(tokens) for tokens in TOKENS])
    return found


def test_a_run_is_summed_up_by_what_became_of_its_requests() -> None:
    """Answered, good, refused and lost ones count apart, and so do short and long texts."""
    rows = [(at, at + 0.1, 0, 0) for at in (0.0, 1.0, 2.0, 3.0)] + [
        (4.0, 4.4, 2, 0),
        (5.0, 5.002, 1, 1),
        (6.0, 7.0, 1, 2),
        (7.0, 7.25, 1, 3),
    ]
    found = Requests.of(recorded(*rows), TOKENS).figures(10.0, 250.0)
    assert found == pytest.approx(
        {
            "offered_per_s": 0.8,
            "answered_per_s": 0.5,
            "good_per_s": 0.4,
            "refused_per_s": 0.1,
            "missed_per_s": 0.1,
            "failed_otherwise": 1,
            "p50_ms": 100,
            "p99_ms": 400,
            "short_p99_ms": 100,
            "long_p99_ms": 400,
            "refusal_p99_ms": 2,
        }
    )


def test_pieces_of_a_run_have_their_own_reasons() -> None:
    """A generator tells of new faults with each piece; a number means what its own piece says."""
    found = recorded((0.0, 0.1, 0, 1))
    later = np.frombuffer(PACK(1.0, 1.0, 1.0, 1.1, -1.0, -1.0, -1.0, -1.0, 0, 1), RECORD)
    found.take(later, ["", "connection broken: reset"], [str(tokens) for tokens in TOKENS])
    assert Requests.of(found, TOKENS).refused.tolist() == [True, False]


def test_recovery_ends_with_the_last_bad_request() -> None:
    """A late answer or a refusal after the overload counts; what lies before it does not."""
    rows = [(1.0, 9.0, 0, 1), (6.0, 6.5, 0, 0), (7.0, 7.1, 0, 0)]
    requests = Requests.of(recorded(*rows), TOKENS)
    assert requests.bad_until_s(5.0, 250.0) == 1.0
    assert requests.bad_until_s(6.5, 250.0) == 0.0
    assert requests.within(5.5, 6.5).latency_ms == pytest.approx([500])


def test_what_the_server_adds_is_a_line_over_the_tokens() -> None:
    """500 us for a request and 10 us for each token, beside queue and engine."""
    rows = [(at, at + (500 + 10 * TOKENS[kind] + 1300) / 1e6, kind, 0) for at, kind in ((0.0, 0), (1.0, 0), (2.0, 2))]
    requests = Requests.of(recorded(*rows, queue_us=300.0), TOKENS)
    assert requests.overhead_us() == pytest.approx((500, 10), rel=1e-6)


def test_the_requests_of_a_run_are_known_beforehand() -> None:
    """Times ascend, and lengths are those of the texts."""
    workload = Workload.of(["a", "b"], [8, 8])
    requests = workload.requests(even(10.0), 20.0, 1)
    assert 100 < len(requests) < 300
    assert requests == sorted(requests)
    assert {tokens for _, tokens in requests} == {8}
    assert requests != workload.requests(even(10.0), 20.0, 2)


def test_a_store_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    """Steps survive; other circumstances are refused, and thrown away when asked."""
    path = tmp_path / "figures.json"
    Store.open(path, {"machine": "a"}, fresh=False).keep("turn 1 ours", {"p99_ms": 3.0})
    again = Store.open(path, {"machine": "a"}, fresh=False)
    assert again.steps == {"turn 1 ours": {"p99_ms": 3.0}}
    with pytest.raises(BenchError, match="measured with another machine; start afresh with --fresh"):
        Store.open(path, {"machine": "b"}, fresh=False)
    assert Store.open(path, {"machine": "b"}, fresh=True).steps == {}


def run(rate: float, **figures: float) -> dict[str, float]:
    """A run in which everybody was answered at once."""
    same = dict.fromkeys(("offered_per_s", "answered_per_s", "good_per_s"), rate)
    tails = dict.fromkeys(("p50_ms", "p99_ms", "short_p99_ms", "long_p99_ms"), 100.0)
    return {"rate": rate, **same, **tails, "refused_per_s": 0.0, "missed_per_s": 0.0, "bad_until_s": 0.0, **figures}


def page(kind: type[Benchmark], store: Store) -> str:
    """The page of a store."""
    return str(kind(parser([kind]).parse_args([kind.name])).page(store))


def full_store(path: Path) -> Store:
    """Every step, with invented figures."""
    found: dict[str, Any] = {
        "budget": {"rate": 75.0, "tried": {"256": run(75), "512": run(75)}, "best": 256},
    }
    for name in ("ours", "baseline"):
        found[f"capacity {name}"] = {"capacity_per_s": 100.0, "confidence": "sure"}
    for number, (subject, short) in product((1, 2, 3), (("ours", 50.0), ("baseline", 100.0))):
        found[f"turn {number} {subject}"] = run(80, short_p99_ms=short)
    for share, subject in product(SHARES, ("ours", "baseline")):
        found[f"share {share:g} {subject}"] = run(100 * share)
    for factor, subject in product(OVERLOADS, ("ours", "baseline")):
        found[f"overload {factor:g} {subject}"] = run(100 * factor, good_per_s=96.0, refusal_p99_ms=5.0)
    machine = {"CPU": "a processor"}
    return Store(path, {"machine": machine, "model": "minilm", "version": "1"}, found)


@pytest.mark.parametrize(
    ("step", "change"),
    [
        ("turn 2 ours", {"short_p99_ms": 61.0}),
        ("overload 2 ours", {"good_per_s": 94.0}),
        ("overload 2 ours", {"refusal_p99_ms": 21.0}),
        ("overload 10 ours", {"p99_ms": 501.0}),
        ("overload 5 ours", {"bad_until_s": 5.1}),
    ],
)
def test_what_is_not_as_asked_is_said(tmp_path: Path, step: str, change: dict[str, float]) -> None:
    """One figure beyond its limit, and the page says no."""
    store = full_store(tmp_path / "scheduling.json")
    assert "**no**" not in page(SchedulingBenchmark, store)
    changed = {step: change} if "turn" not in step else {f"turn {number} ours": change for number in (1, 2, 3)}
    for name, figures in changed.items():
        store.steps[name] |= figures
    assert "**no**" in page(SchedulingBenchmark, store)


def test_a_page_shows_as_much_as_there_is(tmp_path: Path) -> None:
    """Between two sittings the page lacks what is missing, and nothing fails."""
    whole = full_store(tmp_path / "scheduling.json")
    for count in range(len(whole.steps)):
        part = Store(whole.path, whole.facts, dict(list(whole.steps.items())[:count]))
        assert page(SchedulingBenchmark, part).startswith("# Scheduling")
    whole = replayed_store(tmp_path / "simulated.json")
    for count in range(len(whole.steps)):
        part = Store(whole.path, whole.facts, dict(list(whole.steps.items())[:count]))
        assert page(SimulatedBenchmark, part).startswith("# Simulated")


def replayed_store(path: Path, rounds: int = 3) -> Store:
    """Rounds of replays, with invented figures."""
    found: dict[str, Any] = {
        "capacity ours": {"capacity_per_s": 50.0},
        "calm": {"overhead": {"receive": 150.0, "token": 3.0, "reply": 100.0, "batch": 70.0, "wire": 90.0}},
    }
    stages = {"queue_ms": 2.0, "compute_ms": 8.0}
    for number, share in product(range(1, rounds + 1), REPLAYED):
        told = {"answered_per_s": 30.0, "p50_ms": 110.0, "p99_ms": 114.0, **stages}
        found[f"replay {number} {share:g}"] = {"measured": run(30) | stages, "simulated": told}
    return Store(path, {"machine": {"CPU": "a processor"}, "model": "minilm", "version": "1"}, found)


def test_simulated_figures_stand_beside_measured_ones(tmp_path: Path) -> None:
    """With the stages, and whether that is as asked."""
    store = replayed_store(tmp_path / "simulated.json")
    text = page(SimulatedBenchmark, store)
    assert "| 0.8 | 100.0 | 110.0 | +10% | 100.0 | 114.0 | +14% | 30.0 | 30.0 | +0% | yes |" in text
    assert "| 0.8 | 2.0 | 2.0 | 8.0 | 8.0 |" in text
    for number in (1, 2):
        store.steps[f"replay {number} 0.8"]["simulated"]["p50_ms"] = 116.0
    assert "| +16% | 100.0 | 114.0 | +14% | 30.0 | 30.0 | +0% | **no** |" in page(SimulatedBenchmark, store)


@pytest.mark.long
def test_the_t4_tables_are_simulated_by_the_command() -> None:
    """The answer holds a capacity, its sources and the curve below it."""
    overhead = {"receive": 100.0, "token": 1.0, "reply": 60.0, "batch": 40.0, "wire": 150.0}
    found = simulator.capacity("t4-bert-large-fp16", 384, 50.0, overhead)
    assert 5 < found["capacity_per_s"] < 90
    assert len(found["runs"]) > 10
    assert any("https://github.com/NVIDIA/TensorRT" in fact for fact in found["facts"])


def test_a_simulation_that_fails_says_why() -> None:
    """The command's own sentence comes back."""
    with pytest.raises(BenchError, match="not a cost table"):
        simulator.replay({"models": 3}, [(0.0, 8)], 1.0, {"receive": 1.0})
