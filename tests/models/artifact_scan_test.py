"""The scan of ONNX files: what is refused, and encodings that a parser might read differently from us.

Whole hostile bundles are refused through the real command in tests/fault/hostile_bundle_test.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from bertserve.serving.models.artifact_scan import UnsafeArtifactError, check_model_file
from tests.support.poison import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OPSET, GRAPH, TRAINING, FUNCTION = 8, 7, 20, 25
"""Field numbers of a model in onnx.proto3."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx") / "model.onnx"


def check(file: Path, model: onnx.ModelProto | bytes) -> None:
    file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    check_model_file(file)


def refusal(file: Path, model: onnx.ModelProto | bytes) -> str:
    with pytest.raises(UnsafeArtifactError) as refused:
        check(file, model)
    return str(refused.value)


def branch(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), "branch", [], [])


def with_node(operator: str, domain: str = "", **attributes: Any) -> onnx.ModelProto:
    return tiny_model(before=[helper.make_node(operator, [], ["x"], domain=domain, **attributes)])


def with_list(operator: str, **values: Any) -> onnx.ModelProto:
    """A model with a node more whose attribute is a list of tensors or graphs."""
    return tiny_model(before=[onnx.NodeProto(op_type=operator, output=["x"], attribute=[{"name": "all", **values}])])


def with_tensor(tensor: onnx.TensorProto) -> onnx.ModelProto:
    model = tiny_model()
    model.graph.initializer.append(tensor)
    return model


def external() -> onnx.TensorProto:
    tensor = helper.make_tensor("far", TensorProto.FLOAT, [1], [1.0])
    tensor.external_data.add(key="location", value="elsewhere")
    return tensor


def twice() -> onnx.FunctionProto:
    body = [helper.make_node("Add", ["x", "x"], ["y"])]
    return helper.make_function("com.microsoft", "Twice", ["x"], ["y"], body, [helper.make_opsetid("", 17)])


def edited(edit: Callable[[onnx.ModelProto], object]) -> onnx.ModelProto:
    model = tiny_model()
    edit(model)
    return model


def inside(node: onnx.NodeProto, depth: int = 1) -> onnx.ModelProto:
    """A model with a node in a branch of an `If`, or in one of one of one."""
    for _ in range(depth):
        node = helper.make_node("If", ["choice"], ["x"], then_branch=branch(node))
    return tiny_model(before=[node])


def four(dims: list[int], data_type: int = TensorProto.FLOAT) -> onnx.TensorProto:
    """Four numbers that claim to be a tensor of these sizes."""
    return TensorProto(dims=dims, data_type=data_type, raw_data=bytes(16))


EP_CONTEXT = helper.make_node("EPContext", [], ["x"], domain="com.microsoft")
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "external data": (lambda: with_tensor(external()), "external tensor data"),
    "external location": (
        lambda: with_tensor(TensorProto(dims=[1], data_type=1, data_location=TensorProto.EXTERNAL)),
        "external tensor data",
    ),
    "external in an attribute": (lambda: with_node("Constant", value=external()), "external"),
    "external in a list": (lambda: with_list("Constant", tensors=[external()], type="TENSORS"), "external"),
    "sparse": (lambda: edited(lambda model: model.graph.sparse_initializer.add(dims=[4])), "sparse initializer"),
    "sparse attribute": (lambda: with_node("Constant", sparse_value=onnx.SparseTensorProto(dims=[4])), "sparse"),
    "function": (lambda: tiny_model(functions=[twice()]), "model-local function"),
    "training": (lambda: edited(lambda model: model.training_info.add()), "training information"),
    "opset": (lambda: tiny_model(opset_imports=[helper.make_opsetid("evil", 1)]), "domain"),
    "foreign operator": (lambda: with_node("Shell", "evil"), "domain"),
    "custom operator of OpenVINO": (lambda: with_node("Shell", "org.openvinotoolkit"), "domain"),
    "plugin of TensorRT": (lambda: with_node("Shell", "trt.plugins"), "domain"),
    "domain that begins like a known one": (lambda: with_node("Gelu", "com.microsoft.evil"), "domain"),
    "domain with a capital": (lambda: with_node("Gelu", "Com.microsoft"), "domain"),
    "domain with a blank": (lambda: with_node("Gelu", "ai.onnx "), "domain"),
    "very long domain": (lambda: with_node("Gelu", "x" * 10_000), "domain"),
    "compiled code": (lambda: tiny_model(before=[EP_CONTEXT]), "EPContext"),
    "compiled code of no domain": (lambda: with_node("EPContext"), "EPContext"),
    "Python code": (lambda: with_node("PythonOp", "com.microsoft"), "PythonOp"),
    "Torch code": (lambda: with_node("ATen"), "ATen"),
    # An encoder computes straight ahead: a loop might never end, and nothing needs one.
    "harmless subgraph": (lambda: inside(helper.make_node("Abs", ["a"], ["b"])), "subgraph"),
    "empty subgraph": (lambda: with_node("If", then_branch=branch()), "subgraph"),
    "deep inside": (lambda: inside(EP_CONTEXT, depth=30), "subgraph"),
    "list of subgraphs": (lambda: with_list("Loop", graphs=[branch(EP_CONTEXT)], type="GRAPHS"), "subgraph"),
    "dimensions whose product wraps": (lambda: with_tensor(four([1 << 32, 1 << 32])), "dimensions"),
    "dimensions that cancel": (lambda: with_tensor(four([1 << 62, 0])), "dimensions"),
    "dimensions below the data": (lambda: with_tensor(four([3])), "dimensions"),
    "dimensions in an attribute": (lambda: with_node("Constant", value=four([9])), "dimensions"),
    "no data": (lambda: with_tensor(TensorProto(dims=[4], data_type=TensorProto.FLOAT)), "dimensions"),
    "tensor of text": (lambda: with_tensor(four([4], data_type=TensorProto.STRING)), "type"),
    "tensor of no type": (lambda: with_tensor(TensorProto(dims=[4], raw_data=bytes(16))), "type"),
    "no graph": (lambda: onnx.ModelProto(ir_version=8), "contains no graph"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_refused_is_named(file: Path, case: str) -> None:
    make, sentence = CASES[case]
    assert sentence in refusal(file, make())


def test_a_plain_model_passes(file: Path) -> None:
    check(file, tiny_model())


def test_a_large_initialiser_passes(file: Path) -> None:
    """Tensor data is jumped over, whatever its bytes mean."""
    model = tiny_model()
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.UINT8, [256], bytes(range(256)), raw=True))
    check(file, model)


