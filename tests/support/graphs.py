"""ONNX graphs of small random transformers, as the exporter that traces writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers

from bertserve.export.graph import task_model
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.precision import half, ranges
from bertserve.export.progress import quiet
from tests.support import traced

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

PRODUCTS = ("MatMul", "Gemm")
TOKENS = 200
POSITIONS = 80
_SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": POSITIONS,
}
_DISTILBERT = {
    "vocab_size": TOKENS,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 256,
    "max_position_embeddings": POSITIONS,
}
ARCHITECTURES = {
    "BertModel": _SIZES,
    "BertForMaskedLM": _SIZES,
    "RobertaForSequenceClassification": _SIZES,
    "ElectraForTokenClassification": {**_SIZES, "embedding_size": 32, "num_labels": 9},
    "MegatronBertForSequenceClassification": _SIZES,
    "DistilBertForQuestionAnswering": _DISTILBERT,
    "BertForSequenceClassification": {**_SIZES, "hidden_act": "gelu_new"},
}
"""One of each kind of encoder and of head, the last with another activation; with their sizes."""

_SHARP = ("query", "key", "q_lin", "k_lin", "classifier", "qa_outputs", "embeddings", "predictions", "norm")


def write_graph(path: Path, architecture: str, *, scale: float = 1) -> Path:
    """Writes the graph of a random model.

    `scale` multiplies the weights, but for those of queries, keys and heads: attention that looks at one token alone,
    or logits far apart, would make of any rounding another answer.
    """
    kind: Any = getattr(transformers, architecture)
    config = kind.config_class(**ARCHITECTURES[architecture], attn_implementation="eager")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).eval()
        for name, weight in model.named_parameters():
            is_scaled = weight.ndim > 1 and not any(word in name.lower() for word in _SHARP)
            is_gain = weight.ndim == 1 and ("norm" in name.lower() or ".ln." in name) and name.endswith("weight")
            torch.nn.init.normal_(weight, float(is_gain), 0.1 * (scale if is_scaled else 1))
        names = [f"output_{at}" for at, _ in enumerate(traced.Outputs(model)(*_example()))]
        axes = {0: "batch", 1: "sequence"}
        torch.onnx.export(
            traced.Outputs(model),
            _example(),
            path,
            input_names=["input_ids", "attention_mask"],
            output_names=names,
            dynamic_axes={"input_ids": axes, "attention_mask": axes, **{name: {0: "batch"} for name in names}},
            opset_version=task_model.OPSET,
            dynamo=False,
        )
    return path


def write_fill_mask_graph(path: Path) -> Path:
    """Writes the graph of a random BERT that fills masks: its head runs at their places alone."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.BertConfig(**_SIZES, attn_implementation="eager")
        masks = {0: "batch", 1: "masks"}
        torch.onnx.export(
            traced.Fills(transformers.BertForMaskedLM(config).eval()),
            (*_example(), torch.tensor([[1, 3], [2, 0]], dtype=torch.int32)),
            path,
            input_names=["input_ids", "attention_mask", "mask_positions"],
            output_names=["top_ids", "top_logits", "logsumexp"],
            dynamic_axes={
                **{name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")},
                **dict.fromkeys(("mask_positions", "top_ids", "top_logits", "logsumexp"), masks),
            },
            opset_version=task_model.OPSET,
            dynamo=False,
        )
    return path


def batch(*, texts: int = 6, tokens: int = 48) -> dict[str, NDArray[np.int32]]:
    generator = np.random.default_rng(0)
    ids = generator.integers(5, TOKENS, (texts, tokens)).astype(np.int32)
    mask = np.ones_like(ids)
    for row in range(texts):
        mask[row, tokens * (row + 1) // texts :] = 0
    return {"input_ids": np.where(mask == 1, ids, 1).astype(np.int32), "attention_mask": mask}


def some_ids() -> dict[str, NDArray[np.int32]]:
    """Eight texts of 20 tokens for a small checkpoint's graph."""
    ids = np.random.default_rng(0).integers(5, 90, (8, 20), np.int32)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def run(path: Path, tensors: Mapping[str, NDArray[Any]], **options: Any) -> list[NDArray[np.float32]]:
    """What ONNX Runtime answers on the CPU, of the tensors that the graph takes."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"], **options)
    found: list[NDArray[np.float32]] = session.run(
        None, {value.name: tensors[value.name] for value in session.get_inputs()}
    )
    return found


def save_graph(path: Path, nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], **weights: Any) -> Path:
    """Writes a graph of these nodes and constants for the operators of every test."""
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    opset = [onnx.helper.make_opsetid("", task_model.OPSET)]
    graph = onnx.helper.make_graph(nodes, "graph", inputs, outputs, tensors)
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return path


def _example() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3], dtype=torch.int32)
    return torch.arange(16, dtype=torch.int32).reshape(2, 8) + 5, mask


def check_ranges(path: Path, watched: Path, inputs: dict[str, NDArray[np.int32]]) -> None:
    """Holds every float tensor of a run against its proven range, which each product must have; writes to `watched`."""
    editor = GraphEditor(path, watched)
    editor.lift_constants()
    loaded = editor.model
    bounds = ranges.of_graph(loaded.graph, half.float_constants(editor))
    assert all(node.output[0] in bounds for node in loaded.graph.node if node.op_type in PRODUCTS)
    names = [name for name in bounds if name not in {value.name for value in loaded.graph.output}]
    loaded.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    editor.save()
    session = ort.InferenceSession(watched, providers=["CPUExecutionProvider"])
    for name, array in zip(names, session.run(names, inputs), strict=True):
        assert np.abs(array).max() <= bounds[name].peak * (1 + 1e-5), name
