"""The page of a T4 behind this server, from invented measurements."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest

from loadtest.benchmarks import t4
from loadtest.benchmarks.store import Store
from loadtest.benchmarks.turns import Samples, round_name
from loadtest.report.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

FP16, INT8 = "t4-bert-base-fp16-trt8", "t4-bert-base-int8-trt8"
ADDED_MS = 0.4


def samples(tokens: int) -> dict[str, Any]:
    """A round: the server takes 0.4 ms beside the engine, 100 us of it CPU time and 1 us a token more."""
    found = {}
    for table, slept_ms in ((FP16, 2.0), (INT8, 1.4)):
        alone = Sample(400, 500, 450.0, slept_ms + ADDED_MS, slept_ms + 0.6, 50.0, 100.0 + tokens)
        engine = replace(alone, p50_ms=slept_ms, p99_ms=0.0)
        found |= {table: asdict(alone), f"{table}, engine": asdict(engine)}
    return found


def store(path: Path) -> Store:
    """Every step of a T4's page."""
    steps: dict[str, Any] = {round_name(1, tokens): samples(tokens) for tokens in (8, 128)}
    for table, rates in t4._RATES.items():
        for rate in rates:
            steps[f"served {table} {rate}"] = {"p50_ms": 2.0, "p99_ms": 9.0, "good_per_s": float(rate)}
            steps[f"expected {table} {rate}"] = {"p50_ms": 1.9, "p99_ms": 8.0}
    run = {"offered_per_s": 300.0, "p50_ms": 2.5, "p99_ms": 9.5, "facts": ["costs: x", "source: https://example.org"]}
    for table, (slo_ms, lengths) in t4._SIMULATED.items():
        for tokens in lengths:
            found = {**run, "capacity_per_s": 300.0, "slo_ms": slo_ms, "runs": [run, {**run, "offered_per_s": 600.0}]}
            steps[f"simulated {table} {tokens}"] = found
    facts = {"machine": {}, "model": "base", "version": "1", "components": 768, "seconds": 2.0}
    return Store(path, facts, steps)


def test_what_the_server_adds_is_told_apart() -> None:
    """CPU time by request and by token; what is left of the latency is the way to the engine."""
    rounds = {round_name(1, tokens): samples(tokens) for tokens in (8, 128)}
    found = t4.overhead(Samples.of(Store(None, {}, rounds)))  # type: ignore[arg-type]  no file is needed
    assert found["token"] == pytest.approx(1.0)
    assert found["receive"] + found["reply"] + found["batch"] == pytest.approx(100.0)
    assert sum(found.values()) + 127 * found["token"] == pytest.approx(1e3 * ADDED_MS)


def test_the_page_says_what_is_published_measured_and_simulated(tmp_path: Path) -> None:
    """Each engine's published time with what was measured beside it, whether it is as asked, sources and plots."""
    made = store(tmp_path / "t4.json")
    page = t4.T4Benchmark.page(t4.T4Benchmark.__new__(t4.T4Benchmark), made)
    page.write(made)
    text = (tmp_path / "t4.md").read_text()
    assert f"| {INT8} | 1.33 (1.57) | 1.73 | 2.17 | 2 | yes |" in text
    assert f"| {FP16} | 1.93 (2.06) | 2.33 | 2.66 | 2.4 | yes |" in text
    assert "| t4-bert-base-int8 | 1.66 (1.67) | 2.06 | 2.27 | 2 | **no** |" in text
    assert f"| {INT8} | 400 | 2.0 | 1.9 | 9.0 | 8.0 | 400 |" in text
    for word in ("**Published**", "**Measured**", "**Simulated**", "https://example.org"):
        assert word in text
    assert (tmp_path / "t4-bert-base-int8-trt8.svg").read_text().startswith("<svg")
