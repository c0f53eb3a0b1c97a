"""The page about bulk: whether it says that a figure is kept or missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.__main__ import BENCHMARKS
from loadtest.benchmarks.runner import main
from loadtest.benchmarks.store import Store

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("share", "growth", "kept"), [(0.96, 1.05, ["yes", "yes"]), (0.94, 1.2, ["**no**", "**no**"])])
def test_the_verdict(tmp_path: Path, share: float, growth: float, kept: list[str]) -> None:
    """Shares are those of a round; memory counts from a tenth of the rows on."""
    store = Store(tmp_path / "batch.json", {"machine": {}, "texts": 1000, "rows": 10_000})
    store.keep("batch tokens", {"1": [40.0, 60.0], "512": [80.0, 120.0]})
    cpu_s = {"driver": 1.0, "engine": 20.0, "rest": 2.0}
    for number, speed in enumerate((100.0, 50.0, 80.0), 1):
        job = {"seconds": 1000 / speed / 0.9, "steady_per_s": share * speed, "cpu_s": cpu_s}
        store.keep(f"round {number}", {"raw_s": [400 / speed, 600 / speed], **job})
    resident = [(0, 10.0), (1000, 300.0), (5000, 300.0 * growth), (10_000, 300.0)]
    samples = [{"rows": rows, "driver": mb / 3, "engine": mb / 3, "rest": mb / 3} for rows, mb in resident]
    store.keep("memory", {"seconds": 60.0, "samples": samples})
    assert main(BENCHMARKS, ["batch", "--page-only", "--out", str(store.path)]) == 0
    page = store.path.with_suffix(".md").read_text()
    verdict = page.splitlines()[2]
    assert f"computes {share:.3f}" in verdict
    assert "to its end it computes 0.900" in verdict
    assert f"grows to {growth:.2f} times" in verdict
    assert [word.split(")")[0] for word in verdict.split(": ")[1:]] == kept
    assert "1 (50.0), 512 (100.0). " in page
    assert store.path.with_suffix(".svg").exists()
