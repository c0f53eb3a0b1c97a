"""Ragged token ids to the rectangular tensors that a graph takes, and the check of what it answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from serving.records import IDS, MASK, POSITIONS, TYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from serving.records import Array, Batch, ModelSpec

Tensors = dict[str, "NDArray[np.int32]"]


class Padder:
    """Makes a graph's inputs.

    `input_ids`, `attention_mask` and `token_type_ids` are int32 [texts, longest]; `mask_positions` is int32
    [texts, masks], the places of each text's mask tokens, then zeros. A single text, which is the common
    case, costs no copy: its ids are used where they lie, and the mask and segments are slices of constants.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._inputs = frozenset(model.inputs)
        self._ones = np.ones((1, model.max_length), np.int32)
        self._zeros = np.zeros((1, model.max_length), np.int32)
        self._pad_id = model.special_ids.get("pad", 0)
        self._mask_id = model.special_ids.get("mask", -1)

    def tensors(self, batch: Batch) -> Tensors:
        """The batch's tensors, valid until the batch is gone."""
        tensors = self._rectangles(batch)
        if TYPES not in self._inputs:
            del tensors[TYPES]
        if POSITIONS in self._inputs:
            tensors[POSITIONS] = _places(tensors[IDS], self._mask_id)
        return tensors

    def _rectangles(self, batch: Batch) -> Tensors:
        if len(batch.texts) == 1:
            text = batch.texts[0]
            ids = np.frombuffer(text.ids, np.int32).reshape(1, -1)
            length = ids.shape[1]
            types = self._zeros[:, :length]
            if text.type_ids is not None:
                types = np.frombuffer(text.type_ids, np.int32).reshape(1, -1)
            return {IDS: ids, MASK: self._ones[:, :length], TYPES: types}
        shape = (len(batch.texts), batch.padded_length)
        ids = np.full(shape, self._pad_id, np.int32)
        mask, types = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for row, text in enumerate(batch.texts):
            length = len(text.ids)
            ids[row, :length] = text.ids
            mask[row, :length] = 1
            if text.type_ids is not None:
                types[row, :length] = text.type_ids
        return {IDS: ids, MASK: mask, TYPES: types}


def _places(ids: NDArray[np.int32], token: int) -> NDArray[np.int32]:
    """Where a token stands in each row; at least one column, since no graph takes an empty tensor."""
    found = ids == token
    most = max(1, int(found.sum(axis=1).max()))
    # A stable sort of "is not the token" brings its places to the front, in order.
    places = np.argsort(~found, axis=1, kind="stable")[:, :most].astype(np.int32)
    places[~np.take_along_axis(found, places, axis=1)] = 0
    return places


def finite_rows(arrays: Sequence[Array], texts: int) -> list[bool]:
    """For each text, whether all its numbers in all outputs are finite.

    A sum of squares is finite only if every number is, so one product settles the common case (`vdot`, which
    unlike `dot` does not warn of what overflows); a sum that does is looked at number by number.
    """
    if all(math.isfinite(np.vdot(array, array)) for array in arrays if array.dtype == np.float32):
        return [True] * texts
    rows = [np.isfinite(array).reshape(texts, -1).all(axis=1) for array in arrays]
    return [bool(row) for row in np.logical_and.reduce(rows)]
