from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bertserve.serving.engine.base import Batch, BatchOutput, EngineLoad, lanes_for
from bertserve.serving.engine.fake import FakeBackend, Fault, fake_vector
from bertserve.serving.engine.kinds.fake import ENGINE
from bertserve.serving.errors import EngineFault
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.specs import model_spec

SPEC = model_spec("fake")
ids = st.lists(st.integers(0, 30_521), min_size=1, max_size=40)
often = settings(derandomize=True, max_examples=60, deadline=None)


def vector(ids: list[int], types: list[int] | None = None) -> bytes:
    text = EncodedText(array("i", ids), None if types is None else array("i", types))
    return fake_vector(text, 8).tobytes()


def run(backend: FakeBackend, *texts: list[int]) -> BatchOutput:
    return backend.runner(0).run(Batch(ModelIndex(0), [EncodedText(array("i", ids)) for ids in texts]))


@given(ids, st.data())
@often
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
@often
def test_two_texts_have_two_answers(one: list[int], other: list[int]) -> None:
    """However little they differ."""
    assume(one != other)
    assert vector(one) != vector(other)


@given(ids, st.data())
@often
def test_segments_count(given_ids: list[int], data: st.DataObject) -> None:
    """No segments are all zero; any other ones change the answer."""
    types = data.draw(st.lists(st.integers(0, 1), min_size=len(given_ids), max_size=len(given_ids)))
    assert (vector(given_ids, types) == vector(given_ids)) is not any(types)


@given(ids)
@often
def test_an_answer_is_finite_and_never_zero(given_ids: list[int]) -> None:
    """It can be scaled like a real one."""
    values = np.frombuffer(vector(given_ids), np.float32)
    assert np.isfinite(values).all()
    assert np.abs(values).max() > 1e-3


def test_answers_repeat() -> None:
    """The same text has the same answer, alone and in a batch."""
    output = run(FakeBackend([SPEC], threads=1), [1, 2], [3])
    assert [row.tobytes() for row in output.arrays[0]] == [vector([1, 2]), vector([3])]
    assert output.finite == [True, True]


def test_it_has_every_tasks_shapes() -> None:
    """Outputs of one number a token are as long as the batch is padded, with the manifest's types."""
    output = run(FakeBackend([model_spec(size=2, task="fill_mask")], 1), [1, 2, 3], [4])
    assert [array.shape for array in output.arrays] == [(2, 3, 2), (2, 3, 2), (2, 3)]
    assert [array.dtype for array in output.arrays] == [np.int32, np.float32, np.float32]


def test_it_has_the_real_engines_lanes() -> None:
    """Its lanes are those of the models that it stands for."""
    models = [model_spec(batch_invariant=False)]
    assert FakeBackend(models, threads=2).lanes() == lanes_for(models, 2)


def test_a_nan_on_demand() -> None:
    """It spoils its own row and is reported."""
    output = run(FakeBackend([SPEC], 1, faults={13: Fault.NAN}), [1], [2, 13])
    assert output.finite == [True, False]
    assert np.isnan(output.arrays[0][1]).any()


@pytest.mark.parametrize("faults", ["13:raise", "13:exit,13:raise"])
def test_a_failure_on_demand(faults: str) -> None:
    """It is the whole batch's; of two faults for one token the last wins, as everywhere in the settings."""
    backend, _ = ENGINE.open(EngineLoad("fake", [SPEC], threads=1, options={"fake_faults": faults}))
    with pytest.raises(EngineFault, match="told to fail"):
        run(backend, [1], [13])


@pytest.mark.parametrize(("texts", "ms"), [(1, 2.0), (2, 4.0), (3, 5.0), (4, 6.0), (8, 12.0)])
def test_a_batch_takes_as_long_as_its_size_says(texts: int, ms: float) -> None:
    """What is named, linear between two sizes, in proportion above the largest."""
    assert FakeBackend([SPEC], 1, 2.0, batch_ms={4: 6.0, 2: 4.0})._delay_ms(texts) == ms
