from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serving.engine.base import Batch, Load
from serving.engine.fake import FakeBackend, fake_vector
from serving.engine.kinds.fake import ENGINE
from serving.errors import EngineFault
from serving.records import EncodedText, ModelIndex
from tests.support.specs import model_spec

ids = st.lists(st.integers(0, 30_521), min_size=1, max_size=40)


def vector(ids: list[int], types: list[int] | None = None) -> bytes:
    """The answer's bytes."""
    text = EncodedText(array("i", ids), None if types is None else array("i", types))
    return fake_vector(text, 8).tobytes()


@given(ids, st.data())
@settings(derandomize=True, max_examples=60, deadline=None)
def test_every_change_of_ids_changes_the_answer(given_ids: list[int], data: st.DataObject) -> None:
    """One id another, two ids exchanged, one too few or too many: a mixed-up answer is always seen."""
    at, other = (data.draw(st.integers(0, len(given_ids) - 1)) for _ in range(2))
    replaced = given_ids.copy()
    replaced[at] = data.draw(st.integers(0, 30_521))
    exchanged = given_ids.copy()
    exchanged[at], exchanged[other] = given_ids[other], given_ids[at]
    for changed in (replaced, exchanged, given_ids[:-1] or [1, 1], [*given_ids, 0], given_ids[::-1]):
        assert (vector(changed) == vector(given_ids)) is (changed == given_ids)


@given(ids, ids)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_two_texts_have_two_answers(one: list[int], other: list[int]) -> None:
    """However little they differ."""
    assume(one != other)
    assert vector(one) != vector(other)


@given(ids, st.data())
@settings(derandomize=True, max_examples=40, deadline=None)
def test_segments_count(given_ids: list[int], data: st.DataObject) -> None:
    """No segments are all zero; any other ones change the answer."""
    types = data.draw(st.lists(st.integers(0, 1), min_size=len(given_ids), max_size=len(given_ids)))
    assert (vector(given_ids, types) == vector(given_ids)) is not any(types)


@given(ids)
@settings(derandomize=True, max_examples=40, deadline=None)
def test_an_answer_is_finite_and_never_zero(given_ids: list[int]) -> None:
    """It can be scaled like a real one."""
    values = np.frombuffer(vector(given_ids), np.float32)
    assert np.isfinite(values).all()
    assert np.abs(values).max() > 1e-3


@pytest.mark.parametrize(("texts", "ms"), [(1, 2.0), (2, 4.0), (3, 5.0), (4, 6.0), (8, 12.0)])
def test_a_batch_takes_as_long_as_its_size_says(texts: int, ms: float) -> None:
    """What is named, linear between two sizes, in proportion above the largest."""
    backend = FakeBackend([model_spec()], 1, 2.0, batch_ms={4: 6.0, 2: 4.0})
    assert backend._delay_ms(texts) == ms


def test_of_two_faults_for_one_token_the_last_wins() -> None:
    """As everywhere in the settings."""
    load = Load("fake", [model_spec(size=8)], threads=1, options={"fake_faults": "1:exit,1:raise"})
    backend, _ = ENGINE.open(load)
    with pytest.raises(EngineFault, match="told to fail"):
        backend.runner(0).run(Batch(ModelIndex(0), [EncodedText(array("i", [1]))]))
