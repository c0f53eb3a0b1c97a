"""What can be said of `make bench-gpu` without a GPU: the floor's arithmetic, and the answer where there is none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from bertserve.loadtest.benchmarks.exports.__main__ import BENCHMARKS
from bertserve.loadtest.benchmarks.exports.encoder_kernels import (
    BASE,
    LARGE,
    LAUNCH_US,
    Encoder,
    Kernel,
    floor_us,
    kernels,
)
from bertserve.loadtest.benchmarks.exports.gpu import bottleneck
from bertserve.loadtest.benchmarks.runner import main
from bertserve.loadtest.benchmarks.store import Store
from bertserve.serving.engine.gpu import discovery
from bertserve.serving.engine.gpu.discovery import Machine

if TYPE_CHECKING:
    from pathlib import Path


def test_without_a_card_it_says_what_it_would_run_and_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leaves the page alone that may hold another machine's figures."""
    monkeypatch.setattr(discovery, "look", lambda: Machine(problem="no NVIDIA driver found"))
    words = ["gpu", "--out", str(tmp_path / "gpu.json"), "--costs", str(tmp_path / "costs.json")]
    assert main(BENCHMARKS, words) == 1
    said = capsys.readouterr().err
    assert "make bench-gpu would run, within eight minutes" in said
    assert "BERT-base and BERT-large" in said
    assert said.rstrip().endswith("It cannot: no NVIDIA driver found.")
    assert list(tmp_path.iterdir()) == []


def test_the_page_and_the_cost_file_tell_what_was_measured(tmp_path: Path) -> None:
    """Each engine beside the floor, PyTorch and the server, and what stands against the rest."""
    cell = [1, 128, 900.0, 1000.0, 20]
    alone = {name: {"p50_ms": p50, "p99_ms": 2.0} for name, p50 in (("HTTP", 1.5), ("gRPC", 1.4))}
    served = {"alone": alone, "compute_ms": 0.9, "per_s": 2000.0, "bottleneck": "the GPU"}
    steps: dict[str, Any] = {
        "date": "2026-01-01",
        "rates base": [300e9, 24e12],
        "served": {**served, "status": {"a": 1}},
    }
    steps["engines base"] = {"ort-cuda": [cell], "tensorrt (rtx)": "no library"}
    steps["torch base"] = {"eager": [[1, 128, 3000.0, 3100.0, 20]], "torch.compile": []}
    facts = {"machine": {}, "gpu": "Tesla T4", "GPU": "Tesla T4, 16 GB", "versions": {"torch": "2"}}
    out = tmp_path / "gpu.json"
    Store(out, facts, steps).keep("rates large", [300e9, 24e12])
    assert main(BENCHMARKS, ["gpu", "--page-only", "--out", str(out), "--costs", str(tmp_path / "costs.json")]) == 0
    page = out.with_suffix(".md").read_text()
    assert "| 128 | 1 | 0.900 | 1.000 | 1,111 |" in page
    assert "| 128 | 1 | 0.900 | 3.000 | - |" in page
    assert "| HTTP | 1.500 | 2.000 | 0.600 |" in page
    assert "- BERT-base with tensorrt (rtx): no library" in page
    assert json.loads((tmp_path / "costs.json").read_text())["points"][0]["ms"] == 0.9
    assert json.loads((tmp_path / "gpu-status.json").read_text()) == {"a": 1}


@pytest.mark.parametrize(
    ("encoder", "tokens", "gflop"),
    [(BASE, 128, 22.35), (BASE, 384, 70.67), (LARGE, 128, 78.9)],
)
def test_the_operations_of_a_bert(encoder: Encoder, tokens: int, gflop: float) -> None:
    """Those of its products and its attention, as they are counted by hand."""
    operations = sum(kernel.operations for kernel in kernels(encoder, 1, tokens))
    assert operations / 1e9 == pytest.approx(gflop, rel=0.01)


def test_a_kernel_takes_the_largest_of_three_times() -> None:
    """Operations, bytes, and the launch."""
    assert Kernel(4e9, 1e3).us(1e12, 1e12) == 4000
    assert Kernel(1e3, 8e9).us(1e12, 1e12) == 8000
    assert Kernel(1, 1).us(1e12, 1e12) == LAUNCH_US


def test_short_texts_are_bound_by_reading_the_weights() -> None:
    """On a T4's published rates: 170 MB of weights at 320 GB/s, whatever the length up to some dozen tokens."""
    floors = [floor_us(kernels(BASE, 1, tokens), 24e12, 320e9) for tokens in (8, 32, 384)]
    assert floors[0] == pytest.approx(floors[1], rel=0.1)
    assert 500 < floors[0] < 800 < 3 * floors[1] < floors[2]


def test_the_bottleneck_is_what_is_busiest() -> None:
    """With what each of them did."""
    sample = {"per_s": 1000.0, "server_cpu_us": 400.0, "engine_cpu_us": 300.0}
    assert bottleneck(0.95, sample).startswith("the GPU (the GPU 95%")
    assert bottleneck(0.5, sample | {"server_cpu_us": 990.0}).startswith("the server process's event loop (")
