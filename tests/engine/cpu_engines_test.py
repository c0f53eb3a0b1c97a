"""What both engines on the CPU refuse: graphs that are not what their manifest says, and lanes that lack a model."""

from __future__ import annotations

import importlib
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bertserve.serving.engine.base import Batch
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.misfits import MISFITS, model_at
from tests.support.poison import TINY_SIZE, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = EncodedText(array("i", [7, 9] * 4))
FIRST, SECOND = ModelIndex(0), ModelIndex(1)
UNSEEN = {"one-more-input", "unknown-operator"}
"""Misfits that no output needs: OpenVINO leaves such parts of a graph out."""


@pytest.fixture(params=["ort.OrtCpuBackend", "openvino.OpenVinoBackend"], ids=["onnxruntime", "openvino"])
def engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    module, _, name = request.param.partition(".")
    if module == "openvino":
        pytest.importorskip("openvino", reason="the extra `openvino` is not installed")
    found: Callable[..., Any] = getattr(importlib.import_module(f"bertserve.serving.engine.cpu.{module}"), name)
    return found


def test_a_small_honest_model_is_taken(engine: Callable[..., Any], tmp_path: Path) -> None:
    """The refusals below are of what is wrong with theirs."""
    output = engine([model_at(tmp_path, tiny_model())], 1).runner(0).run(Batch(FIRST, [TEXT]))
    np.testing.assert_allclose(output.arrays[0], [[8] * TINY_SIZE])


def test_a_model_held_once_is_not_on_narrow_lanes(engine: Callable[..., Any], tmp_path: Path) -> None:
    """The scheduler never sends it there; if it did, that batch alone would fail."""
    models = [model_at(tmp_path, tiny_model(), narrow=False), model_at(tmp_path, tiny_model())]
    runner = engine(models, 2).runner(1)
    with pytest.raises(EngineFault, match="does not hold it"):
        runner.run(Batch(FIRST, [TEXT]))
    assert runner.run(Batch(SECOND, [TEXT])).arrays[0].shape == (1, TINY_SIZE)


def test_bytes_that_changed_since_the_check_are_not_loaded(engine: Callable[..., Any], tmp_path: Path) -> None:
    """What is loaded is what was hashed."""
    with pytest.raises(BundleError, match="SHA-256"):
        engine([model_at(tmp_path, tiny_model(), sha256="0" * 64)], 1)


@pytest.mark.parametrize("case", MISFITS)
def test_a_graph_that_does_not_fit_its_manifest_is_refused(
    engine: Callable[..., Any], tmp_path: Path, case: str
) -> None:
    """Before the first request, and with one sentence that names the file."""
    if case in UNSEEN and "openvino" in engine.__module__:
        engine([model_at(tmp_path, MISFITS[case][0]())], 1)
        return
    make, sentence = MISFITS[case]
    with pytest.raises(BundleError, match=sentence) as refused:
        engine([model_at(tmp_path, make())], 1)
    assert "model.onnx" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_size_than_the_manifests_is_refused(engine: Callable[..., Any], tmp_path: Path) -> None:
    """Answers would have other dimensions than clients were told."""
    with pytest.raises(BundleError, match="outputs"):
        engine([model_at(tmp_path, tiny_model(), TINY_SIZE + 1)], 1)
