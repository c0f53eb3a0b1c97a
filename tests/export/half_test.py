from __future__ import annotations

import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from bertserve.export.errors import ExportError
from bertserve.export.graph import optimize
from bertserve.export.precision import emulation, half
from bertserve.export.tasks.decisions import cosine
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import fused, opened
from tests.support.graphs import (
    ARCHITECTURES,
    PRODUCTS,
    batch,
    check_ranges,
    run,
    save_graph,
    write_fill_mask_graph,
    write_graph,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

ISLANDS = ("LayerNormalization", "Softmax", "ReduceSum", "ReduceMean")
OVERFLOWING = 1000
OFTEN = {"BertModel", "BertForMaskedLM", "MegatronBertForSequenceClassification", "DistilBertForQuestionAnswering"}
"""Architectures that differ most."""
EACH = pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in ARCHITECTURES]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The graph of a random model, made once; with its fp16 form and that one's twin beside it."""

    @cache
    def made(architecture: str, scale: float = 1) -> Path:
        path = write_graph(tmp_path_factory.mktemp("graphs") / "model.onnx", architecture, scale=scale)
        halved(path)
        return path

    return made


def halved(path: Path) -> Path:
    """The fp16 graph of an fp32 one, and beside it its twin that rounds on a CPU."""
    target = half_of(path)
    half.convert(path, target)
    emulation.emulate(target, twin(target))
    return target


def twin(path: Path) -> Path:
    return path.with_suffix(".twin.onnx")


def half_of(path: Path) -> Path:
    return path.with_suffix(".fp16.onnx")


def rows(arrays: list[NDArray[np.float32]], mask: NDArray[np.int32]) -> list[NDArray[np.float32]]:
    """The answers of real tokens or texts, one a row; answers of single numbers as one row."""
    found = []
    for array in arrays:
        kept = array[mask == 1] if array.shape[:2] == mask.shape else array
        found.append(kept.reshape(1, -1) if kept.ndim == 1 else kept)
    return found


def types(path: Path) -> dict[str, int]:
    """The element type of every tensor of a graph of standard operators."""
    inferred = onnx.shape_inference.infer_shapes(onnx.load(path)).graph
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    return {value.name: value.type.tensor_type.elem_type for value in values} | {
        tensor.name: tensor.data_type for tensor in inferred.initializer
    }


@EACH
def test_every_product_is_fp16_and_every_island_fp32(model: Callable[..., Path], architecture: str) -> None:
    """Whatever the architecture: no product is left in FP32, no normalisation, softmax or sum is in fp16."""
    path = half_of(model(architecture))
    onnx.checker.check_model(path, full_check=True)
    loaded, found = onnx.load(path).graph, types(path)
    for node in loaded.node:
        if node.op_type in PRODUCTS:
            assert {found[name] for name in node.input} == {TensorProto.FLOAT16}, node.name
        if node.op_type in ISLANDS:
            assert found[node.input[0]] == TensorProto.FLOAT, node.name
    assert sum(node.op_type == "Softmax" for node in loaded.node) == 2
    assert {found[value.name] for value in loaded.input} == {TensorProto.INT32}
    assert {found[value.name] for value in loaded.output} == {TensorProto.FLOAT}


@EACH
def test_weights_that_overflow_plain_fp16_stay_finite(
    model: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    """Weights scaled until ONNX Runtime's own conversion gives no numbers give ours, close to fp32's."""
    path = model(architecture, OVERFLOWING)
    plain = tmp_path / "plain.onnx"
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True, op_block_list=[]), plain)
    emulation.emulate(plain, twin(plain))
    inputs = batch()
    mask = inputs["attention_mask"]
    assert not all(np.isfinite(array).all() for array in run(twin(plain), inputs))
    exact, rounded = run(path, inputs), run(twin(half_of(path)), inputs)
    for left, right in zip(rows(exact, mask), rows(rounded, mask), strict=True):
        assert np.isfinite(right).all()
        assert cosine(left, right).mean() >= 0.999


@EACH
def test_no_activation_exceeds_its_proven_range(model: Callable[..., Path], tmp_path: Path, architecture: str) -> None:
    """Every float tensor of a run lies within what `ranges` says, and all products have a known range."""
    check_ranges(model(architecture), tmp_path / "open.onnx", batch())


def test_a_text_of_padding_alone_stays_finite(model: Callable[..., Path]) -> None:
    """A batch filled up with empty rows has finite answers: a mask adds a number, never an infinity."""
    path = half_of(model("DistilBertForQuestionAnswering"))
    inputs = batch()
    inputs["attention_mask"][2] = 0
    assert all(np.isfinite(array).all() for array in run(twin(path), inputs))
    for tensor in onnx.load(path).graph.initializer:
        if tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16):
            assert np.abs(numpy_helper.to_array(tensor)).max() <= half.LARGEST, tensor.name


def test_the_best_words_stay_the_same(tmp_path: Path) -> None:
    """A head that runs at the masks alone: the same words, best first, with close logits, integers kept."""
    path = write_fill_mask_graph(tmp_path / "model.onnx")
    inputs = {**batch(tokens=24), "mask_positions": np.array([[1, 2]] * 6, np.int32)}
    exact, rounded = run(path, inputs), run(twin(halved(path)), inputs)
    np.testing.assert_array_equal(exact[0], rounded[0])
    for left, right in zip(exact[1:], rounded[1:], strict=True):
        np.testing.assert_allclose(left, right, atol=2e-3)


