"""The page about MLPerf's LoadGen: whether it says that a figure is kept or missed. Costs less than a second of CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from loadtest.benchmarks.__main__ import BENCHMARKS
from loadtest.benchmarks.runner import main
from loadtest.benchmarks.store import Store

if TYPE_CHECKING:
    from pathlib import Path


def _run(scenario: str, share: float, metric: float, *, valid: bool) -> dict[str, Any]:
    verdict = {"scenario": scenario, "valid": valid, "metric": metric, "p50_ms": 10.0, "p99_ms": 120.0, "errors": 0}
    reasons = [] if valid else ["performance constraints"]
    accuracy = {"name": "mean cosine", "found": 0.995, "least": 0.99, "others": {}, "held": True}
    return {"share": share, "seconds": 60.0, "verdict": {**verdict, "reasons": reasons}, "accuracy": accuracy}


@pytest.mark.parametrize(
    ("shares", "offline", "said", "kept"),
    [
        ([1.0], 210.0, "VALID at 100% of our capacity", ["yes", "yes"]),
        ([1.0, 0.95], 150.0, "VALID at 95% of our capacity", ["yes", "**no**"]),
        ([1.0, 0.95, 0.9, None], 210.0, "VALID at no rate that was tried", ["**no**", "yes"]),
    ],
)
def test_the_verdict(tmp_path: Path, shares: list[float | None], offline: float, said: str, kept: list[str]) -> None:
    """Server counts at the highest share that LoadGen calls VALID, Offline beside the same capacity."""
    store = Store(tmp_path / "mlperf.json", {"machine": {}, "seconds": 60.0})
    store.keep("embed capacity", {"per_s": 200.0, "confidence": "held in 3 of 3 runs", "source": "50 texts"})
    tried = [share for share in shares if share is not None]
    valid = [share == shares[-1] for share in tried]
    store.keep("embed server", [_run("Server", s, 200 * s, valid=v) for s, v in zip(tried, valid, strict=True)])
    store.keep("embed offline", [_run("Offline", 1.0, offline, valid=True)])
    assert main(BENCHMARKS, ["mlperf", "--page-only", "--out", str(store.path)]) == 0
    page = store.path.with_suffix(".md").read_text()
    verdict = page.splitlines()[2]
    assert said in verdict
    assert [word.partition(")")[0] for word in verdict.split("asked: ")[1:]][:1] == kept[:1]
    assert verdict.split("the same: ")[1].startswith(kept[1])
    assert f"| embed | offline | VALID | - | {offline:.2f} | - | - |" in page
    assert ("INVALID (performance constraints not satisfied)" in page) == (len(tried) > 1)
