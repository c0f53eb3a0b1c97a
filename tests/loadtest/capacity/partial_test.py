"""About 10 seconds of CPU, most of it PyTorch's start and exports."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from loadtest.capacity.fit import Fit, Sample, Shape
from loadtest.capacity.size_cli import main

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "model_type": "bert",
    "vocab_size": 2000,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
SHAPES = [Shape(8, 1), Shape(32, 1), Shape(128, 1), Shape(512, 1), Shape(32, 4)]


def truth(layers: int, shape: Shape) -> float:
    """A cost that has the form of a transformer's: weights, products, attention."""
    tokens = shape.tokens * shape.texts
    return 80 + 0.5 * tokens + layers * (700 + 20 * tokens + 0.01 * tokens * shape.tokens)


def samples(noise: float, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(layers, shape, truth(layers, shape) * float(np.exp(rng.normal(0, noise))))
        for layers in (1, 2, 3)
        for shape in SHAPES
    ]


def test_three_layers_tell_of_twenty_four() -> None:
    """Without noise the fit is exact, at shapes that were measured and at others."""
    fit = Fit(samples(0.0, 1))
    for shape in (*SHAPES, Shape(20, 1), Shape(300, 1), Shape(16, 8)):
        assert fit.at(24, shape).us == pytest.approx(truth(24, shape), rel=1e-6)


def test_the_error_bars_hold_the_truth() -> None:
    """Twice the error that the fit expects of itself, in nine of ten cases, whatever the noise."""
    held = []
    for seed in range(40):
        fit = Fit(samples(0.03 if seed % 2 else 0.1, seed))
        for shape in SHAPES:
            found = fit.at(24, shape)
            held.append(abs(found.us / truth(24, shape) - 1) <= 2 * found.error)
    assert np.mean(held) >= 0.9


@pytest.mark.parametrize(
    "changes",
    [{}, pytest.param({"model_type": "albert", "embedding_size": 16}, marks=pytest.mark.long)],
    ids=["bert", "albert"],
)
def test_a_configuration_is_measured_here(
    changes: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own layers are exported, run and extrapolated; the row says so, with an error and the given price."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **changes}))
    words = ("--lengths", "8:3,64", "--rate", "20", "--slo", "p99=400ms", "--on", "here", "--seconds", "0.1", "--json")
    precision = ("--precision", "fp32") if changes else ()
    code = main([str(tmp_path), *words, *precision, "--price", "here=0.2", "--threads", "1"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [row["precision"] for row in found["candidates"]] == (["fp32"] if changes else ["fp32", "int8"])
    for row in found["candidates"]:
        assert (row["name"], row["basis"], row["holds"]) == ("here", "extrapolated", True)
        assert row["error"] > 0
        assert "runs of 1, 2, 3 of 5 layers" in row["facts"][0]
        assert row["price_per_hour"] == pytest.approx(0.2 * row["devices"])


def test_without_pytorch_the_rest_is_sized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is said with the command that brings it; where nothing else was asked for, that is the error."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    monkeypatch.setitem(sys.modules, "loadtest.capacity.partial", None)
    words = [str(tmp_path), "--lengths", "8", "--rate", "20", "--slo", "p99=50ms", "--on"]
    assert main([*words, "here,t4"]) == 0
    told = capsys.readouterr().out
    assert "not measured: the module" in told
    assert "--editable '.[cpu,export]'" in told
    assert main([*words, "here"]) == 2
    assert "--editable '.[cpu,export]'" in capsys.readouterr().err


def test_an_encoder_too_large_to_run_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is exported, with what it would need."""
    words = "encoder-481b --lengths 8 --rate 1 --slo p99=50ms --on here --precision fp32"
    assert main(words.split()) == 2
    assert "partial runs need about 346 GB of memory, but this machine has " in capsys.readouterr().err
