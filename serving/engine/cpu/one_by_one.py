"""Text by text through a runner whose model does not answer the same in company.

A lane that is busy is given several short texts at once all the same: one frame, one wake-up and one answer for
all of them cost the server and the lane's thread little more than for a single one, since whatever runs between
two inferences runs with cold caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from serving.records import Batch, BatchOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.base import Runner
    from serving.records import Array, ModelSpec


class OneByOne:
    """A runner that computes each text alone where its model is not batch-invariant."""

    def __init__(self, runner: Runner, models: Sequence[ModelSpec]) -> None:
        """Wraps a runner.

        Args:
            runner: What computes.
            models: What it has loaded.
        """
        self._runner = runner
        self._batched = [model.batch_invariant for model in models]

    def run(self, batch: Batch) -> BatchOutput:
        """Runs a batch, together or one by one.

        Raises:
            EngineFault: One of its texts failed.
        """
        if len(batch.texts) == 1 or self._batched[batch.model]:
            return self._runner.run(batch)
        outputs = [self._runner.run(Batch(batch.model, [text])) for text in batch.texts]
        return BatchOutput(
            arrays=[_stacked(arrays) for arrays in zip(*[output.arrays for output in outputs], strict=True)],
            finite=[flag for output in outputs for flag in output.finite],
            compute_us=sum(output.compute_us for output in outputs),
        )


def _stacked(arrays: Sequence[Array]) -> Array:
    """Arrays of one text each as one array; an output of a token each is padded to the longest text."""
    if len({array.shape[1:] for array in arrays}) == 1:
        return cast("Array", np.concatenate(arrays))
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    padded = [np.pad(array, [(0, 0), (0, longest - array.shape[1]), *rest]) for array in arrays]
    return cast("Array", np.concatenate(padded))