@pytest.mark.parametrize("domain", ["", "ai.onnx", "com.microsoft"])
def test_domains_on_the_list(file: Path, domain: str) -> None:
    """The domains that our engines implement are let through."""
    check(file, tiny_model(before=[helper.make_node("Gelu", ["x"], ["y"], domain=domain)]))


FILLED: dict[str, onnx.TensorProto] = {
    "typed integers": helper.make_tensor("t", TensorProto.INT8, [3], [-1, 200 - 256, 5]),
    "typed floats": helper.make_tensor("t", TensorProto.FLOAT, [2, 2], [1.0] * 4),
    "typed halves": helper.make_tensor("t", TensorProto.FLOAT16, [2], [1.0, 2.0]),
    "typed longs": helper.make_tensor("t", TensorProto.INT64, [2], [-1, 1 << 40]),
    "a number": helper.make_tensor("t", TensorProto.FLOAT, [], [1.0]),
    "nothing": helper.make_tensor("t", TensorProto.FLOAT, [0], []),
    "four bits": helper.make_tensor("t", TensorProto.INT4, [3], [1, 2, 3]),
    "raw": helper.make_tensor("t", TensorProto.UINT8, [3], b"abc", raw=True),
}


@pytest.mark.parametrize("case", FILLED)
def test_dimensions_must_be_those_of_the_data(file: Path, case: str) -> None:
    """Exactly, however the data is written: one element more is refused, and so is one less."""
    tensor = FILLED[case]
    check(file, with_tensor(tensor))
    for change in (2, 3, 1 << 33, -1):
        other = onnx.TensorProto.FromString(tensor.SerializeToString())
        other.dims.append(change)
        if case != "nothing" or change in {1 << 33, -1}:
            assert "dimensions" in refusal(file, with_tensor(other))


def test_every_truncation_is_refused_or_harmless(file: Path) -> None:
    """A file cut anywhere is refused, unless what is left is itself a whole model."""
    data = tiny_model().SerializeToString()
    for at in range(len(data)):
        try:
            check(file, data[:at])
        except UnsafeArtifactError:
            continue
        assert onnx.ModelProto.FromString(data[:at]).graph.node


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\x0b",
        b"\x0c",
        b"\x3a\xff\xff\xff\xff\x0f",
        b"\x3a" + b"\xff" * 9 + b"\x01",
        b"\x08" + b"\x80" * 20,
        b"\x39\x00",
    ],
    ids=["empty", "field-0", "group", "group-end", "too-long", "longest", "endless", "half-a-double"],
)
def test_bytes_that_are_no_model(file: Path, data: bytes) -> None:
    """Bytes that are no model are refused with the one error."""
    assert refusal(file, data)


