"""The scan of ONNX files: each refusal by itself, and encodings that a parser might read differently from us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from serving.models.artifact_scan import UnsafeArtifactError, check_model_file
from tests.support.poison import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPSET, GRAPH, TRAINING, FUNCTION = 8, 7, 20, 25
"""Field numbers of a model in onnx.proto3."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where to put a model."""
    return tmp_path_factory.mktemp("onnx") / "model.onnx"


def check(file: Path, model: onnx.ModelProto | bytes) -> None:
    """Scans a model."""
    file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    check_model_file(file)


def refusal(file: Path, model: onnx.ModelProto | bytes) -> str:
    """Why a model is refused."""
    with pytest.raises(UnsafeArtifactError) as refused:
        check(file, model)
    return str(refused.value)


def varint(value: int, size: int = 0) -> bytes:
    """A number as protocol buffers write it, in at least so many bytes."""
    out = bytearray()
    while value >= 0x80 or len(out) < size - 1:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    """A field that holds bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def initialiser(**fields: object) -> onnx.ModelProto:
    """A model with one more tensor."""
    model = tiny_model()
    tensor = helper.make_tensor("more", TensorProto.FLOAT, [1], [1.0])
    for name, value in fields.items():
        setattr(tensor, name, value)
    model.graph.initializer.append(tensor)
    return model


def external() -> onnx.ModelProto:
    """A model with data in another file."""
    model = initialiser()
    model.graph.initializer[0].external_data.add(key="location", value="elsewhere")
    return model


def twice() -> onnx.FunctionProto:
    """A function that a model brings along."""
    body = [helper.make_node("Add", ["x", "x"], ["y"])]
    return helper.make_function("com.microsoft", "Twice", ["x"], ["y"], body, [helper.make_opsetid("", 17)])


def training() -> onnx.ModelProto:
    """A model that brings its training along."""
    model = tiny_model()
    model.training_info.add()
    return model


def sparse() -> onnx.ModelProto:
    """A model with a sparse tensor."""
    model = tiny_model()
    model.graph.sparse_initializer.add().dims.append(4)
    return model


def inside(node: onnx.NodeProto, depth: int = 1) -> onnx.ModelProto:
    """A model with a node in a branch of an `If`, or in one of one of one."""
    for _ in range(depth):
        branch = helper.make_graph([node], "branch", [], [])
        node = helper.make_node("If", ["choice"], ["x"], then_branch=branch)
    return tiny_model(before=[node])


CASES: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "external-data": (external, "external tensor data"),
    "external-location": (lambda: initialiser(data_location=TensorProto.EXTERNAL), "external tensor data"),
    "sparse": (sparse, "sparse initialiser"),
    "function": (lambda: tiny_model(functions=[twice()]), "model-local function"),
    "training": (training, "training information"),
    "domain": (lambda: tiny_model(before=[helper.make_node("A", [], ["x"], domain="evil")]), "domain"),
    "opset": (lambda: tiny_model(opset_imports=[helper.make_opsetid("evil", 1)]), "domain"),
    "compiled": (lambda: tiny_model(before=[helper.make_node("EPContext", [], ["x"])]), "EPContext"),
    "inside": (lambda: inside(helper.make_node("Abs", ["a"], ["b"])), "subgraph"),
    "deep-inside": (lambda: inside(helper.make_node("EPContext", [], ["x"]), depth=20), "subgraph"),
    "no-graph": (lambda: onnx.ModelProto(ir_version=8), "contains no graph"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_is_named(file: Path, case: str) -> None:
    """The operator learns what was found."""
    make, sentence = CASES[case]
    assert sentence in refusal(file, make())


def test_an_empty_file_is_no_model(file: Path) -> None:
    """Nor can it be mapped."""
    assert "0 bytes" in refusal(file, b"")


def test_a_field_number_that_parsers_read_differently_is_refused(file: Path) -> None:
    """ONNX Runtime cuts a field's number to 32 bits: a larger one would hide what it then finds and runs."""
    node = helper.make_node("Twice", ["x"], ["y"], domain="com.microsoft")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    content = twice().SerializeToString()
    hidden = varint((FUNCTION << 3 | 2) + (1 << 32)) + varint(len(content)) + content
    session = ort.InferenceSession(model + hidden, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": [1.0]})[0] == [2.0], "the parser no longer does what this test is about"
    assert "field number" in refusal(file, model + hidden)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_field_number_in_more_bytes_than_it_needs_is_the_same_number(file: Path, size: int) -> None:
    """Parsers take it so; what it leads to is judged."""
    content = twice().SerializeToString()
    hidden = varint(FUNCTION << 3 | 2, size) + varint(len(content)) + content
    assert "model-local function" in refusal(file, tiny_model().SerializeToString() + hidden)


@pytest.mark.parametrize("key", [b"\x00\x00", b"\x02\x00", varint(FUNCTION << 3 | 2, 6), varint(1 << 40)])
def test_field_numbers_that_no_parser_takes_are_refused(file: Path, key: bytes) -> None:
    """The number 0, more than five bytes, more than 32 bits."""
    assert "field number" in refusal(file, tiny_model().SerializeToString() + key + b"\x00")


@pytest.mark.parametrize("number", [GRAPH, OPSET, TRAINING, FUNCTION])
def test_a_length_that_leads_out_of_the_file_is_refused(file: Path, number: int) -> None:
    """However the length is written, 64 bits wide included."""
    for length in (varint(1), varint(2**32), varint(2**63), varint(2**64 - 1)):
        assert "truncated" in refusal(file, tiny_model().SerializeToString() + varint(number << 3 | 2) + length)


def test_a_location_is_external_whatever_its_number(file: Path) -> None:
    """Only the default, data inside the file, is served: no other number, and none that is 0 in 32 bits only."""
    for value in (1, 2, 2**32, 2**64 - 1):
        tensor = varint(14 << 3) + varint(value)
        assert "external" in refusal(file, tiny_model().SerializeToString() + field(GRAPH, field(5, tensor)))


@pytest.mark.parametrize(("kind", "size"), [(1, 8), (5, 4)])
def test_numbers_of_fixed_size_are_jumped_over(file: Path, kind: int, size: int) -> None:
    """Whole they are harmless; cut they are not."""
    model = tiny_model().SerializeToString() + varint(100 << 3 | kind)
    check(file, model + bytes(size))
    assert "truncated" in refusal(file, model + bytes(size - 1))


@pytest.mark.parametrize("kind", [3, 4, 6, 7])
def test_wire_types_that_onnx_does_not_use_are_refused(file: Path, kind: int) -> None:
    """Groups could hide a field from one reader and not from another."""
    assert "wire type" in refusal(file, tiny_model().SerializeToString() + varint(100 << 3 | kind))


def test_a_number_that_does_not_end_is_refused(file: Path) -> None:
    """Neither within ten bytes nor before the end of the file."""
    model = tiny_model().SerializeToString() + varint(100 << 3)
    assert "does not end" in refusal(file, model + b"\xff" * 11)
    assert "does not end" in refusal(file, model + b"\xff")


evil = st.sampled_from([name for name, (_, sentence) in CASES.items() if sentence != "contains no graph"])


@given(evil, st.data())
@settings(derandomize=True, max_examples=100, deadline=None)
def test_no_encoding_of_a_field_hides_it(
    tmp_path_factory: pytest.TempPathFactory, case: str, data: st.DataObject
) -> None:
    """The same fields in any order, with numbers and lengths written in any width, are refused all the same."""
    model = CASES[case][0]().SerializeToString()
    pieces = data.draw(st.permutations(split(model)))
    widths = st.integers(0, 5)
    rewritten = b"".join(
        varint(key, data.draw(widths)) + (varint(len(content), data.draw(widths)) if key & 7 == 2 else b"") + content
        for key, content in pieces
    )
    assert refusal(tmp_path_factory.getbasetemp() / "rewritten.onnx", rewritten)


def split(message: bytes) -> list[tuple[int, bytes]]:
    """The fields of a message: key and content."""
    found = []
    at = 0
    while at < len(message):
        key, at = number(message, at)
        end = number(message, at)[1]
        if key & 7 == 2:
            size, at = number(message, at)
            end = at + size
        found.append((key, message[at:end]))
        at = end
    return found


def number(message: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if message[at - 1] < 0x80:
            return value, at
