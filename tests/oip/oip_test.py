"""Tensors of v2 without a wire: any numbers and shapes become inputs, or an error of the client's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.errors import InvalidRequest, MalformedRequest, Unsupported
from bertserve.serving.oip.service import refuse_unsupported
from bertserve.serving.oip.tensors import Tensor, inputs_of, split_bytes
from bertserve.serving.records import EncodedText

numbers = st.integers(-5, 5) | st.integers()
shapes = st.lists(st.integers(0, 6) | st.sampled_from([-1, 2**31, 2**62]), max_size=3)


def ids(rows: list[list[int]], name: str = "input_ids", datatype: str = "INT64") -> Tensor:
    return Tensor(name, datatype, [len(rows), len(rows[0])], data=rows)


def rows_of(*tensors: Tensor) -> list[tuple[list[int], list[int] | None]]:
    found = inputs_of(tensors)
    assert all(isinstance(text, EncodedText) for text in found)
    return [(list(text.ids), None if text.type_ids is None else list(text.type_ids)) for text in found]  # type: ignore[union-attr]


def test_a_mask_cuts_rows() -> None:
    """What lies behind the ones of a row is no part of it; without a mask all of it is."""
    values = [[1, 2, 3], [4, 5, 6]]
    assert rows_of(ids(values)) == [([1, 2, 3], None), ([4, 5, 6], None)]
    mask = ids([[1, 0, 0], [1, 1, 1]], "attention_mask", "INT32")
    types = ids([[0, 0, 0], [0, 1, 1]], "token_type_ids")
    assert rows_of(types, mask, ids(values)) == [([1], [0]), ([4, 5, 6], [0, 1, 1])]


@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_bytes_and_numbers_mean_the_same(datatype: str) -> None:
    """Little-endian bytes, numbers row by row, and numbers in one list."""
    values = np.array([[1, 2], [3, 4]], {"INT32": "<i4", "INT64": "<i8"}[datatype])
    expected = [([1, 2], None), ([3, 4], None)]
    assert rows_of(Tensor("input_ids", datatype, [2, 2], blob=memoryview(values.tobytes()))) == expected
    assert rows_of(Tensor("input_ids", datatype, [2, 2], data=[1, 2, 3, 4])) == expected
    assert rows_of(Tensor("input_ids", datatype, [2, 2], data=[[1, 2], [3, 4]])) == expected


@given(
    st.lists(numbers, max_size=8) | st.binary(max_size=80), shapes, st.sampled_from(["INT64", "INT32", "BYTES", "FP32"])
)
def test_any_numbers_or_bytes_of_any_shape(values: list[int] | bytes, shape: list[int], datatype: str) -> None:
    """They are inputs of that many rows, or refused; the product of a shape never overflows."""
    given_as = {"blob": memoryview(values)} if isinstance(values, bytes) else {"data": values}
    try:
        found = inputs_of([Tensor("input_ids", datatype, shape, **given_as)])
    except InvalidRequest:
        return
    assert [len(found)] == shape[:1]


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [Tensor("text_pair", "BYTES", [1], data=["a"])],
        [Tensor("text", "BYTES", [1], data=["a"])] * 2,
        [Tensor("text", "BYTES", [1], data=[1])],
        [Tensor("text", "BYTES", [1], data=["a"]), ids([[1]])],
        [ids([[1]]), Tensor("other", "INT64", [1, 1], data=[1])],
        [Tensor("input_ids", "INT64", [1, 1], data=["a"])],
        [ids([[1, 2]]), ids([[1]], "attention_mask")],
    ],
    ids=str,
)
def test_inputs_that_do_not_belong_together(tensors: list[Tensor]) -> None:
    """Each is refused."""
    with pytest.raises(InvalidRequest):
        inputs_of(tensors)


def test_text_that_is_not_utf8() -> None:
    """It is malformed, whatever the name of its tensor."""
    with pytest.raises(MalformedRequest, match="text_pair"):
        split_bytes(memoryview(b"\x01\x00\x00\x00\xff"), 1, "text_pair")


@pytest.mark.parametrize("name", ["shared_memory_region", "classification"])
def test_parameters_that_ask_for_what_is_not_built(name: str) -> None:
    """They are refused, others are not looked at."""
    parameters: dict[str, Any] = {name: 1}
    with pytest.raises(Unsupported):
        refuse_unsupported(parameters)
    refuse_unsupported({"binary_data": True, "classification": 0})
