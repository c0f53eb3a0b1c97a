from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from bertserve.export.errors import ExportError
from bertserve.export.graph import editor, optimize, task_model
from bertserve.export.precision import int8, quantize
from bertserve.serving.engine.specs import DATA_SUFFIX
from bertserve.serving.models.artifact_scan import check_model_file
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import fused, ignore, opened
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint
    from bertserve.export.precision.equalise import Cut

TEXTS = ["the server", "a text that is not in it", ("of the", "and to a"), "it"]
FP32 = {"EmbedLayerNormalization": 1, "Attention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2}


def cuts(checkpoint: Checkpoint, path: Path) -> dict[str, Cut]:
    """How the graph's activations are cut, by a few texts."""
    spec = model_spec(max_length=checkpoint.max_length)
    return int8.cuts_of(path, spec, checkpoint.encode(TEXTS), ignore)


@dataclass(frozen=True)
class Small:
    """A small checkpoint and its graphs, which no test changes."""

    checkpoint: Checkpoint
    raw: Path
    fused: Path

    @property
    def folder(self) -> Path:
        return self.checkpoint.source.path


def beside(graph: Path) -> Path:
    """Where the weights of a graph lie that is too large for one file."""
    return graph.with_name(f"{graph.name}{DATA_SUFFIX}")


def made(folder: Path, **sizes: Any) -> Small:
    checkpoint = opened(write_checkpoint(folder / "small", **sizes))
    return Small(checkpoint, folder / "raw.onnx", fused(checkpoint, folder))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The checkpoint that is written where nothing else is asked for."""
    return made(tmp_path_factory.mktemp("graph"))


def test_the_graphs_interface(small: Small) -> None:
    """Inputs are int32 and the output float32, with free batch and sequence; between two steps, weights lie outside."""
    session = ort.InferenceSession(small.fused, providers=["CPUExecutionProvider"])
    inputs = [(i.name, i.type, i.shape) for i in session.get_inputs()]
    assert inputs == [
        (name, "tensor(int32)", ["batch", "sequence"]) for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    assert [(o.name, o.type, o.shape[0]) for o in session.get_outputs()] == [("pooled", "tensor(float)", "batch")]
    files = {file.name: file.stat().st_size for file in small.fused.parent.glob("*.onnx*")}
    assert files.keys() == {"raw.onnx", "raw.onnx.data", "fused.onnx", "fused.onnx.data"}
    # What the fusions leave as it is stays where it was.
    assert files["fused.onnx.data"] < files["raw.onnx.data"] / 2


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_layer_is_fused_and_quantised(small: Small, tmp_path: Path, layers: int) -> None:
    """Per layer: one attention, two skip layer normalisations, one bias with GELU, and no float matrix left."""
    model = small if layers == small.checkpoint.encoder.layers else made(tmp_path, layers=layers)
    checkpoint, path = model.checkpoint, model.fused
    assert optimize.operators(path) == {
        "Attention": layers,
        "BiasGelu": layers,
        "EmbedLayerNormalization": 1,
        "SkipLayerNormalization": 2 * layers,
    }
    quantize.quantize(path, tmp_path / "int8.onnx", optimize.shape_of(checkpoint), cuts(checkpoint, path), static=True)
    found = optimize.operators(tmp_path / "int8.onnx")
    assert (found["QAttention"], found["MatMulIntegerToFloat"]) == (layers, 3 * layers)
    assert not [node.name for node in onnx.load(tmp_path / "int8.onnx").graph.node if node.op_type == "MatMul"]


def test_feed_forward_channels_are_repeated_before_they_are_quantised(small: Small, tmp_path: Path) -> None:
    """Both matrices and the bias between them have the same channels more often, 16 more at most, as the cut says."""
    path, target = small.fused, tmp_path / "int8.onnx"
    chosen = cuts(small.checkpoint, path)
    quantize.quantize(path, target, optimize.shape_of(small.checkpoint), chosen, static=True)
    before, after = (editor.GraphEditor(graph, graph) for graph in (path, target))
    repeats = [cut.repeats for cut in chosen.values() if cut.repeats is not None]
    functions = [[node for node in one.graph.node if node.op_type == "BiasGelu"] for one in (before, after)]
    assert len(repeats) == len(functions[1]) == small.checkpoint.encoder.layers
    for often, old, new in zip(repeats, *functions, strict=True):
        assert len(often) < often.sum() <= len(often) + 16
        np.testing.assert_array_equal(after[new.input[1]], np.repeat(before[old.input[1]], often))
        [second] = [node for node in before.graph.node if old.output[0] in node.input]
        assert after[f"{old.input[0]}.matrix"].shape[1] == len(after[f"{second.output[0]}.matrix"]) == often.sum()


def test_the_same_checkpoint_gives_the_same_bytes(small: Small, tmp_path: Path) -> None:
    """Exporting twice makes equal files, whatever the random state of the process."""
    checkpoint = small.checkpoint
    contents = []
    for name, path in (("first", small.fused), ("second", fused(checkpoint, tmp_path))):
        target = tmp_path / f"{name}.int8.onnx"
        quantize.quantize(path, target, optimize.shape_of(checkpoint), cuts(checkpoint, path), static=True)
        contents.append((path.read_bytes(), beside(path).read_bytes(), target.read_bytes()))
    assert contents[0] == contents[1]


def test_a_graph_that_does_not_fuse_is_refused(small: Small, tmp_path: Path) -> None:
    """A graph whose activation the optimizer does not recognise is stopped at the gate, with the counts."""
    raw = tmp_path / "raw.onnx"
    model = onnx.load(small.raw)
    first = next(node for node in model.graph.node if node.op_type == "Erf")
    first.op_type = "Tanh"
    onnx.save(model, raw)
    with pytest.raises(ExportError, match="found 1 BiasGelu, expected 2"):
        optimize.fuse(raw, tmp_path / "fused.onnx", optimize.shape_of(small.checkpoint))


@pytest.mark.parametrize(("source", "left_out"), [("token_type_ids", "token_type_ids"), ("heads", "a weight")])
def test_a_fusion_that_leaves_out_what_masks_a_token_is_refused(
    small: Small, tmp_path: Path, source: str, left_out: str
) -> None:
    """The fused attention takes the attention mask from its place and all else that the mask is joined with for true.

    Every operator is there once for each layer all the same.
    """
    raw = tmp_path / "raw.onnx"
    model = onnx.load(small.raw)
    graph, make = model.graph, onnx.helper.make_node
    graph.initializer.append(numpy_helper.from_array(np.ones((4, 1, 1), np.float32), "heads"))
    graph.initializer.append(numpy_helper.from_array(np.array([1, 2], np.int64), "axes"))
    joined = [node for node in graph.node if node.op_type == "And"][-1]
    at = list(graph.node).index(joined)
    graph.node.insert(at, make("Cast", [source], ["condition"], to=onnx.TensorProto.BOOL))
    if source != "heads":
        graph.node.insert(at + 1, make("Unsqueeze", ["condition", "axes"], ["turned"]))
    joined.input[0] = "condition" if source == "heads" else "turned"
    onnx.save(model, raw)
    shape = optimize.shape_of(small.checkpoint)
    with pytest.raises(ExportError, match=f"graph fusion dropped {left_out}, which .*attention/self"):
        optimize.fuse(raw, tmp_path / "fused.onnx", shape)
    assert shape.fused().items() <= optimize.operators(tmp_path / "fused.onnx").items()


def test_the_gate_counts_each_operator() -> None:
    """One operator too few or too many is refused; the right counts pass."""
    optimize.check_counts({**FP32, "Other": 9}, FP32, "the fusion")
    for operator, count in FP32.items():
        for change in (-1, 1):
            with pytest.raises(ExportError, match=operator):
                optimize.check_counts({**FP32, operator: count + change}, FP32, "the fusion")


def test_a_graph_is_one_file_up_to_a_size(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the limit everything lies in it, beyond it the large tensors lie in one file beside it, with equal content.

    Written again as one file the other one goes.
    """
    whole, parted = tmp_path / "whole.onnx", tmp_path / "parted.onnx"
    editor.copy(small.fused, whole)
    assert not beside(whole).exists()
    monkeypatch.setattr(editor, "LARGEST_FILE", 2 * whole.stat().st_size)
    editor.copy(small.fused, parted)
    assert parted.read_bytes() == whole.read_bytes()
    monkeypatch.setattr(editor, "LARGEST_FILE", whole.stat().st_size // 2)
    for source in (small.fused, whole):
        editor.copy(source, parted)
        assert parted.stat().st_size < whole.stat().st_size / 4
        assert beside(parted).stat().st_size > whole.stat().st_size / 2
        assert sorted(file.name for file in tmp_path.iterdir()) == ["parted.onnx", "parted.onnx.data", "whole.onnx"]
        check_model_file(parted, beside(parted).name)
        one, other = (
            {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
            for path in (whole, parted)
        )
        assert one.keys() == other.keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
    monkeypatch.undo()
    editor.copy(parted, parted)
    assert not beside(parted).exists()
    assert optimize.operators(parted) == optimize.operators(whole)


def test_pytorch_answers_each_text_alone(small: Small) -> None:
    """Answers come in the order of the texts, the same however many run at once, and each is counted."""
    model = task_model.load(small.checkpoint)
    texts = small.checkpoint.vocabulary.encode(TEXTS * 5, 64)
    counts: list[tuple[int, int]] = []
    rows = task_model.answers(model, texts, threads=3, count=lambda done, total: counts.append((done, total)))
    together = np.stack([row[0] for row in rows])
    assert counts == [(done, 20) for done in range(1, 21)]
    np.testing.assert_array_equal(together[:4], together[16:])
    np.testing.assert_allclose(together, [model.answer(text)[0] for text in texts], atol=1e-6)
