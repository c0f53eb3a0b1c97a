"""Fields are counted before a message is parsed: what is little more than fields takes time and memory for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from bertserve.serving.grpc.boundary import has_more_fields

KIND = pb.ModelInferRequest


def request() -> pb.ModelInferRequest:
    """A message with every kind of field; it has 20 of them."""
    message = pb.ModelInferRequest(model_name="m", id="i")  # 2
    message.parameters["a"].string_param = "x" * 300  # the entry, its key, its value, the value's value: 4
    message.parameters["b"].double_param = 1.5  # 4
    tensor = message.inputs.add(name="text", datatype="BYTES", shape=[3, 1 << 40])  # 4
    tensor.contents.bytes_contents.extend([b"a", b"", b"c" * 200])  # 4
    message.raw_input_contents.extend([b"*\0" * 1000, b""])  # 2
    return message


def test_fields_are_counted_in_all_messages() -> None:
    """In those within others too, and not in bytes."""
    data = request().SerializeToString()
    assert not has_more_fields(data, KIND, 20)
    assert has_more_fields(data, KIND, 19)


@pytest.mark.parametrize(
    "field", [b"\x2a\0", b"\x32\0", b"\x22\0", b"\x3a\0", b"\x88\x01\x01", b"\x0b", b"\xf0\x07\x01"]
)
def test_many_fields_of_any_kind(field: bytes) -> None:
    """Known and unknown ones, numbers and groups."""
    assert has_more_fields(field * 1001, KIND, 1000)
    assert not has_more_fields(field * 1000, KIND, 1000)


def test_a_number_that_does_not_end() -> None:
    """One of millions of bytes is no number, and is not added up."""
    assert not has_more_fields(b"\xff" * (4 << 20), KIND, 1000)
    assert not has_more_fields(b"\x08" + b"\x80" * (4 << 20), KIND, 1000)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """What is no message is left to the parser."""
    has_more_fields(data, KIND, 1000)
    has_more_fields(request().SerializeToString()[: len(data)] + data, KIND, 1000)
