"""What the engine process does before it is ready, in this process."""

from __future__ import annotations

import pytest

from serving.bundle import BundleError
from serving.engine.base import LaneKind, ModelSpec
from serving.engine.wire import Load
from serving.engine.worker import prepare
from serving.records import ModelIndex
from tests.support.specs import model_spec


def spec(name: str, *, batch_invariant: bool, max_length: int = 100) -> ModelSpec:
    """A model for the fake engine."""
    special_ids = {"cls": 1, "sep": 2}
    return model_spec(name, batch_invariant=batch_invariant, max_length=max_length, special_ids=special_ids)


def test_every_model_is_measured_over_the_lengths_that_it_will_see() -> None:
    """The shortest texts, every bucket below the longest, and the longest itself; on the wide lane."""
    models = [spec("one", batch_invariant=True), spec("two", batch_invariant=False, max_length=512)]
    backend, ready = prepare(Load("fake", models, threads=2))
    assert [(point.model, point.tokens) for point in ready.warm_up] == [
        *[(0, tokens) for tokens in (8, 16, 32, 64, 100)],
        *[(1, tokens) for tokens in (8, 16, 32, 64, 128, 256, 512)],
    ]
    assert all(point.compute_us >= 0 for point in ready.warm_up)
    assert ready.lanes == list(backend.lanes()) == [LaneKind.WIDE, LaneKind.NARROW, LaneKind.NARROW]
    assert (ready.engine, ready.threads) == ("fake", 2)


def test_a_measurement_is_a_typical_one() -> None:
    """A fake engine that takes three milliseconds is seen to take about that long."""
    _, ready = prepare(Load("fake", [spec("one", batch_invariant=True, max_length=8)], threads=1, fake_ms=3))
    assert all(point.compute_us >= 3000 for point in ready.warm_up)


def test_a_model_that_cannot_answer_is_refused() -> None:
    """With the engine's own words."""
    with pytest.raises(BundleError, match=r"warm-up failed: .*told to fail"):
        prepare(Load("fake", [spec("one", batch_invariant=True)], threads=1, fake_faults={1: "raise"}))


def test_models_are_numbered_as_they_were_given() -> None:
    """Requests name them by that number."""
    _, ready = prepare(Load("fake", [spec(name, batch_invariant=True, max_length=8) for name in "abc"], threads=1))
    assert {ModelIndex(point.model) for point in ready.warm_up} == {0, 1, 2}


@pytest.mark.parametrize("max_length", [3, 7, 8, 16, 17])
def test_no_text_of_warm_up_is_longer_than_the_model_takes(max_length: int) -> None:
    """A model for very short texts is a model too."""
    _, ready = prepare(Load("fake", [spec("one", batch_invariant=True, max_length=max_length)], threads=1))
    assert max(point.tokens for point in ready.warm_up) == max_length
