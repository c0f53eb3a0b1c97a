"""INT8 for TensorRT: the quantised graph, its twin on a CPU, the engine, and the commands around them."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from bertserve.export.cli import build, inspect
from bertserve.export.cli.export import main
from bertserve.export.engines import tensorrt
from bertserve.export.engines.native import name_of
from bertserve.export.errors import ExportError
from bertserve.export.graph import optimize, task_model
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.precision import emulation, half, int8, qdq
from bertserve.export.precision.equalise import Cut
from bertserve.export.precision.products import Product, find
from bertserve.export.texts import corpus
from bertserve.serving.models.artifact_scan import check_model_file
from bertserve.serving.models.bundle import open_bundle
from bertserve.serving.models.manifest import MANIFEST
from tests.support.checkpoints import STEMS, write_checkpoint, write_task_checkpoint
from tests.support.expected import cosines
from tests.support.exports import ignore, opened
from tests.support.graphs import run, save_graph, some_ids

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


LAYERS = 2
SHORT = 16


def quantised(folder: Path, checkpoint_folder: Path) -> Path:
    """The quantised graph of a checkpoint; the graphs that it was made of lie beside it."""
    checkpoint = opened(checkpoint_folder)
    raw, halved, made = folder / "raw.onnx", folder / "half.onnx", folder / "engine.int8.onnx"
    task_model.write(task_model.load(checkpoint), raw)
    exponents = half.convert(raw, halved)
    texts = checkpoint.encode(corpus.for_task(corpus.read()[::16], checkpoint.task))
    cuts = int8.cuts_of(raw, task_model.spec_of(checkpoint, raw), texts, ignore)
    qdq.quantize(halved, made, optimize.shape_of(checkpoint), exponents, find(GraphEditor(raw, raw).graph), cuts)
    return made


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qdq")
    return quantised(folder, write_checkpoint(folder / "small", layers=LAYERS))


def answer(path: Path, level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL) -> NDArray[Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    return run(path, some_ids(), sess_options=options)[0]


def test_each_product_with_a_matrix_takes_8_bits_around_0(graph: Path) -> None:
    """Both inputs are dequantised in fp16, with zero points of 0; the products of attention stay as they were."""
    model = onnx.load(graph)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    producers = {name: node for node in model.graph.node for name in node.output}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    kinds = Counter(
        tuple("8 bits" if producers[name].op_type == "DequantizeLinear" else "fp16" for name in node.input)
        for node in products
    )
    assert kinds == {("8 bits", "8 bits"): 6 * LAYERS, ("fp16", "fp16"): 2 * LAYERS}
    for node in model.graph.node:
        if node.op_type in {"QuantizeLinear", "DequantizeLinear"}:
            scale, zero = (constants[name] for name in node.input[1:])
            assert (scale.dtype, zero.dtype) == (np.float16, np.int8)
            assert (scale > 0).all()
            assert not zero.any()
    matrices = [constants[producers[node.input[1]].input[0]] for node in products if ".matrix" in node.input[1]]
    assert {matrix.dtype for matrix in matrices} == {np.dtype(np.int8)}
    assert max(np.abs(matrix.astype(int)).max() for matrix in matrices) == 127
    # Queries, keys and values are cut once.
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == 4 * LAYERS


def test_the_graph_may_lie_in_a_bundle(graph: Path) -> None:
    """Nothing in it is refused when a bundle is opened."""
    check_model_file(graph)


def test_its_twin_answers_much_as_fp32_does(graph: Path) -> None:
    """Within what 8 bits lose, and not exactly: something was rounded."""
    twin = graph.with_name("twin.onnx")
    emulation.emulate(graph, twin)
    exact, found = answer(graph.with_name("raw.onnx")), answer(twin)
    assert cosines(found, exact).min() > 0.99
    assert np.abs(exact - found).max() > 1e-4


def test_onnx_runtime_fuses_nothing_in_the_twin(graph: Path) -> None:
    """Operator by operator it answers the same: no product of 8 bits of ONNX Runtime's own takes part."""
    twin = graph.with_name("twin.onnx")
    emulation.emulate(graph, twin)
    plain = answer(twin, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    assert np.abs(plain - answer(twin)).max() < 2e-3
    # ONNX Runtime can run the graph itself too, and rounds at other places.
    assert cosines(plain.reshape(1, -1), answer(graph).reshape(1, -1))[0] > 0.999


def test_a_twin_holds_the_very_8_bit_values(graph: Path) -> None:
    """A change of one step of a matrix changes the answer: what is compared is what the engine is built of."""
    other = graph.with_name("other.onnx")
    model = onnx.load(graph)
    tensor = next(t for t in model.graph.initializer if t.name.endswith(".matrix.values"))
    values = numpy_helper.to_array(tensor).copy()
    values[0] = -values[0]
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, other)
    twins = [path.with_suffix(".twin.onnx") for path in (graph, other)]
    for path, twin in zip((graph, other), twins, strict=True):
        emulation.emulate(path, twin)
    assert not np.array_equal(answer(twins[0]), answer(twins[1]))


