from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import pytest

import bertserve.serving.engine.cpu.ort as server_engine
from bertserve.loadtest.benchmarks.raw_engine import RawEngine, session_options, tensors_of, ways
from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator.workload import find_bundle, make_texts
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from pathlib import Path

ENTRIES = ("session.intra_op.spin_duration_us",)


class FakeSession:
    """Takes what a session is made from and makes none."""

    options: Any = None

    def __init__(self, _: bytes, options: ort.SessionOptions, providers: list[str]) -> None:
        FakeSession.options = options
        assert providers == ["CPUExecutionProvider"]

    def disable_fallback(self) -> None:
        """As a session has it."""


def settings_of(options: ort.SessionOptions) -> dict[str, Any]:
    """Whatever can be read of session options."""
    plain = {
        name: getattr(options, name)
        for name in dir(ort.SessionOptions)
        if not name.startswith("_") and not callable(getattr(options, name))
    }
    entries = {name: options.get_session_config_entry(name) for name in ENTRIES}
    return {name: value for name, value in (plain | entries).items() if isinstance(value, (int, str, float, bool))}


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_served_options_are_the_server_s(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """The baseline runs with the very options of the server's engine, wherever those go."""
    monkeypatch.setattr(server_engine.ort, "InferenceSession", FakeSession)
    server_engine._session(model_spec(), b"", threads)
    assert settings_of(session_options("served", threads, 2)) == settings_of(FakeSession.options)


def test_default_options_leave_the_threads_alone_where_they_may() -> None:
    """A session as wide as the machine is ONNX Runtime's own; a narrower one is only made narrower."""
    assert session_options("default", 4, 4).intra_op_num_threads == ort.SessionOptions().intra_op_num_threads
    assert session_options("default", 1, 4).intra_op_num_threads == 1
    assert session_options("default", 2, 4).enable_mem_pattern


def test_tensors_have_the_shape_of_the_texts() -> None:
    """Ids as given, a mask of ones, segments of zeros, and only the inputs that the graph has."""
    tensors = tensors_of(["input_ids", "attention_mask"], [[1, 2, 3], [4, 5, 6]])
    assert sorted(tensors) == ["attention_mask", "input_ids"]
    assert tensors["input_ids"].dtype == np.int32
    assert tensors["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_shorter_texts_are_padded() -> None:
    """With zeros, which the mask hides."""
    tensors = tensors_of(["input_ids", "attention_mask"], [[1, 2, 3], [4]])
    assert tensors["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_an_unknown_input_is_an_error() -> None:
    """A graph that wants more than this benchmark knows is refused, not fed with guesses."""
    with pytest.raises(BenchError, match="pixels"):
        tensors_of(["input_ids", "pixels"], [[1]])


def test_batches_are_tried_only_where_the_server_may_batch() -> None:
    """The raw engine takes no short cut that the server must not take."""
    assert ways(batch_invariant=False) == ("wide", "narrow")
    assert ways(batch_invariant=True) == ("wide", "narrow", "wide8", "narrow2", "narrow8")


EVERY_WAY = [("default", "wide"), *(("served", way) for way in ways(batch_invariant=True))]


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param([("default", "wide"), ("served", "narrow8")], id="few"),
        pytest.param(EVERY_WAY, id="every", marks=pytest.mark.slow),
    ],
)
def test_every_way_is_measured(models: Path, asked: list[tuple[str, str]]) -> None:
    """A real artifact runs in every way, and its vector has length 1."""
    bundle = find_bundle(models, "fp32")
    texts = make_texts(bundle.path, 8, 32)
    engine = RawEngine()
    engine.open(str(bundle.artifact), list(bundle.inputs), 2, 2, {"8": [text.ids for text in texts]})
    assert np.linalg.norm(engine.vectors(8, 1)[0]) == pytest.approx(1, abs=1e-5)
    for options, way in asked:
        sample = engine.measure(options, way, 8, 0.01, 0.5)
        assert sample["requests"] > 0
        assert 0 < sample["p50_ms"] <= sample["p99_ms"]
