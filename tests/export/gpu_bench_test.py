"""What can be said of `make bench-gpu` without a GPU: the floor's arithmetic, and the answer where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from export.benchmarks import gpu, roofline
from export.benchmarks.gpu_served import _bottleneck
from serving.engine.gpu.discovery import Machine

if TYPE_CHECKING:
    from pathlib import Path


def test_without_a_card_it_says_what_it_would_run_and_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And leaves the page alone that may hold another machine's figures."""
    page = tmp_path / "gpu.md"
    words = ["--out", str(page), "--costs", str(tmp_path / "costs.json")]
    assert gpu.main(words, lambda: Machine(problem="no NVIDIA driver is in use here")) == 1
    said = capsys.readouterr().out
    assert "make bench-gpu would run, within eight minutes" in said
    assert "BERT-base and BERT-large" in said
    assert said.rstrip().endswith("It cannot: no NVIDIA driver is in use here.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("encoder", "tokens", "gflop"),
    [(roofline.BASE, 128, 22.35), (roofline.BASE, 384, 70.67), (roofline.LARGE, 128, 78.9)],
)
def test_the_operations_of_a_bert(encoder: roofline.Encoder, tokens: int, gflop: float) -> None:
    """Those of its products and its attention, as they are counted by hand."""
    operations = sum(kernel.operations for kernel in roofline.kernels(encoder, 1, tokens))
    assert operations / 1e9 == pytest.approx(gflop, rel=0.01)


def test_a_kernel_takes_the_largest_of_three_times() -> None:
    """Operations, bytes, and the launch."""
    assert roofline.Kernel(4e9, 1e3).us(1e12, 1e12) == 4000
    assert roofline.Kernel(1e3, 8e9).us(1e12, 1e12) == 8000
    assert roofline.Kernel(1, 1).us(1e12, 1e12) == roofline.LAUNCH_US


def test_short_texts_are_bound_by_reading_the_weights() -> None:
    """On a T4's published rates: 170 MB of weights at 320 GB/s, whatever the length up to some dozen tokens."""
    floors = [roofline.floor_us(roofline.kernels(roofline.BASE, 1, tokens), 24e12, 320e9) for tokens in (8, 32, 384)]
    assert floors[0] == pytest.approx(floors[1], rel=0.1)
    assert 500 < floors[0] < 800 < 3 * floors[1] < floors[2]


def test_the_bottleneck_is_what_is_busiest() -> None:
    """With what each of them did."""
    assert _bottleneck(0.95, 0.4, 0.3).startswith("the GPU (the GPU 95%")
    assert _bottleneck(0.5, 0.99, 0.3).startswith("the server process's event loop (")
