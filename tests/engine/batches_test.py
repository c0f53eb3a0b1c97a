"""Lanes, padding, the check of numbers, and several texts through a runner that may compute them one by one only."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.engine.base import MAX_LANES, Batch, BatchOutput, LaneKind, lanes_for
from bertserve.serving.engine.batches import OneByOne, Padder, finite_rows
from bertserve.serving.errors import EngineFault
from bertserve.serving.records import EncodedText, ModelIndex
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.engine.specs import ModelSpec

FIRST = ModelIndex(0)
SPEC = model_spec(special_ids={"pad": 7})
ALONE = model_spec(batch_invariant=False)
WIDE = model_spec(narrow=False)
FILLS_MASKS = model_spec(task="fill_mask", special_ids={"pad": 0, "mask": 9})


def text(*ids: int, types: tuple[int, ...] | None = None) -> EncodedText:
    return EncodedText(array("i", ids), None if types is None else array("i", types))


@pytest.mark.parametrize(
    ("models", "threads", "narrow"),
    [
        pytest.param([WIDE, WIDE], 8, 0, id="no-second-copy-of-any"),
        pytest.param([WIDE, SPEC], 3, 3, id="a-second-copy-of-one"),
        pytest.param([ALONE], 1, 0, id="on-one-core-a-narrow-lane-would-be-the-wide-one"),
        pytest.param([ALONE], 256, MAX_LANES - 1, id="no-more-than-sockets"),
    ],
)
def test_lanes(models: list[ModelSpec], threads: int, narrow: int) -> None:
    """One wide lane, and a narrow one for each core where a model wants it."""
    assert lanes_for(models, threads) == [LaneKind.WIDE, *[LaneKind.NARROW] * narrow]


@pytest.mark.parametrize(
    ("spec", "texts", "expected"),
    [
        pytest.param(
            SPEC,
            [text(5, 6)],
            {"input_ids": [[5, 6]], "attention_mask": [[1, 1]], "token_type_ids": [[0, 0]]},
            id="one-text-has-no-padding",
        ),
        pytest.param(
            SPEC,
            [text(5, 6, types=(0, 1))],
            {"input_ids": [[5, 6]], "attention_mask": [[1, 1]], "token_type_ids": [[0, 1]]},
            id="a-pair-keeps-its-segments",
        ),
        pytest.param(
            SPEC,
            [text(5), text(1, 2, 3, types=(0, 1, 1))],
            {
                "input_ids": [[5, 7, 7], [1, 2, 3]],
                "attention_mask": [[1, 0, 0], [1, 1, 1]],
                "token_type_ids": [[0, 0, 0], [0, 1, 1]],
            },
            id="shorter-texts-are-filled-up-and-masked-out",
        ),
        pytest.param(
            model_spec(segments=False),
            [text(5), text(6)],
            {"input_ids": [[5], [6]], "attention_mask": [[1], [1]]},
            id="a-graph-without-segments-gets-none",
        ),
        pytest.param(
            model_spec(unattended=True, segments=False),
            [text(5, ~4, ~4)],
            {"input_ids": [[5, 4, 4]], "attention_mask": [[1, 0, 0]]},
            id="what-attention-ignores-is-masked-out",
        ),
        pytest.param(
            model_spec(unattended=True, segments=False, special_ids={"pad": 7}),
            [text(5, 6, ~4), text(3)],
            {"input_ids": [[5, 6, 4], [3, 7, 7]], "attention_mask": [[1, 1, 0], [1, 0, 0]]},
            id="in-a-batch-too",
        ),
    ],
)
def test_padding(spec: ModelSpec, texts: list[EncodedText], expected: dict[str, list[list[int]]]) -> None:
    """A graph gets exactly the inputs that it has."""
    assert {name: values.tolist() for name, values in Padder(spec).tensors(Batch(FIRST, texts)).items()} == expected


@pytest.mark.parametrize(
    ("texts", "positions"), [([text(1, 9, 2, 9), text(9), text(3)], [[1, 3], [0, 0], [0, 0]]), ([text(3, 4)], [[0]])]
)
def test_mask_positions(texts: list[EncodedText], positions: list[list[int]]) -> None:
    """Where each text's mask tokens stand, in order; what is left of a row is 0."""
    assert Padder(FILLS_MASKS).tensors(Batch(FIRST, texts))["mask_positions"].tolist() == positions


