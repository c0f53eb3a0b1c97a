"""The engine's small parts: lanes, padding, the check of numbers, and the fake engine."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.base import MOST_LANES, Batch, LaneKind, lanes_for
from serving.engine.batches import Padder, finite_rows
from serving.engine.fake import FakeBackend, Fault, fake_vector
from serving.errors import EngineFault
from serving.records import EncodedText, ModelIndex
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from serving.engine.specs import ModelSpec

FIRST = ModelIndex(0)


def spec(*, batch_invariant: bool = True) -> ModelSpec:
    """A model for the fake engine."""
    return model_spec("fake", batch_invariant=batch_invariant, vocab_size=100, special_ids={"pad": 7})


def text(*ids: int, types: tuple[int, ...] | None = None) -> EncodedText:
    """A text of these ids."""
    return EncodedText(array("i", ids), None if types is None else array("i", types))


def test_lanes_of_large_batch_invariant_models() -> None:
    """Models that are batched need one wide lane and nothing else."""
    assert lanes_for([spec(), spec()], threads=8) == [LaneKind.WIDE]


def test_lanes_of_models_run_text_by_text() -> None:
    """One model that is not batch-invariant, or one that is small, brings a narrow lane for each core."""
    for other in (spec(batch_invariant=False), msgspec.structs.replace(spec(), copied=True)):
        assert lanes_for([spec(), other], threads=3) == [LaneKind.WIDE, *[LaneKind.NARROW] * 3]


def test_lanes_of_one_core() -> None:
    """On one core a narrow lane would be the wide one again."""
    assert lanes_for([spec(batch_invariant=False)], threads=1) == [LaneKind.WIDE]


def test_lanes_are_bounded() -> None:
    """However many cores there are, there are never more lanes than sockets for them."""
    assert len(lanes_for([spec(batch_invariant=False)], threads=256)) == MOST_LANES


def test_padding_of_one_text() -> None:
    """A single text has no padding: its mask is all ones and its segments all zeros."""
    tensors = Padder(spec()).tensors(Batch(FIRST, [text(5, 6)]))
    assert {name: values.tolist() for name, values in tensors.items()} == {
        "input_ids": [[5, 6]],
        "attention_mask": [[1, 1]],
        "token_type_ids": [[0, 0]],
    }


def test_padding_of_one_pair() -> None:
    """The segments of a pair stay."""
    tensors = Padder(spec()).tensors(Batch(FIRST, [text(5, 6, types=(0, 1))]))
    assert tensors["token_type_ids"].tolist() == [[0, 1]]


def test_padding_of_several_texts() -> None:
    """Shorter texts are filled up with the padding id, masked out."""
    tensors = Padder(spec()).tensors(Batch(FIRST, [text(5), text(1, 2, 3, types=(0, 1, 1))]))
    assert {name: values.tolist() for name, values in tensors.items()} == {
        "input_ids": [[5, 7, 7], [1, 2, 3]],
        "attention_mask": [[1, 0, 0], [1, 1, 1]],
        "token_type_ids": [[0, 0, 0], [0, 1, 1]],
    }


def test_a_graph_without_segments_gets_none() -> None:
    """DistilBERT and RoBERTa know no segments; ONNX Runtime refuses an input that the graph does not have."""
    without = model_spec(segments=False)
    assert set(Padder(without).tensors(Batch(FIRST, [text(5), text(6, 7)]))) == {"input_ids", "attention_mask"}


def test_mask_positions() -> None:
    """Where each text's mask tokens stand, in order; what is left of a row is 0."""
    padder = Padder(model_spec(task="fill_mask", special_ids={"pad": 0, "mask": 9}))
    batch = Batch(FIRST, [text(1, 9, 2, 9), text(9), text(3)])
    assert padder.tensors(batch)["mask_positions"].tolist() == [[1, 3], [0, 0], [0, 0]]
    assert padder.tensors(Batch(FIRST, [text(3, 4)]))["mask_positions"].tolist() == [[0]]


def test_the_fake_engine_has_every_tasks_shapes() -> None:
    """Outputs of one number a token are as long as the batch is padded, with the manifest's types."""
    model = model_spec(size=2, task="fill_mask")
    output = FakeBackend([model], 1).runner(0).run(Batch(FIRST, [text(1, 2, 3), text(4)]))
    assert [array.shape for array in output.arrays] == [(2, 3, 2), (2, 3, 2), (2, 3)]
    assert [array.dtype for array in output.arrays] == [np.int32, np.float32, np.float32]


@given(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=32), min_size=1, max_size=6))
def test_padding_loses_nothing(rows: list[list[int]]) -> None:
    """Behind the mask stand exactly the ids, as int32 and in C order, as graphs want them."""
    tensors = Padder(spec()).tensors(Batch(FIRST, [text(*row) for row in rows]))
    for row, ids, mask in zip(rows, tensors["input_ids"], tensors["attention_mask"], strict=True):
        assert ids[mask == 1].tolist() == row
        assert mask.sum() == len(row)
    assert {values.dtype for values in tensors.values()} == {np.dtype(np.int32)}
    assert len({values.shape for values in tensors.values()}) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(bad: float) -> None:
    """A NaN or an infinity spoils its own row and no other, in any output."""
    first, second = np.ones((4, 3), np.float32), np.ones((4, 2, 2), np.float32)
    first[1, 2], second[3, 0, 1] = bad, bad
    assert finite_rows([first, second], 4) == [True, False, True, False]


def test_rows_with_infinities_of_both_signs() -> None:
    """Infinities do not cancel out."""
    assert finite_rows([np.array([[np.inf, -np.inf], [1, 2]], np.float32)], 2) == [False, True]


def test_rows_whose_sum_overflows() -> None:
    """Numbers that are finite stay so, even if their sum is not."""
    largest = np.finfo(np.float32).max
    assert finite_rows([np.full((2, 8), largest, np.float32)], 2) == [True, True]


def test_fake_answers_tell_texts_apart() -> None:
    """Another id, place, length or segment gives another answer."""
    texts = [text(1, 2), text(2, 1), text(1, 3), text(1, 2, 0), text(1, 2, types=(0, 1)), text(1)]
    vectors = {fake_vector(one, 8).tobytes() for one in texts}
    assert len(vectors) == len(texts)


def test_fake_answers_repeat() -> None:
    """The same text has the same answer, alone and in a batch."""
    runner = FakeBackend([spec()], threads=1).runner(0)
    batch = Batch(FIRST, [text(1, 2), text(3)])
    output = runner.run(batch)
    np.testing.assert_array_equal(output.arrays[0], [fake_vector(one, 8) for one in batch.texts])
    assert output.finite == [True, True]


def test_fake_nan() -> None:
    """A NaN on demand spoils its own row and is reported."""
    runner = FakeBackend([spec()], 1, faults={13: Fault.NAN}).runner(0)
    output = runner.run(Batch(FIRST, [text(1), text(2, 13)]))
    assert output.finite == [True, False]
    assert np.isnan(output.arrays[0][1]).any()


def test_fake_raise() -> None:
    """A failure on demand is the whole batch's."""
    with pytest.raises(EngineFault):
        FakeBackend([spec()], 1, faults={13: Fault.RAISE}).runner(0).run(Batch(FIRST, [text(1), text(13)]))


def test_fake_has_the_real_engines_lanes() -> None:
    """Its lanes are those of the models that it stands for."""
    models = [spec(batch_invariant=False)]
    assert FakeBackend(models, threads=2).lanes() == lanes_for(models, 2)