def test_a_range_on_one_side_of_0_keeps_all_8_bits(tmp_path: Path) -> None:
    """Such activations are shifted, and the bias, or an addition where there is none, takes it back."""
    generator = np.random.default_rng(0)
    rows = np.abs(generator.normal(size=(64, 8))).astype(np.float32)
    matrix, bias = (generator.normal(size=size).astype(np.float32) for size in ((8, 4), (4,)))
    names = {"matrix": matrix, "other": matrix[:, :2], "bias": bias}
    make = onnx.helper.make_node
    nodes = [
        make("Cast", ["rows"], ["half"], to=onnx.TensorProto.FLOAT16),
        make("MatMul", ["half", "matrix"], ["product"]),
        make("Add", ["bias", "product"], ["sum"]),
        make("MatMul", ["half", "other"], ["alone"]),
        *(make("Cast", [name], [f"{name} out"], to=onnx.TensorProto.FLOAT) for name in ("sum", "alone")),
    ]
    value = onnx.helper.make_tensor_value_info
    ends = [value(name, onnx.TensorProto.FLOAT, ["texts", None]) for name in ("rows", "sum out", "alone out")]
    halves = {name: array.astype(np.float16) for name, array in names.items()}
    save_graph(tmp_path / "half.onnx", nodes, ends[:1], ends[1:], **halves)
    cut = Cut(np.ones(8, np.float32), 0.0, float(rows.max()))
    product = Product("rows", ("product", "alone"), ("matrix", "other"))
    shape = optimize.Shape(1, heads=1, hidden_size=8, products=2)
    qdq.quantize(tmp_path / "half.onnx", tmp_path / "made.onnx", shape, {}, [product], {"rows": cut})
    emulation.emulate(tmp_path / "made.onnx", tmp_path / "twin.onnx")
    found = run(tmp_path / "twin.onnx", {"rows": rows})
    steps = rows.max() / 255
    for exact, answered in zip((rows @ matrix + bias, rows @ matrix[:, :2]), found, strict=True):
        # Half a step of each of 8 activations, and as much for the weights and fp16.
        assert np.abs(exact - answered).max() < 8 * np.abs(matrix).max() * steps / 2 * 1.5
    assert sum(node.op_type == "Add" for node in onnx.load(tmp_path / "made.onnx").graph.node) == 3


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(STEMS))
def test_every_family_builds_for_a_t4(tmp_path: Path, model_type: str) -> None:
    """The quantised graph of every family parses and builds where there is no GPU."""
    made = quantised(tmp_path, write_task_checkpoint(tmp_path / "small", model_type, "classify"))
    done = tensorrt.build(made, tmp_path / "engine", "t4", max_length=SHORT, count=ignore)
    assert name_of(done.engine, "int8") == "native.sm75.int8.engine"
    assert (tmp_path / "engine").stat().st_size > 0


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with an INT8 engine for a T4, and the graph that a node builds its own of."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = write_checkpoint(folder / "small", layers=1)
    words = ["--precision", "fp32", "--max-length", str(SHORT), "--tensorrt", "t4", "--tensorrt", "graph"]
    assert main([str(checkpoint), "--out", str(folder / "models"), *words, "--tensorrt-precision", "int8"]) == 0
    return folder / "models" / "small" / "1"


def test_an_export_brings_the_engine_and_how_its_graph_compares(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine itself is unproven; the figures of its graph stand in the manifest, the report and the summary."""
    bundle = open_bundle(exported)
    engine = bundle.artifact("int8", "sm75")
    assert (engine.file, engine.proven) == ("model.sm75.int8.engine", False)
    assert engine.graph.parity.texts == 256
    assert 0.99 < engine.graph.parity.cosine_min < 0.999999
    assert engine.graph.batch_invariant
    assert (engine.quantisation.activations, engine.quantisation.texts) == ("static", 128)
    assert list(bundle.engine_graphs) == ["int8"]
    page = (exported / "report.html").read_text()
    assert "The figures below are for the graph that it was built from, on a CPU." in page
    assert f"{engine.graph.parity.cosine_min:.6f}" in page
    assert inspect.main([str(exported)]) == 0
    assert "UNPROVEN: measured on its graph, on a CPU" in capsys.readouterr().out


def test_a_node_builds_an_int8_engine_of_the_bundles_graph(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the only graph that is there, or of the one that is asked for; what is missing is said with how to make it."""
    words = [str(exported), "--cache-dir", str(tmp_path), "--target", "t4"]
    assert build.main([*words, "--precision", "fp16"]) == 1
    said = capsys.readouterr().err
    assert "but not in fp16; export it with --tensorrt graph --tensorrt-precision fp16" in said
    assert build.main(words) == 0
    assert "native.sm75.int8.engine was not run" in capsys.readouterr().out
    (derived,) = tmp_path.rglob("derived.json")
    (engine,) = json.loads(derived.read_text())["engines"]
    assert (engine["precision"], engine["quantisation"]["activations"]) == ("int8", "static")


@pytest.mark.usefixtures("few_texts_of_pytorch")
def test_a_graph_that_breaks_a_limit_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No engine is built of it; the others of the bundle are written, and the exit code says that one is missing."""
    checkpoint = write_checkpoint(tmp_path / "small", layers=1)
    words = ["--precision", "fp32", "--max-length", str(SHORT), "--tensorrt", "t4", "--tensorrt-precision", "int8"]
    limit = ["--limit", "int8-tensorrt.cosine_min=0.9999999"]
    assert main([str(checkpoint), "--out", str(tmp_path / "models"), *words, *limit]) != 0
    said = capsys.readouterr().err
    assert "the INT8 graph for TensorRT does not match PyTorch" in said
    assert "--allow int8-tensorrt.cosine_min, or calibrate on your own texts" in said
    manifest = json.loads((tmp_path / "models" / "small" / "1" / MANIFEST).read_text())
    assert [artifact["file"] for artifact in manifest["artifacts"]] == ["model.fp32.onnx"]


def test_a_graph_that_lacks_products_is_refused(graph: Path) -> None:
    """A matrix that was not found must not stay in fp16 unseen."""
    shape = optimize.Shape(LAYERS + 1, heads=4, hidden_size=32)
    with pytest.raises(ExportError, match="incomplete: found 0 products with a matrix, expected 18"):
        qdq.quantize(graph.with_name("half.onnx"), graph.with_name("lacking.onnx"), shape, {}, [], {})
