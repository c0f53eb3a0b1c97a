"""Weights of 8 bits for OpenVINO. What the graph means needs no OpenVINO: ONNX Runtime computes it too."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bertserve.export.errors import ExportError
from bertserve.export.graph import optimize, task_model
from bertserve.export.precision import openvino
from bertserve.serving.models.artifact_scan import check_model_file
from tests.support.checkpoints import write_checkpoint
from tests.support.expected import cosines
from tests.support.exports import opened
from tests.support.graphs import run, save_graph, some_ids

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

LAYERS = 2


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("openvino")
    checkpoint = opened(write_checkpoint(folder / "small", layers=LAYERS))
    task_model.write(task_model.load(checkpoint), folder / "raw.onnx")
    return folder / "raw.onnx"


@pytest.fixture(scope="module")
def quantized(raw: Path) -> Path:
    path = raw.with_name("quantized.onnx")
    openvino.quantize(raw, path, optimize.Shape(LAYERS, heads=4, hidden_size=32), cuts=None)
    return path


def test_every_matrix_of_the_encoder_has_8_bits(raw: Path, quantized: Path) -> None:
    """Six of each layer, and the three tables; no matrix stays behind in float32."""
    model = onnx.load(quantized)
    kinds = Counter(tensor.data_type for tensor in model.graph.initializer if len(tensor.dims) == 2)
    assert kinds == {onnx.TensorProto.UINT8: 6 * LAYERS + 3}
    before, after = (Counter(node.op_type for node in onnx.load(path).graph.node) for path in (raw, quantized))
    assert after - before == {"DequantizeLinear": 6 * LAYERS + 3}


def test_the_graph_is_one_that_bundles_may_hold(quantized: Path) -> None:
    """One file of standard operators, valid by the checker of ONNX."""
    check_model_file(quantized)
    model = onnx.load(quantized)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""}
    assert [file.name for file in quantized.parent.glob("quantized*")] == [quantized.name]


def test_the_graph_means_the_same(raw: Path, quantized: Path) -> None:
    """Computed as written, with activations in float32, it differs by the rounding of the weights alone."""
    assert cosines(run(quantized, some_ids())[0], run(raw, some_ids())[0]).min() > 0.999


def test_a_graph_that_lost_matrices_is_refused(raw: Path, tmp_path: Path) -> None:
    """As where another exporter writes products in another way; nothing is written then."""
    with pytest.raises(ExportError, match="found 12 products with a weight, expected 18"):
        openvino.quantize(raw, tmp_path / "out.onnx", optimize.Shape(LAYERS + 1, heads=4, hidden_size=32), cuts=None)
    assert not list(tmp_path.iterdir())


def test_a_large_table_is_scaled_row_by_row(tmp_path: Path) -> None:
    """Only what is looked up is ever scaled; the numbers are those of the table scaled as a whole."""
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    table = np.random.default_rng(0).normal(size=(1 << 15, 32)).astype(np.float32)
    ids = np.array([[0, 7, 32_767], [5, 5, 1]], np.int32)
    nodes = [make("Gather", ["table", "ids"], ["rows"]), make("Relu", ["rows"], ["answer"])]
    inputs = [info("ids", onnx.TensorProto.INT32, ["texts", "tokens"])]
    outputs = [info("answer", onnx.TensorProto.FLOAT, ["texts", "tokens", 32])]
    raw = save_graph(tmp_path / "raw.onnx", nodes, inputs, outputs, table=table)
    openvino.quantize(raw, tmp_path / "out.onnx", optimize.Shape(0, heads=1, hidden_size=1), cuts=None)
    onnx.checker.check_model(onnx.load(tmp_path / "out.onnx"), full_check=True)
    values, scale, zero = openvino.eight_bits(table, 0)
    whole = (values.astype(np.float32) - zero[:, None].astype(np.float32)) * scale[:, None]
    np.testing.assert_array_equal(run(tmp_path / "out.onnx", {"ids": ids})[0], np.maximum(whole[ids], 0))
    assert "DequantizeLinear" not in {node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node}


def test_a_weight_with_two_users_is_kept_once(tmp_path: Path) -> None:
    """Layers may share their weights."""
    make, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weight = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    nodes = [make("MatMul", ["x", "w"], ["once"]), make("MatMul", ["once", "w"], ["twice"])]
    tensors = [info(name, onnx.TensorProto.FLOAT, [1, 4]) for name in ("x", "twice")]
    raw = save_graph(tmp_path / "raw.onnx", nodes, tensors[:1], tensors[1:], w=weight)
    openvino.quantize(raw, tmp_path / "out.onnx", optimize.Shape(0, heads=1, hidden_size=1), cuts=None)
    x = np.ones((1, 4), np.float32)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", {"x": x})[0], x @ weight @ weight, atol=0.1)


MATRICES = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=6),
    elements=st.floats(-8, 8, width=32, allow_subnormal=False),
)


@given(weight=MATRICES, axis=st.sampled_from([0, 1]))
def test_no_number_moves_by_more_than_a_step(weight: NDArray[np.float32], axis: int) -> None:
    """Half a step for the number itself and half for where zero lies; zero stays zero."""
    values, scale, zero = (part.astype(np.float64) for part in openvino.eight_bits(weight, axis))
    scale, zero = np.expand_dims(scale, 1 - axis), np.expand_dims(zero, 1 - axis)
    back = (values - zero) * scale
    assert (np.abs(back - weight) <= 1.001 * scale).all()
    assert (back[weight == 0] == 0).all()


def test_a_column_of_zeros_stays_one() -> None:
    """Its range is empty, and nothing is divided by that."""
    values, scale, zero = openvino.eight_bits(np.array([[0, 1], [0, -1]], np.float32), axis=1)
    assert scale[0] > 0
    assert (values[:, 0] == zero[0]).all()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that installs it."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(ExportError, match=r"--editable '\.\[openvino\]'"):
        openvino.require_library()
