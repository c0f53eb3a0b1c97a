from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from transformers.models.bert import BertModel

from export.checkpoint.reader import Checkpoint, open_checkpoint
from export.checkpoint.source import find
from export.errors import ExportError
from export.graph import optimize, task_model
from export.precision import int8, quantize
from tests.support.checkpoints import write_checkpoint
from tests.support.specs import model_spec

if TYPE_CHECKING:
    from pathlib import Path

    from export.precision.equalise import Cut

TEXTS = ["the server", "a text that is not in it", ("of the", "and to a"), "it"]
FP32 = {"EmbedLayerNormalization": 1, "Attention": 2, "SkipLayerNormalization": 4, "BiasGelu": 2}


def opened(folder: Path) -> Checkpoint:
    """Opens a folder."""
    return open_checkpoint(find(str(folder)), None, [].append)


def fused(checkpoint: Checkpoint, folder: Path) -> Path:
    """Exports and fuses a checkpoint's graph."""
    task_model.write(task_model.load(checkpoint), folder / "raw.onnx")
    optimize.fuse(folder / "raw.onnx", folder / "fused.onnx", optimize.shape_of(checkpoint))
    return folder / "fused.onnx"


def cuts(checkpoint: Checkpoint, path: Path) -> dict[str, Cut]:
    """How the graph's activations are cut, by a few texts."""
    spec = model_spec(max_length=checkpoint.max_length)
    return int8.cuts_of(path, spec, checkpoint.encode(TEXTS), lambda _done, _total: None)


@dataclass(frozen=True)
class Small:
    """A small checkpoint and its graphs, which no test changes."""

    checkpoint: Checkpoint
    raw: Path
    fused: Path

    @property
    def folder(self) -> Path:
        """Of the checkpoint."""
        return self.checkpoint.source.path


def made(folder: Path, **sizes: Any) -> Small:
    """Writes a checkpoint and its graphs."""
    checkpoint = opened(write_checkpoint(folder / "small", **sizes))
    return Small(checkpoint, folder / "raw.onnx", fused(checkpoint, folder))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    """The checkpoint that is written where nothing else is asked for."""
    return made(tmp_path_factory.mktemp("graph"))


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_graph_pools_as_pytorch_does(small: Small, tmp_path: Path, pooling: str, heads: int) -> None:
    """A padded batch through the graph is each text alone through Transformers, pooled by hand."""
    model = small if (pooling, heads) == ("mean", 4) else made(tmp_path, pooling=pooling, heads=heads)
    checkpoint, path = model.checkpoint, model.fused
    texts = checkpoint.vocabulary.encode(TEXTS, 64)
    longest = max(len(text.ids) for text in texts)
    tensors = {
        name: np.zeros((len(texts), longest), np.int32) for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    for row, text in enumerate(texts):
        length = len(text.ids)
        tensors["input_ids"][row, :length] = text.ids
        tensors["attention_mask"][row, :length] = 1
        tensors["token_type_ids"][row, :length] = text.type_ids or 0
    (pooled,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, tensors)
    bert = BertModel.from_pretrained(model.folder).eval()
    for row, text in enumerate(texts):
        types = text.type_ids or [0] * len(text.ids)
        with torch.inference_mode():
            hidden = bert(torch.tensor([text.ids]), token_type_ids=torch.tensor([types])).last_hidden_state[0].numpy()
        expected = hidden[0] if pooling == "cls" else hidden.mean(axis=0)
        np.testing.assert_allclose(pooled[row], expected, atol=1e-5)


def test_the_graphs_interface(small: Small) -> None:
    """Inputs are int32 and the output float32, with free batch and sequence, and everything in one file."""
    session = ort.InferenceSession(small.fused, providers=["CPUExecutionProvider"])
    inputs = [(i.name, i.type, i.shape) for i in session.get_inputs()]
    assert inputs == [
        (name, "tensor(int32)", ["batch", "sequence"]) for name in ("input_ids", "attention_mask", "token_type_ids")
    ]
    assert [(o.name, o.type, o.shape[0]) for o in session.get_outputs()] == [("pooled", "tensor(float)", "batch")]
    assert sorted(file.name for file in small.fused.parent.glob("*.onnx*")) == ["fused.onnx", "raw.onnx"]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_layer_is_fused_and_quantised(small: Small, tmp_path: Path, layers: int) -> None:
    """Per layer: one attention, two skip layer normalisations, one bias with GELU, and no float matrix left."""
    model = small if layers == small.checkpoint.layers else made(tmp_path, layers=layers)
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


def test_the_same_checkpoint_gives_the_same_bytes(small: Small, tmp_path: Path) -> None:
    """Exporting twice makes equal files, whatever the random state of the process."""
    checkpoint = small.checkpoint
    contents = []
    for name, path in (("first", small.fused), ("second", fused(checkpoint, tmp_path))):
        target = tmp_path / f"{name}.int8.onnx"
        quantize.quantize(path, target, optimize.shape_of(checkpoint), cuts(checkpoint, path), static=True)
        contents.append((path.read_bytes(), target.read_bytes()))
    assert contents[0] == contents[1]


def test_a_graph_that_does_not_fuse_is_refused(small: Small, tmp_path: Path) -> None:
    """A graph whose activation the optimizer does not recognise is stopped at the gate, with the counts."""
    raw = tmp_path / "raw.onnx"
    model = onnx.load(small.raw)
    first = next(node for node in model.graph.node if node.op_type == "Erf")
    first.op_type = "Tanh"
    onnx.save(model, raw)
    with pytest.raises(ExportError, match="1 BiasGelu, 2 expected"):
        optimize.fuse(raw, tmp_path / "fused.onnx", optimize.shape_of(small.checkpoint))


def test_the_gate_counts_each_operator() -> None:
    """One operator too few or too many is refused; the right counts pass."""
    optimize.check_counts({**FP32, "Other": 9}, FP32, "the fusion")
    for operator, count in FP32.items():
        for change in (-1, 1):
            with pytest.raises(ExportError, match=operator):
                optimize.check_counts({**FP32, operator: count + change}, FP32, "the fusion")


def test_an_encoder_beyond_two_gib_is_refused(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that one ONNX file cannot hold are refused before the graph is made."""
    monkeypatch.setattr(task_model, "MAX_ONNX_BYTES", 1000)
    with pytest.raises(ExportError, match="do not fit into one ONNX file"):
        task_model.load(small.checkpoint)


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
