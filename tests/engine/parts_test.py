"""The shared memory and the messages between the processes of a model in parts; under a second of CPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from serving.engine.base import LaneKind, lanes_for
from serving.engine.parts import chain
from serving.engine.parts.chain import Interface
from serving.engine.parts.exchange import Arena, Step, pair, receive, send
from serving.engine.parts.processes import shares
from serving.engine.specs import PartFile
from serving.errors import BundleError
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.specs import ModelSpec


def in_parts(count: int) -> ModelSpec:
    parts = tuple(PartFile(f"{number}.onnx", "") for number in range(1, count))
    return model_spec(parts=parts, split_by="layers")


def test_an_arena_grows_for_both_of_its_users() -> None:
    """What one puts in, the other reads where it lies, also beyond what it had mapped before."""
    descriptor = os.memfd_create("arena")
    writer, reader = Arena(descriptor), Arena(descriptor)
    small = np.arange(6, dtype=np.int32).reshape(2, 3)
    placed, end = writer.put([("ids", small)], 0)
    np.testing.assert_array_equal(reader.get(placed)["ids"], small)
    large = np.random.default_rng(0).normal(size=(3, 1 << 20)).astype(np.float32)
    more, _ = writer.put([("hidden", large), ("empty", np.zeros((0, 4), np.float16))], end)
    found = reader.get([*placed, *more])
    np.testing.assert_array_equal(found["ids"], small)
    np.testing.assert_array_equal(found["hidden"], large)
    assert (found["empty"].shape, found["empty"].dtype) == ((0, 4), np.float16)
    os.close(descriptor)


def test_a_message_and_the_end_of_its_sender() -> None:
    """A step arrives as it was sent; a socket whose other end has closed says so."""
    ours, theirs = pair()
    placed, _ = Arena(os.memfd_create("arena")).put([("ids", np.zeros((1, 2), np.int32))], 0)
    step = Step(3, 64, placed, "")
    send(ours, step)
    assert receive(theirs, Step) == step
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs, Step)
    theirs.close()


@pytest.mark.parametrize(("threads", "count", "expected"), [(2, 2, [1, 1]), (7, 3, [2, 2, 3]), (1, 4, [1] * 4)])
def test_parts_share_the_cores(threads: int, count: int, expected: Sequence[int]) -> None:
    """As evenly as whole threads allow, and one at least."""
    assert shares(threads, count) == expected


def test_a_model_in_stages_has_a_lane_for_each() -> None:
    """So that as many batches are under way at once, however many cores there are."""
    for threads in (1, 2, 8):
        assert lanes_for([in_parts(3)], threads) == [LaneKind.WIDE, *[LaneKind.NARROW] * 3]


def test_parts_that_do_not_fit_together_are_refused() -> None:
    """What a part takes must be an input or come from a part before it, in the same type."""
    model = in_parts(2)
    first = Interface([(name, "tensor(int32)") for name in model.inputs], [("hidden", "tensor(float)", (-1, -1, 8))])
    shapes = [(spec.name, "tensor(float)", spec.shape) for spec in model.outputs]
    chain.check(model, [first, Interface([("hidden", "tensor(float)")], shapes)])
    for wrong in ([("hidden", "tensor(float16)")], [("other", "tensor(float)")]):
        with pytest.raises(BundleError, match="part 2 of 2 reads"):
            chain.check(model, [first, Interface(wrong, shapes)])
