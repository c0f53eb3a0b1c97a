"""The comparison of sparse vectors over HTTP, without servers: what is compared, and what the page says."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from loadtest.benchmarks.exports.__main__ import BENCHMARKS
from loadtest.benchmarks.exports.vectors_serving import LOADS, OURS, PACKAGES, PRECISIONS, THEIRS, key, least_cosines
from loadtest.benchmarks.runner import main
from loadtest.benchmarks.store import Store
from loadtest.errors import BenchError
from loadtest.report.sample import Sample

if TYPE_CHECKING:
    from pathlib import Path

ONE, MANY = THEIRS


def page(folder: Path) -> str:
    """The page of the figures in a folder."""
    assert main(BENCHMARKS, ["vectors", "--page-only", "--out", str(folder / "vectors.json")]) == 0
    return (folder / "vectors.md").read_text()


def round_of(rates: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """A round in which the systems answer so many texts per second in fp32 and in INT8."""
    return {
        key(system, precision): astuple(Sample(100, 100, per_s, 1.0, 1.0, 1.0))
        for system, both in rates.items()
        for precision, per_s in zip(PRECISIONS, both, strict=True)
    }


def test_the_server_is_compared_with_the_faster_way_of_the_peer(tmp_path: Path) -> None:
    """Each precision with the same, and INT8 with both, at each load."""
    rounds = ({OURS: (60.0, 120.0), ONE: (20.0, 30.0), MANY: (30.0, 60.0)},) * 2
    mixed = ({OURS: (50.0, 100.0), ONE: (25.0, 80.0), MANY: (20.0, 8.0)},) * 2
    store = Store(tmp_path / "vectors.json", {"machine": {"CPU": "a processor"}, "onnxruntime": "1.31.1", "threads": 2})
    measured = dict(zip(LOADS, ([*map(round_of, each)] for each in (rounds, mixed)), strict=True))
    store.keep("serving", {"versions": dict.fromkeys(PACKAGES, "1.0"), "cosines": {}, "rounds": measured})
    text = page(tmp_path)
    assert "answers 4.00 and 4.00 times as many texts/s as Sentence Transformers' ONNX backend in fp32 (" in text
    assert "With that backend in INT8, it is 2.00 and 1.25 times as many." in text
    assert "\n| bertserve | 60.0 | 50.0 | 120.0 | 100.0 |\n" in text
    assert "\n| SparseEncoder, batch 8 | 30.0 | 20.0 | 60.0 | 8.0 |\n" in text
    assert "\n| bertserve / better SparseEncoder | 2.00 | 2.00 | 2.00 | 1.25 |\n" in text


def test_a_server_of_other_vectors_is_not_compared() -> None:
    """A little in INT8 is its quantization; in fp32 it is another model."""
    exact, other = np.array([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]), np.array([[1.0, 0.2, 2.0], [0.0, 3.0, 0.0]])
    vectors = {key(ONE, "fp32"): exact, key(OURS, "INT8"): other}
    found = least_cosines(vectors)
    assert found == {key(ONE, "fp32"): pytest.approx(1.0), key(OURS, "INT8"): pytest.approx(5 / (5 * 5.04) ** 0.5)}
    with pytest.raises(BenchError, match=r"bertserve, fp32 returns other vectors than SparseEncoder, batch 1, fp32"):
        least_cosines({**vectors, key(OURS, "fp32"): other})


def test_a_peer_that_is_not_installed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any export."""
    words = ["vectors", "--only", "serving", "--environments", str(tmp_path), "--out", str(tmp_path / "vectors.json")]
    assert main(BENCHMARKS, words) == 1
    assert capsys.readouterr().err.endswith("make it with `make build/peers/sentence-transformers/.installed`\n")
