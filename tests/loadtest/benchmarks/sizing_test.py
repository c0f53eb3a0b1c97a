"""What partial runs foretell of a whole encoder, from samples that follow a rule."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loadtest.benchmarks.exports.__main__ import BENCHMARKS
from loadtest.benchmarks.exports.sizing import OTHERS, compare
from loadtest.benchmarks.runner import main
from loadtest.capacity.costs import LENGTHS
from loadtest.capacity.encoder import encoder_of
from loadtest.capacity.fit import Sample, Shape
from loadtest.capacity.measure import LAYERS
from serving.engine.base import LaneKind

DOCS = Path(__file__).parents[3] / "docs" / "benchmarks"


def test_few_layers_foretell_all_of_them() -> None:
    """Where each layer takes as long as the next, what is foretold is what the whole takes, at other lengths too."""
    layers = (*LAYERS, encoder_of("bert-base").layers)
    shapes = (*(Shape(tokens, 1) for tokens in LENGTHS), *OTHERS)
    samples = [
        Sample(count, shape, 100.0 + 50.0 * count * shape.tokens * shape.texts, 1.0)
        for count in layers
        for shape in shapes
    ]
    cells = compare("bert-base", "fp32", {LaneKind.WIDE: samples})
    assert [(cell["tokens"], cell["texts"]) for cell in cells] == [tuple(shape) for shape in shapes]
    assert [cell["known"] for cell in cells] == [shape not in OTHERS for shape in shapes]
    for cell in cells:
        assert cell["foretold_ms"] == pytest.approx(cell["measured_ms"], rel=0.05)


def test_the_page_has_the_table_of_its_figures(tmp_path: Path) -> None:
    """What is written by hand around it stays."""
    for name in ("sizing.json", "sizing.md"):
        shutil.copy(DOCS / name, tmp_path)
    assert main(BENCHMARKS, ["sizing", "--page-only", "--out", str(tmp_path / "sizing.json")]) == 0
    assert (tmp_path / "sizing.md").read_text() == (DOCS / "sizing.md").read_text()
