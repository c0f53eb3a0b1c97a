"""The scan of ONNX files, on small models made with the onnx package and on bytes made by hand.

Whole hostile bundles are refused through the real command in tests/fault/hostile_bundle_test.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from serving.models.artifact_scan import Interface, UnsafeArtifactError, check_model_file
from tests.support.poison import TINY_SIZE, tiny_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place for files."""
    return tmp_path_factory.mktemp("onnx")


def check(folder: Path, model: onnx.ModelProto | bytes) -> None:
    """Scans a model."""
    file = folder / "model.onnx"
    file.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    check_model_file(file)


def read(folder: Path, model: onnx.ModelProto) -> Interface:
    """What a model takes and answers."""
    file = folder / "model.onnx"
    file.write_bytes(model.SerializeToString())
    return check_model_file(file)


def branch(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    """A graph for the attribute of a node."""
    return helper.make_graph(list(nodes), "branch", [], [])


def external() -> onnx.TensorProto:
    """A tensor whose data is elsewhere."""
    tensor = helper.make_tensor("far", TensorProto.FLOAT, [1], [1.0])
    tensor.external_data.add(key="location", value="elsewhere")
    return tensor


def test_a_plain_model_passes(folder: Path) -> None:
    """A graph of known operators is let through."""
    check(folder, tiny_model())


def test_a_large_initialiser_passes(folder: Path) -> None:
    """Tensor data is jumped over, whatever its bytes mean."""
    model = tiny_model()
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.UINT8, [256], bytes(range(256)), raw=True))
    check(folder, model)


@pytest.mark.parametrize("domain", ["", "ai.onnx", "com.microsoft"])
def test_domains_on_the_list(folder: Path, domain: str) -> None:
    """The domains that our engines implement are let through."""
    check(folder, tiny_model(before=[helper.make_node("Gelu", ["x"], ["y"], domain=domain)]))


def test_even_a_harmless_subgraph_is_refused(folder: Path) -> None:
    """An encoder computes straight ahead: a loop might never end, and nothing needs one."""
    node = helper.make_node("If", ["c"], ["y"], then_branch=branch(helper.make_node("Identity", ["a"], ["b"])))
    with pytest.raises(UnsafeArtifactError, match="subgraph"):
        check(folder, tiny_model(before=[node]))


def test_what_a_graph_takes_and_answers(folder: Path) -> None:
    """Names, types and sizes as the file declares them, -1 where they vary; an input with a value is none."""
    model = tiny_model()
    model.graph.input.append(helper.make_tensor_value_info("given", TensorProto.FLOAT16, [2]))
    model.graph.initializer.append(helper.make_tensor("given", TensorProto.FLOAT16, [2], [1.0, 2.0]))
    found = read(folder, model)
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert found.inputs == tuple((name, "int32", (-1, -1)) for name in names)
    assert found.outputs == (("pooled", "float32", (-1, TINY_SIZE)),)
    assert found.vocabularies == frozenset()


@pytest.mark.parametrize("operator", ["Gather", "EmbedLayerNormalization"])
@pytest.mark.parametrize("stored", ["as numbers", "as integers"])
def test_the_table_of_words(folder: Path, operator: str, stored: str) -> None:
    """Its rows are found wherever `input_ids` are looked up, through what makes numbers of integers too."""
    inputs = ["table", "input_ids"] if operator == "Gather" else ["input_ids", "", "table"]
    nodes = [helper.make_node(operator, inputs, ["found"])]
    name, kind = "table", TensorProto.FLOAT
    if stored == "as integers":
        nodes.insert(0, helper.make_node("DequantizeLinear", ["bytes", "scale"], ["table"]))
        name, kind = "bytes", TensorProto.INT8
    model = tiny_model(before=nodes)
    model.graph.initializer.append(helper.make_tensor(name, kind, [7, 2], [1] * 14))
    assert read(folder, model).vocabularies == {7}


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
def test_dimensions_must_be_those_of_the_data(folder: Path, case: str) -> None:
    """Exactly, however the data is written: one element more is refused, and so is one less."""
    tensor = FILLED[case]
    check(folder, with_tensor(tensor))
    for change in (2, 3, 1 << 33, -1):
        other = onnx.TensorProto.FromString(tensor.SerializeToString())
        other.dims.append(change)
        if case != "nothing" or change in {1 << 33, -1}:
            with pytest.raises(UnsafeArtifactError, match="dimensions"):
                check(folder, with_tensor(other))


