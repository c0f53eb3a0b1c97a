"""Ragged token ids to the rectangular tensors that a graph takes, and the check of what it answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from serving.records import Batch

Tensors = dict[str, "NDArray[np.int32]"]


class Padder:
    """Makes `input_ids`, `attention_mask` and `token_type_ids`, each int32 [texts, longest].

    A single text, which is the common case, costs no copy: its ids are used where they lie, and the mask
    and segments are slices of constants.
    """

    def __init__(self, max_length: int, pad_id: int) -> None:
        self._ones = np.ones((1, max_length), np.int32)
        self._zeros = np.zeros((1, max_length), np.int32)
        self._pad_id = pad_id

    def tensors(self, batch: Batch) -> Tensors:
        """The batch's tensors, valid until the batch is gone."""
        if len(batch.texts) == 1:
            text = batch.texts[0]
            ids = np.frombuffer(text.ids, np.int32).reshape(1, -1)
            length = ids.shape[1]
            types = self._zeros[:, :length]
            if text.type_ids is not None:
                types = np.frombuffer(text.type_ids, np.int32).reshape(1, -1)
            return {"input_ids": ids, "attention_mask": self._ones[:, :length], "token_type_ids": types}
        shape = (len(batch.texts), batch.padded_length)
        ids = np.full(shape, self._pad_id, np.int32)
        mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, text in enumerate(batch.texts):
            length = len(text.ids)
            ids[row, :length] = text.ids
            mask[row, :length] = 1
            if text.type_ids is not None:
                types[row, :length] = text.type_ids
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def finite_rows(arrays: Sequence[NDArray[np.float32]], texts: int) -> list[bool]:
    """For each text, whether all its numbers in all outputs are finite.

    A sum is finite only if every number is (infinities of both signs make NaN), so one sum settles the
    common case; a sum that overflows is looked at number by number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        sums = [array.sum() for array in arrays]
    if all(map(math.isfinite, sums)):
        return [True] * texts
    rows = [np.isfinite(array).reshape(texts, -1).all(axis=1) for array in arrays]
    return [bool(row) for row in np.logical_and.reduce(rows)]