def test_the_twin_rounds_where_onnx_runtime_does_not(tmp_path: Path) -> None:
    """Two products in a row: the twin's answer is that of NumPy with every result rounded to fp16."""
    generator = np.random.default_rng(0)
    weights = generator.normal(size=(2, 64, 64)).astype(np.float16)
    nodes = [
        helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16),
        helper.make_node("MatMul", ["x16", "w0"], ["h"]),
        helper.make_node("MatMul", ["h", "w1"], ["y16"]),
        helper.make_node("Cast", ["y16"], ["y"], to=TensorProto.FLOAT),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy"]
    save_graph(tmp_path / "two.onnx", nodes, values[:1], values[1:], w0=weights[0], w1=weights[1])
    emulation.emulate(tmp_path / "two.onnx", tmp_path / "twin.onnx")
    x = generator.normal(size=(16, 64)).astype(np.float32)
    expected = x.astype(np.float16).astype(np.float32)
    for weight in weights:
        expected = (expected @ weight.astype(np.float32)).astype(np.float16).astype(np.float32)
    (rounded,) = run(tmp_path / "twin.onnx", {"x": x})
    (unrounded,) = run(tmp_path / "two.onnx", {"x": x})
    # A sum in another order falls now and then on the other side of a rounding.
    assert (rounded == expected).mean() > 0.97
    assert (unrounded == expected).mean() < 0.1


def spoil(path: Path, name: str, change: Callable[[NDArray[np.float32]], object]) -> None:
    model = onnx.load(path)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    array = numpy_helper.to_array(tensor).copy()
    change(array)
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(model, path)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_weight_that_is_no_number_is_named(model: Callable[..., Path], tmp_path: Path, value: float) -> None:
    """A weight that fp16 cannot hold at any scale stops the export with the tensor's name."""
    path, name = tmp_path / "model.onnx", "model.embeddings.word_embeddings.weight"
    shutil.copyfile(model("BertModel"), path)
    spoil(path, name, lambda array: np.put(array, 70, value))
    with pytest.raises(ExportError, match=f"{name} has"):
        half.convert(path, tmp_path / "fp16.onnx")
    assert not (tmp_path / "fp16.onnx").exists()


@pytest.mark.parametrize("name", ["word_embeddings.weight", "0.output.dense.bias", "1.output.LayerNorm.weight"])
def test_a_weight_beyond_fp16_is_divided_or_kept(model: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """A table stays FP32, a bias is divided as its product is, a scale is FP32 anyway: the answers stay close."""
    path = tmp_path / "model.onnx"
    shutil.copyfile(model("BertModel"), path)
    full = next(tensor.name for tensor in onnx.load(path).graph.initializer if tensor.name.endswith(name))
    spoil(path, full, lambda array: np.put(array, 7, 1e5))
    exact, rounded = run(path, batch())[0], run(twin(halved(path)), batch())[0]
    kept = batch()["attention_mask"] == 1
    assert cosine(exact[kept], rounded[kept]).min() >= 0.999


def small_batch() -> dict[str, NDArray[np.int32]]:
    inputs = batch()
    return {**inputs, "input_ids": inputs["input_ids"] % 100, "token_type_ids": np.zeros_like(inputs["input_ids"])}


def small_graph(folder: Path, **sizes: Any) -> Path:
    return fused(opened(write_checkpoint(folder / "small", **sizes)), folder)


def test_a_fused_graph_keeps_its_operators(tmp_path: Path) -> None:
    """Fused attention, GELU and normalizations between them run in fp16, the first and last normalization in FP32."""
    path = small_graph(tmp_path)
    made = halved(path)
    assert optimize.operators(made) == optimize.operators(path)
    model = onnx.load(made)
    weights = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    normalizations = []
    for node in model.graph.node:
        kinds = {weights[name] for name in node.input if name in weights}
        if node.op_type in ("Attention", "BiasGelu", "MatMul"):
            assert kinds == {TensorProto.FLOAT16}, node.name
        if node.op_type.endswith("LayerNormalization"):
            normalizations += kinds
    assert normalizations == [TensorProto.FLOAT, *[TensorProto.FLOAT16] * (len(normalizations) - 2), TensorProto.FLOAT]
    assert len(normalizations) > 3
    exact, rounded = (run(each, small_batch())[0] for each in (path, twin(made)))
    assert cosine(exact, rounded).min() >= 0.9999


def test_a_fused_normalization_whose_sum_could_overflow_stays_fp32(tmp_path: Path) -> None:
    """A bias that fp16 holds, and the sum with it does not: that normalization alone is kept."""
    path = small_graph(tmp_path)
    spoil(path, "model.encoder.layer.0.output.dense.bias", lambda array: np.put(array, 7, 65500))
    graph = onnx.load(halved(path)).graph
    weights = {tensor.name: tensor.data_type for tensor in graph.initializer}
    kinds = [weights[node.input[2]] for node in graph.node if node.op_type == "SkipLayerNormalization"]
    assert kinds == [TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.FLOAT]
    exact, rounded = (run(each, small_batch())[0] for each in (path, twin(half_of(path))))
    assert cosine(exact, rounded).min() >= 0.9999


def test_a_fused_attention_that_could_overflow_is_refused(tmp_path: Path) -> None:
    """What happens inside a fused operator cannot be divided, so the export stops and names the operator."""
    path = small_graph(tmp_path, layers=1)
    spoil(path, "Attention_0_qkv_weight", lambda array: np.multiply(array, 60000, out=array))
    with pytest.raises(ExportError, match="Attention Attention_0: its result can exceed the range of fp16"):
        half.convert(path, tmp_path / "fp16.onnx")
