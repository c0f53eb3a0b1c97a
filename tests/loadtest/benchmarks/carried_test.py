"""What is measured, in full: about 30 seconds for an export, a server and a search."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from loadtest.benchmarks.exports import sizing
from loadtest.benchmarks.exports.__main__ import BENCHMARKS
from loadtest.benchmarks.runner import main
from loadtest.capacity.lengths import Lengths
from loadtest.capacity.plan import Objective, SizingLoad
from loadtest.capacity.tables import BatchCosts
from serving.engine.base import LaneKind
from serving.scheduling.cost import CostPoint
from tests.support.models import NAME

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "model_type": "bert",
    "vocab_size": 2000,
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 64,
}


LOAD = """
import json, sys
from pathlib import Path
from loadtest.cli import parser
given = parser().parse_args(sys.argv[2:])
assert sys.argv[1] == "load" and given.find_capacity and given.slo
texts = Path(given.texts).read_text().splitlines()
point = {"held": True, "rate": given.rate, "duration": given.duration, "texts": len(texts), "target": given.target}
report = {"capacity_per_s": 50.0, "confidence": "sure", "points": [point]}
(Path(given.out) / "report.json").write_text(json.dumps(report))
"""
"""In the place of `bertserve load`: takes its words, and says that a server carries 50 texts a second."""


def test_what_was_foretold_is_searched_around_and_kept(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real server of an export that is there already; the load generator's search has tests of its own."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tiny-fp32").symlink_to(models)
    out = tmp_path / "figures.json"
    points = tuple(CostPoint(LaneKind.WIDE.value, tokens, 1, 1e4) for tokens in (8, 64))
    monkeypatch.setattr(sizing, "costs_here", lambda *_: BatchCosts("extrapolated", points))
    monkeypatch.setattr(sizing, "_NARROW", 1.2)
    monkeypatch.setattr(sizing, "_command", lambda *words: [sys.executable, "-c", LOAD, *words])
    words = ["sizing", "--capacity", "--encoder", str(tmp_path / "tiny"), "--precisions", "fp32", "--lengths", "8,40"]
    words += ["--slo", "p90=100ms", "--probe-s", "0.5", "--keep", str(tmp_path / "kept"), "--out", str(out)]
    assert main(BENCHMARKS, words) == 0
    [found] = json.loads(out.read_text())["steps"].values()
    # A text takes 10 ms, and one in ten may wait for nine others.
    assert 50 < found["foretold_per_s"] < 100
    [point] = found["runs"]
    assert point["rate"] == pytest.approx(0.75 * found["foretold_per_s"], abs=0.01)
    assert (point["duration"], point["texts"]) == (0.5, 200)
    assert (found["measured_per_s"], found["confidence"]) == (50, "sure")
    assert f"| 50.0 | {found['foretold_per_s'] / 50:.2f} | sure |" in capsys.readouterr().out


@pytest.mark.long
def test_what_a_server_carries_is_foretold_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By three of five layers, and by the server with all of them under the load generator; the ratio is told."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(TINY))
    out, kept = tmp_path / "figures.json", tmp_path / "kept"
    words = ["sizing", "--capacity", "--encoder", str(tmp_path / "tiny"), "--precisions", "fp32", "--lengths", "8-40"]
    times = ["--slo", "p90=100ms", "--seconds", "0.1", "--probe-s", "0.5"]
    assert main(BENCHMARKS, [*words, *times, "--keep", str(kept), "--out", str(out)]) == 0
    [found] = json.loads(out.read_text())["steps"].values()
    assert (found["encoder"], found["precision"], found["lengths"]) == ("tiny", "fp32", "8-40")
    assert found["foretold_per_s"] > 0
    assert found["measured_per_s"] > 0
    assert {run["held"] for run in found["runs"]} == {True, False}
    ratio = found["foretold_per_s"] / found["measured_per_s"]
    assert f"| {found['measured_per_s']:.1f} | {ratio:.2f} | {found['confidence']} |" in capsys.readouterr().out
    assert [path.name for path in kept.iterdir()] == ["tiny-fp32"]


def test_texts_have_the_lengths_of_the_mix(models: Path) -> None:
    """As many of each as the mix has it, and not sorted."""
    load = SizingLoad(1.0, Lengths({8: 3.0, 32: 1.0}, ""), Objective(99, 100))
    texts = sizing._texts(models, load)
    words = [len(text.split()) > 12 for text in texts]
    assert Counter(words) == {False: 150, True: 50}
    assert any(words[:100])


def test_a_bundle_has_no_layers_to_make(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked for is said, in one line."""
    words = ["sizing", "--capacity", "--encoder", str(models / NAME), "--keep", str(tmp_path)]
    assert main(BENCHMARKS, [*words, "--out", str(tmp_path / "figures.json")]) == 1
    assert "takes the name of an encoder or a config.json, no bundle" in capsys.readouterr().err
