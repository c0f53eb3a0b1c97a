"""The options of ONNX Runtime beside the served ones: a short run over the real artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadtest.benchmarks import levers

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_every_variant_is_measured_beside_the_served_options(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A time for what is served, a ratio with its quartiles for everything else."""
    assert levers.main(["--models", str(models), "--tokens", "8", "--passes", "2"]) == 0
    told = capsys.readouterr()
    rows = [line.split("|")[1:-1] for line in told.out.splitlines() if line.startswith("| ")][2:]
    assert [name.strip() for name, _ in rows][:2] == ["as served", "threads do not spin"]
    assert rows[0][1].strip().endswith(" ms")
    assert all(" to " in ratio for _, ratio in rows[1:])
    assert "pass 2 of 2" in told.err


def test_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who has no model is told so."""
    assert levers.main(["--models", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"levers: {tmp_path} holds no model")
