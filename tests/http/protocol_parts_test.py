"""Parts of the protocols that need no server: BYTES tensors, inputs, request ids."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertserve.serving.errors import InvalidRequest
from bertserve.serving.http.apis.tei import text_inputs
from bertserve.serving.net.requests import request_id
from bertserve.serving.oip.tensors import Output, Tensor, split_bytes, texts_of
from tests.support.clients import bytes_tensor

encodable = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.lists(encodable, max_size=8))
def test_bytes_tensor_round_trip(texts: list[str]) -> None:
    """Any texts come out of a BYTES tensor as they went in, and are written as a client would write them."""
    assert split_bytes(memoryview(bytes_tensor(texts)), len(texts)) == texts
    assert bytes(Output("text", "BYTES", [len(texts)], texts).blob()) == bytes_tensor(texts)


@given(st.lists(encodable, min_size=1, max_size=4), st.data())
def test_bytes_tensor_cut_anywhere(texts: list[str], data: st.DataObject) -> None:
    """A BYTES tensor that is cut is refused, wherever."""
    blob = bytes_tensor(texts)
    at = data.draw(st.integers(0, len(blob) - 1))
    with pytest.raises(InvalidRequest):
        split_bytes(memoryview(blob[:at]), len(texts))


@given(st.binary(max_size=64), st.integers(0, 8))
def test_bytes_tensor_of_any_bytes(blob: bytes, expected: int) -> None:
    """Any bytes give the number of texts expected, or an error of the client's."""
    try:
        assert len(split_bytes(memoryview(blob), expected)) == expected
    except InvalidRequest:
        return


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        *[([1], 1), ([3], 3), ([3, 1], 3), ([0], 0), ([0, 1], 0)],
        *[(bad, None) for bad in ([], [-1], [1, 2], [1, 1, 1], [1, 0], [2**31], [-1, 1])],
    ],
    ids=str,
)
def test_shapes(shape: list[int], count: int | None) -> None:
    """[n] and [n, 1] both mean n texts; every other shape is refused."""
    refused = pytest.raises(InvalidRequest, match="shape") if count is None else contextlib.nullcontext()
    with refused:
        assert len(texts_of(Tensor("text", "BYTES", shape, data=["x"] * (1 if count is None else count)))) == count


@pytest.mark.parametrize(
    ("given_inputs", "inputs"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([], []),
        (["a", 1], None),
    ],
)
def test_tei_inputs(given_inputs: Any, inputs: list[object] | None) -> None:
    """TEI's untagged input: a list of numbers is one input, a list of lists several; numbers beside texts are none."""
    with contextlib.nullcontext() if inputs is not None else pytest.raises(InvalidRequest, match="mixes"):
        assert text_inputs(given_inputs) == inputs


@pytest.mark.parametrize(
    ("given_id", "stays"),
    [
        *[(given_id, True) for given_id in (b"a", b"x" * 128, b"trace/01:2.3_4+5=6@7-8")],
        *[(given_id, False) for given_id in (None, b"", b"x" * 129, b"a b", b"a\n", b"\xff", b"a;b", b"a\x00", b"<a>")],
    ],
)
def test_request_ids(given_id: bytes | None, *, stays: bool) -> None:
    """An id of harmless characters is kept; any other gets one of ours, different each time."""
    first, second = request_id(given_id), request_id(given_id)
    assert (first == second) == stays == (first.encode() == given_id)
    assert first.isascii()
