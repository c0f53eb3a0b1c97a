"""What the server carries without an engine: a short run of the real thing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from loadtest.benchmarks import ceiling

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_every_protocol_is_measured_and_written(models: Path, tmp_path: Path) -> None:
    """A row for each protocol and number of connections, and the samples that it was made from."""
    page = tmp_path / "ceiling.md"
    assert ceiling.main(["--models", str(models), "--rounds", "2", "--seconds", "0.1", "--out", str(page)]) == 0
    samples = json.loads(page.with_suffix(".json").read_bytes())
    ways = {(sample["protocol"], sample["connections"]) for sample in samples}
    assert ways == {(protocol, count) for protocol in ("HTTP", "HTTP v2", "gRPC") for count in (1, 32)}
    assert len(samples) == 2 * len(ways)
    assert all(sample["requests"] > 0 for sample in samples)
    for protocol, count in ways:
        assert f"| {protocol} | {count} |" in page.read_text()


def test_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who has no model is told so."""
    assert ceiling.main(["--models", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"ceiling: {tmp_path} holds no model")