def with_tensor(tensor: onnx.TensorProto) -> onnx.ModelProto:
    """A model with one more initialiser."""
    model = tiny_model()
    model.graph.initializer.append(tensor)
    return model


def in_list_of_tensors() -> onnx.NodeProto:
    """External data in an attribute that holds several tensors."""
    node = helper.make_node("Constant", [], ["x"])
    attribute = node.attribute.add(name="values", type=onnx.AttributeProto.TENSORS)
    attribute.tensors.append(external())
    return node


def in_list_of_graphs() -> onnx.NodeProto:
    """A foreign operator in an attribute that holds several graphs."""
    node = helper.make_node("Loop", [], ["x"])
    attribute = node.attribute.add(name="bodies", type=onnx.AttributeProto.GRAPHS)
    attribute.graphs.append(branch(helper.make_node("Shell", [], ["y"], domain="evil")))
    return node


def sparse_attribute() -> onnx.NodeProto:
    """A sparse tensor as an attribute."""
    sparse = onnx.SparseTensorProto(dims=[4])
    return helper.make_node("Constant", [], ["x"], sparse_value=sparse)


NODES = {
    "external in an attribute": lambda: helper.make_node("Constant", [], ["x"], value=external()),
    "external in a list": in_list_of_tensors,
    "foreign operator in a list": in_list_of_graphs,
    "foreign operator": lambda: helper.make_node("Shell", [], ["x"], domain="evil"),
    "domain that begins like a known one": lambda: helper.make_node("Gelu", [], ["x"], domain="com.microsoft.evil"),
    "domain with a capital": lambda: helper.make_node("Gelu", [], ["x"], domain="Com.microsoft"),
    "domain with a blank": lambda: helper.make_node("Gelu", [], ["x"], domain="ai.onnx "),
    "very long domain": lambda: helper.make_node("Gelu", [], ["x"], domain="x" * 10_000),
    "EPContext": lambda: helper.make_node("EPContext", [], ["x"], domain="com.microsoft"),
    "EPContext of no domain": lambda: helper.make_node("EPContext", [], ["x"]),
    "EPContext in a subgraph": lambda: helper.make_node(
        "If", ["c"], ["x"], then_branch=branch(helper.make_node("EPContext", [], ["x"]))
    ),
    "sparse attribute": sparse_attribute,
}


@pytest.mark.parametrize("case", NODES)
def test_nodes_that_are_refused(folder: Path, case: str) -> None:
    """What must not be served is found wherever a node can carry it."""
    with pytest.raises(UnsafeArtifactError):
        check(folder, tiny_model(before=[NODES[case]()]))


def test_a_second_graph_counts_too(folder: Path) -> None:
    """A field given twice is judged twice: parsers merge the two."""
    evil = onnx.ModelProto(graph=branch(helper.make_node("Shell", [], ["x"], domain="evil")))
    with pytest.raises(UnsafeArtifactError):
        check(folder, tiny_model().SerializeToString() + evil.SerializeToString())


def test_overlong_numbers_do_not_hide_a_field(folder: Path) -> None:
    """A field's number in more bytes than needed means the same field."""
    graph = branch(helper.make_node("Shell", [], ["x"], domain="evil")).SerializeToString()
    assert len(graph) < 128
    key = (7 << 3) | 2
    hidden = bytes([key | 0x80, 0x80, 0x00, len(graph) | 0x80, 0x00]) + graph
    assert onnx.ModelProto.FromString(hidden).graph.node[0].domain == "evil", "a parser sees it"
    with pytest.raises(UnsafeArtifactError):
        check(folder, tiny_model().SerializeToString() + hidden)


def test_every_truncation_is_refused_or_harmless(folder: Path) -> None:
    """A file cut anywhere is refused, unless what is left is itself a whole model."""
    data = tiny_model().SerializeToString()
    for at in range(len(data)):
        try:
            check(folder, data[:at])
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
def test_bytes_that_are_no_model(folder: Path, data: bytes) -> None:
    """Bytes that are no model are refused with the one error."""
    with pytest.raises(UnsafeArtifactError):
        check(folder, data)


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


def test_a_sparse_giant_is_not_read(folder: Path) -> None:
    """A file of 2 GiB or more is refused by its size."""
    file = folder / "giant.onnx"
    with file.open("wb") as handle:
        handle.truncate(2**31)
    with pytest.raises(UnsafeArtifactError, match="2 GiB"):
        check_model_file(file)
    file.unlink()