@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Whatever the bytes are, the answer is a verdict and never another exception."""
    file = tmp_path_factory.getbasetemp() / "any.onnx"
    file.write_bytes(data)
    try:
        check_model_file(file)
    except UnsafeArtifactError:
        return
    assert onnx.ModelProto.FromString(data).graph.node


@given(st.data())
def test_any_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A model with a few bytes changed is refused, or is one that a parser reads without external data."""
    model = bytearray(tiny_model().SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        model[data.draw(st.integers(0, len(model) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.getbasetemp() / "damaged.onnx"
    file.write_bytes(model)
    try:
        check_model_file(file)
    except UnsafeArtifactError:
        return
    try:
        parsed = onnx.ModelProto.FromString(bytes(model))
    except Exception:  # noqa: BLE001  protobuf refuses more than we do, with errors of its own
        return
    assert not any(tensor.external_data for tensor in parsed.graph.initializer)
    assert {node.domain for node in parsed.graph.node} <= {"", "ai.onnx", "com.microsoft"}


def beside() -> onnx.ModelProto:
    """A model two of whose tensors lie in a file of 48 bytes beside it, with room between them."""
    model = tiny_model()
    for at, name in enumerate(("first", "second")):
        tensor = model.graph.initializer.add(name=name, dims=[2, 2], data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "damaged.onnx.data"), ("offset", str(32 * at)), ("length", "16")):
            tensor.external_data.add(key=key, value=value)
    return model


@given(st.data())
def test_any_damage_to_what_lies_beside(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A graph whose weights lie beside it is refused, or a parser finds all of them there, each at its own place."""
    file = tmp_path_factory.getbasetemp() / "damaged.onnx"
    file.with_name("damaged.onnx.data").write_bytes(bytes(48))
    whole = beside().SerializeToString()
    start = whole.index(b"first") - 40
    model = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 2))):
        model[data.draw(st.integers(start, len(model) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(model)
    try:
        check_model_file(file, "damaged.onnx.data")
    except UnsafeArtifactError:
        assert model != whole
        return
    try:
        tensors = onnx.ModelProto.FromString(bytes(model)).graph.initializer
    except Exception:  # noqa: BLE001  protobuf refuses more than we do, with errors of its own
        return
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in tensors if tensor.external_data]
    taken = [at for p in places for at in range(int(p["offset"]), int(p["offset"]) + int(p["length"]))]
    assert {place["location"] for place in places} == {"damaged.onnx.data"}
    assert len(set(taken)) == len(taken)
    assert all(at < 48 for at in taken)


def test_a_sparse_giant_is_not_read(file: Path) -> None:
    with file.open("wb") as handle:
        handle.truncate(2**31)
    with pytest.raises(UnsafeArtifactError, match="2 GiB"):
        check_model_file(file)
    file.unlink()


def varint(value: int, size: int = 0) -> bytes:
    """A number as protocol buffers write it, in at least so many bytes."""
    out = bytearray()
    while value >= 0x80 or len(out) < size - 1:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


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


def test_a_second_graph_counts_too(file: Path) -> None:
    """A field given twice is judged twice: parsers merge the two."""
    evil = onnx.ModelProto(graph=branch(helper.make_node("Shell", [], ["x"], domain="evil")))
    assert refusal(file, tiny_model().SerializeToString() + evil.SerializeToString())


FUNCTION_KEY = FUNCTION << 3 | 2
APPENDED: dict[str, tuple[bytes, str]] = {
    # Parsers take a number in more bytes than it needs; what it leads to is judged.
    **{
        f"a field number in {size} bytes": (
            varint(FUNCTION_KEY, size) + varint(len(twice().SerializeToString())) + twice().SerializeToString(),
            "model-local function",
        )
        for size in (2, 3, 5)
    },
    "the field number 0": (b"\x00\x00", "field number"),
    "the field number 0 of bytes": (b"\x02\x00", "field number"),
    "a field number in more than five bytes": (varint(FUNCTION_KEY, 6) + b"\x00", "field number"),
    "a field number of more than 32 bits": (varint(1 << 40) + b"\x00", "field number"),
    # However the length is written, 64 bits wide included.
    **{
        f"a length of {length} out of the file in field {number}": (
            varint(number << 3 | 2) + varint(length),
            "truncated",
        )
        for number in (GRAPH, OPSET, TRAINING, FUNCTION)
        for length in (1, 2**32, 2**63, 2**64 - 1)
    },
    # Only the default, data inside the file, is served: no other number, and none that is 0 in 32 bits only.
    **{
        f"the location {value}": (field(GRAPH, field(5, varint(14 << 3) + varint(value))), "external")
        for value in (1, 2, 2**32, 2**64 - 1)
    },
    # Groups could hide a field from one reader and not from another.
    **{f"the wire type {kind}": (varint(100 << 3 | kind), "wire type") for kind in (3, 4, 6, 7)},
    "half a double": (varint(100 << 3 | 1) + bytes(7), "truncated"),
    "a part of a float": (varint(100 << 3 | 5) + bytes(3), "truncated"),
    "a number that does not end within ten bytes": (varint(100 << 3) + b"\xff" * 11, "unterminated number"),
    "a number that does not end before the file": (varint(100 << 3) + b"\xff", "unterminated number"),
}


@pytest.mark.parametrize("case", APPENDED)
def test_what_comes_behind_a_model_is_judged(file: Path, case: str) -> None:
    """A field that parsers might read differently, or that leads out of the file, is refused."""
    added, sentence = APPENDED[case]
    assert sentence in refusal(file, tiny_model().SerializeToString() + added)


@pytest.mark.parametrize(("kind", "size"), [(1, 8), (5, 4)])
def test_numbers_of_fixed_size_are_jumped_over(file: Path, kind: int, size: int) -> None:
    """Whole they are harmless."""
    check(file, tiny_model().SerializeToString() + varint(100 << 3 | kind) + bytes(size))


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
    value = shift = 0
    while True:
        value |= (message[at] & 0x7F) << shift
        shift += 7
        at += 1
        if message[at - 1] < 0x80:
            return value, at
