"""The page about the cache of answers: whether it says that a figure is kept or missed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.__main__ import BENCHMARKS
from loadtest.benchmarks.answer_cache import DIFFERENT, STREAMS, ZIPF
from loadtest.benchmarks.runner import main
from loadtest.benchmarks.store import Store
from loadtest.benchmarks.turns import round_name
from loadtest.report.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("gain", "cost", "kept"), [(3.5, 1.5, ["yes", "yes"]), (2.5, 2.5, ["**no**", "**no**"])])
def test_the_verdict(tmp_path: Path, gain: float, cost: float, kept: list[str]) -> None:
    """Gain and cost are ratios within a round."""
    store = Store(tmp_path / "cache.json", {"machine": {}, "seconds": 0.5, "fill_s": 1.0})
    for number, speed in enumerate((500.0, 1000.0, 800.0), 1):
        rates = {ZIPF: speed, f"{ZIPF}, cached": gain * speed, DIFFERENT: speed}
        rates[f"{DIFFERENT}, cached"] = (1 - cost / 100) * speed
        samples = {name: asdict(Sample(100, 110, rate, 1.0, 2.0, 50.0)) for name, rate in rates.items()}
        store.keep(round_name(number, 8), samples)
    store.keep("counts", {stream: {"hit": 60, "shared": 15, "miss": 25} for stream in STREAMS})
    assert main(BENCHMARKS, ["answer-cache", "--page-only", "--out", str(store.path)]) == 0
    page = store.path.with_suffix(".md").read_text()
    verdict = page.splitlines()[2]
    assert f"brings {gain} times" in verdict
    assert f"takes {cost}%" in verdict
    assert [word.split(")")[0] for word in verdict.split(": ")[1:]] == kept
    assert "| 75% |" in page