@given(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=32), min_size=1, max_size=6))
def test_padding_loses_nothing(rows: list[list[int]]) -> None:
    """Behind the mask stand exactly the ids, as int32 and in C order, as graphs want them."""
    tensors = Padder(SPEC).tensors(Batch(FIRST, [text(*row) for row in rows]))
    for row, ids, mask in zip(rows, tensors["input_ids"], tensors["attention_mask"], strict=True):
        assert ids[mask == 1].tolist() == row
        assert mask.sum() == len(row)
    assert {values.dtype for values in tensors.values()} == {np.dtype(np.int32)}
    assert len({values.shape for values in tensors.values()}) == 1


@pytest.mark.parametrize(
    ("row", "finite"),
    [
        pytest.param([np.nan, 1], False, id="nan"),
        pytest.param([np.inf, 1], False, id="inf"),
        pytest.param([-np.inf, 1], False, id="-inf"),
        pytest.param([np.inf, -np.inf], False, id="infinities-do-not-cancel-out"),
        pytest.param([np.finfo(np.float32).max] * 2, True, id="a-sum-may-overflow"),
    ],
)
def test_rows_that_are_not_finite(row: list[float], *, finite: bool) -> None:
    """What is not a finite number spoils its own row and no other, in any output."""
    first, second = np.ones((4, 2), np.float32), np.ones((4, 2, 2), np.float32)
    first[1], second[3, 0] = row, row
    assert finite_rows([first, second], 4) == [True, finite, True, finite]


BAD = 99


class Echo:
    """Answers each text's first token, and every token, but refuses `BAD`; remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, batch: Batch) -> BatchOutput:
        self.sizes.append(len(batch.texts))
        if any(BAD in text.ids for text in batch.texts):
            raise EngineFault("bad")
        first = np.array([[text.ids[0]] for text in batch.texts], np.float32)
        tokens = np.zeros((len(batch.texts), batch.padded_length, 2), np.float32)
        for row, text in enumerate(batch.texts):
            tokens[row, : len(text.ids)] = np.array(text.ids)[:, None]
        return BatchOutput([first, tokens], [text.ids[0] != 0 for text in batch.texts], 10.0 * len(batch.texts))


def one_by_one(spec: ModelSpec, texts: Sequence[Sequence[int]]) -> tuple[BatchOutput, list[int]]:
    """The output, and the sizes of what the runner itself was given."""
    echo = Echo()
    return OneByOne(echo, [spec]).run(Batch(FIRST, [text(*ids) for ids in texts])), echo.sizes


def test_each_text_is_computed_alone() -> None:
    """Nothing of its neighbours reaches it; answers, flags, times and padding are as of a batch."""
    output, sizes = one_by_one(ALONE, [[1, 2, 3], [0], [5, 6]])
    assert sizes == [1, 1, 1]
    assert output.arrays[0].tolist() == [[1], [0], [5]]
    assert output.arrays[1][:, :, 0].tolist() == [[1, 2, 3], [0, 0, 0], [5, 6, 0]]
    assert (output.finite, output.compute_us) == ([True, False, True], 30.0)


@pytest.mark.parametrize(("spec", "texts"), [(SPEC, [[1], [2, 3]]), (ALONE, [[1]])], ids=["batched", "a-single-text"])
def test_what_may_run_together_does(spec: ModelSpec, texts: Sequence[Sequence[int]]) -> None:
    """A batch-invariant model gets the batch as it is, and a single text is passed on."""
    output, sizes = one_by_one(spec, texts)
    assert sizes == [len(texts)]
    assert output.arrays[0].tolist() == [[text[0]] for text in texts]


def test_a_fault_is_the_whole_groups() -> None:
    """Whoever sent it finds out which text it was by sending each alone."""
    with pytest.raises(EngineFault):
        one_by_one(ALONE, [[1], [BAD]])
