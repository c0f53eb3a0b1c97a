from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from bertserve.loadtest.benchmarks import simulator
from bertserve.loadtest.benchmarks.drive import Recorded, Requests
from bertserve.loadtest.benchmarks.store import Store
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.records import PACK, RECORD

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = (10, 20, 30)
FAULTS = ("", "429 Too Many Requests")


def recorded(*rows: tuple[float, float, int, int]) -> Recorded:
    """A run of (intended, done, kind, fault)."""
    found = Recorded({}, 10.0)
    packed = b"".join(PACK(at, at, at, done, 5.0, 0.0, 1000.0, 2000.0, kind, fault) for at, done, kind, fault in rows)
    found.take(np.frombuffer(packed, RECORD), FAULTS, [str(tokens) for tokens in TOKENS])
    return found


def test_a_run_is_summed_up_by_what_became_of_its_requests() -> None:
    """Answered and good ones count apart, and so do those with short texts."""
    rows = [(at, at + 0.1, 0, 0) for at in (0.0, 1.0, 2.0, 3.0)] + [(4.0, 4.4, 2, 0), (5.0, 5.002, 1, 1)]
    found = Requests.of(recorded(*rows), TOKENS).figures(10.0, 250.0)
    rates = {"offered_per_s": 0.6, "answered_per_s": 0.5, "good_per_s": 0.4}
    assert found == pytest.approx({**rates, "p50_ms": 100, "p99_ms": 400, "short_p99_ms": 100})


def test_a_store_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    """Steps survive; other circumstances are refused, and thrown away when asked."""
    path = tmp_path / "figures.json"
    Store.open(path, {"machine": "a"}, fresh=False).keep("turn 1 ours", {"p99_ms": 3.0})
    again = Store.open(path, {"machine": "a"}, fresh=False)
    assert again.steps == {"turn 1 ours": {"p99_ms": 3.0}}
    with pytest.raises(BenchError, match="measured with another machine; start afresh with --fresh"):
        Store.open(path, {"machine": "b"}, fresh=False)
    assert Store.open(path, {"machine": "b"}, fresh=True).steps == {}


@pytest.mark.slow
def test_the_t4_tables_are_simulated_by_the_command() -> None:
    """The answer holds a capacity, its sources and the curve below it."""
    overhead = {"receive": 100.0, "token": 1.0, "reply": 60.0, "batch": 40.0, "wire": 150.0}
    found = simulator.capacity("t4-bert-large-fp16", 384, 50.0, overhead)
    assert 5 < found["capacity_per_s"] < 90
    assert len(found["runs"]) > 10
    assert any("https://github.com/NVIDIA/TensorRT" in fact for fact in found["facts"])


def test_a_simulation_that_fails_says_why() -> None:
    """The command's own sentence comes back."""
    with pytest.raises(BenchError, match="--cost none: No such file"):
        simulator.at_rate("none", 8, 1.0, {"receive": 1.0})
