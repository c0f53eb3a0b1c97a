from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from loadtest.benchmarks import simulator
from loadtest.benchmarks.drive import Recorded, Requests, Workload, even
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
