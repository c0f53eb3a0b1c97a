"""Several texts at once through a runner that may compute them one by one only."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
import pytest

from serving.engine.base import Batch, BatchOutput
from serving.engine.batches import OneByOne
from serving.errors import EngineFault
from serving.records import EncodedText, ModelIndex
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCHED, ALONE = ModelIndex(0), ModelIndex(1)
BAD = 99


class Echo:
    """Answers each text's first token, and every token; a batch of several is remembered."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def run(self, batch: Batch) -> BatchOutput:
        """Refuses the token `BAD`."""
        self.sizes.append(len(batch.texts))
        if any(BAD in text.ids for text in batch.texts):
            raise EngineFault("bad")
        first = np.array([[text.ids[0]] for text in batch.texts], np.float32)
        tokens = np.zeros((len(batch.texts), batch.padded_length, 2), np.float32)
        for row, text in enumerate(batch.texts):
            tokens[row, : len(text.ids)] = np.array(text.ids)[:, None]
        return BatchOutput([first, tokens], [text.ids[0] != 0 for text in batch.texts], 10.0 * len(batch.texts))


def run(model: ModelIndex, texts: Sequence[Sequence[int]]) -> tuple[BatchOutput, list[int]]:
    """The output, and the sizes of what the runner itself was given."""
    echo = Echo()
    runner = OneByOne(echo, [model_spec(batch_invariant=True), model_spec(batch_invariant=False)])
    return runner.run(Batch(model, [EncodedText(array("i", text)) for text in texts])), echo.sizes


def test_each_text_is_computed_alone() -> None:
    """Nothing of its neighbours reaches it; answers, flags and times are those of all of them."""
    output, sizes = run(ALONE, [[1, 2, 3], [0], [5, 6]])
    assert sizes == [1, 1, 1]
    assert output.arrays[0].tolist() == [[1], [0], [5]]
    assert output.finite == [True, False, True]
    assert output.compute_us == 30.0


def test_outputs_of_a_token_each_are_padded() -> None:
    """As those of a batch are."""
    output, _ = run(ALONE, [[1, 2, 3], [4]])
    assert output.arrays[1][:, :, 0].tolist() == [[1, 2, 3], [4, 0, 0]]


@pytest.mark.parametrize(("model", "texts"), [(BATCHED, [[1], [2, 3]]), (ALONE, [[1]])])
def test_what_may_run_together_does(model: ModelIndex, texts: Sequence[Sequence[int]]) -> None:
    """A batch-invariant model gets the batch as it is, and a single text is passed on."""
    output, sizes = run(model, texts)
    assert sizes == [len(texts)]
    assert output.arrays[0].tolist() == [[text[0]] for text in texts]


def test_a_fault_is_the_whole_groups() -> None:
    """Whoever sent it finds out which text it was by sending each alone."""
    with pytest.raises(EngineFault):
        run(ALONE, [[1], [BAD]])
