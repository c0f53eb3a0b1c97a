"""Tensors of a batch, the check for finite outputs, and batches that run text by text."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, cast

import numpy as np

from bertserve.serving.engine.base import Batch, BatchOutput
from bertserve.serving.records import IDS, MASK, POSITIONS, TYPES, EncodedText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bertserve.serving.engine.base import Runner
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array

Tensors = dict[str, "NDArray[np.int32]"]


class Padder:
    """Builds a graph's input tensors.

    `input_ids`, `attention_mask` and `token_type_ids` are int32 [texts, longest]. `mask_positions` is int32 [texts,
    masks]: the positions of each text's mask tokens, padded with zeros. A single text, the common case, needs no copy:
    its ids are used in place, and the mask and token types are slices of constants. Tokens that attention must ignore
    get a mask of 0 (see `EncodedText`).
    """

    def __init__(self, model: ModelSpec) -> None:
        self._inputs = frozenset(model.inputs)
        self._unattended = model.unattended
        self._ones = np.ones((1, model.max_length), np.int32)
        self._zeros = np.zeros((1, model.max_length), np.int32)
        self._pad_id = model.special_ids.get("pad", 0)
        self._mask_id = model.special_ids.get("mask", -1)

    def tensors(self, batch: Batch) -> Tensors:
        """Returns the batch's tensors, which are valid while the batch exists."""
        tensors = self._rectangles(batch)
        if self._unattended:
            tensors = _ignoring(tensors)
        if TYPES not in self._inputs:
            del tensors[TYPES]
        if POSITIONS in self._inputs:
            tensors[POSITIONS] = _positions(tensors[IDS], self._mask_id)
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


def _ignoring(tensors: Tensors) -> Tensors:
    """Replaces the complements of ids by the ids, with a mask of 0."""
    ids, ignored = tensors[IDS], tensors[IDS] < 0
    if not ignored.any():
        return tensors
    return {**tensors, IDS: np.where(ignored, ~ids, ids), MASK: tensors[MASK] & ~ignored}


def _positions(ids: NDArray[np.int32], token: int) -> NDArray[np.int32]:
    """Returns the positions of a token in each row; at least one column, since graphs reject empty tensors."""
    matches = ids == token
    most = max(1, int(matches.sum(axis=1).max()))
    # A stable sort by "is not the token" moves the token's positions to the front, in order.
    positions = np.argsort(~matches, axis=1, kind="stable")[:, :most].astype(np.int32)
    positions[~np.take_along_axis(matches, positions, axis=1)] = 0
    return positions


def finite_rows(arrays: Sequence[Array], texts: int) -> list[bool]:
    """Returns for each text whether all numbers of all outputs are finite.

    A sum of squares is finite only if every number is, so one product settles the common case. `vdot`, unlike `dot`,
    does not warn about overflow. If the sum overflows, each number is checked.
    """
    if all(math.isfinite(np.vdot(array, array)) for array in arrays if array.dtype == np.float32):
        return [True] * texts
    rows = [np.isfinite(array).reshape(texts, -1).all(axis=1) for array in arrays]
    return [bool(row) for row in np.logical_and.reduce(rows)]


def sample_text(model: ModelSpec, tokens: int) -> EncodedText:
    """Returns a text of the given number of tokens, for measurements."""
    middle = [(7919 * position) % model.vocab_size for position in range(1, tokens - 1)]
    ids = [model.special_ids.get("cls", 0), *middle, model.special_ids.get("sep", 0)]
    return EncodedText(array("i", ids[:tokens]))


class OneByOne:
    """A runner that runs each text alone if its model is not batch-invariant.

    A busy lane still receives several short texts at once. One frame, one wake-up and one reply for all of them cost
    the server and the lane's thread little more than for a single text.
    """

    def __init__(self, runner: Runner, models: Sequence[ModelSpec]) -> None:
        self._runner = runner
        self._batched = [model.batch_invariant for model in models]

    def run(self, batch: Batch) -> BatchOutput:
        if len(batch.texts) == 1 or self._batched[batch.model]:
            return self._runner.run(batch)
        outputs = [self._runner.run(Batch(batch.model, [text])) for text in batch.texts]
        return BatchOutput(
            arrays=[_stack(arrays) for arrays in zip(*[output.arrays for output in outputs], strict=True)],
            finite=[flag for output in outputs for flag in output.finite],
            compute_us=sum(output.compute_us for output in outputs),
        )


def _stack(arrays: Sequence[Array]) -> Array:
    """Concatenates the arrays of single texts; per-token outputs are padded to the longest text."""
    if len({array.shape[1:] for array in arrays}) == 1:
        return cast("Array", np.concatenate(arrays))
    longest = max(array.shape[1] for array in arrays)
    rest = [(0, 0)] * (arrays[0].ndim - 2)
    padded = [np.pad(array, [(0, 0), (0, longest - array.shape[1]), *rest]) for array in arrays]
    return cast("Array", np.concatenate(padded))
