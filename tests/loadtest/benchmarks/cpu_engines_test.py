"""The engines for CPUs side by side, without a server: what `cpu` is compared with, and what the page says."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from loadtest.benchmarks.__main__ import BENCHMARKS
from loadtest.benchmarks.cpu_engines import CONNECTIONS, ENGINES
from loadtest.benchmarks.runner import main
from loadtest.benchmarks.store import Store
from loadtest.benchmarks.turns import round_name
from loadtest.report.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

P50_MS = {8: (1.0, 2.0, 1.1), 128: (8.0, 4.0, 4.0)}
PER_S = {8: (1000.0, 2000.0, 1900.0), 128: (100.0, 200.0, 202.0)}
"""Of ONNX Runtime, OpenVINO and both."""


def test_each_figure_stands_beside_the_better_library(tmp_path: Path) -> None:
    """Which need not be the same for latency and for throughput."""
    steps = {
        round_name(number, tokens): {
            f"{engine} {connections}": asdict(Sample(9, 9, per_s, p50_ms, p50_ms, 1.0))
            for connections in CONNECTIONS
            for engine, p50_ms, per_s in zip(ENGINES, P50_MS[tokens], PER_S[tokens], strict=True)
        }
        for number in (1, 2)
        for tokens in P50_MS
    }
    figures = {engine: [9.0, 2.0, 3.0] for engine in ENGINES}
    extra = {"starts": figures, "memory": {engine: [400.0, 512.0, 601.0] for engine in ENGINES}}
    path = tmp_path / "cpu-engines.json"
    store = Store(path, {"machine": {"cores": "2"}, "seconds": 0.4, "openvino": "2026"}, steps | extra)
    store.keep("memory", extra["memory"])
    assert main(BENCHMARKS, ["cpu-engines", "--page-only", "--out", str(path)]) == 0
    page = path.with_suffix(".md").read_text()
    ends = [line.split("|")[-2].strip().split()[0] for line in page.splitlines() if "ms |" in line or "/s |" in line]
    assert ends == ["1.10", "0.95", "1.00", "1.01"]
    assert "| cpu | 9.0 s | 2.5 (2.0 to 3.0) | 400 MB | 512 MB | 601 MB |" in page
    for verdict in (
        "1.10 / 1.00 (at most 1.02 asked: no)",
        "0.95 / 1.01 (at least 0.98 asked: no)",
        "4 asked: yes",
        "600 asked: no",
    ):
        assert verdict in page
