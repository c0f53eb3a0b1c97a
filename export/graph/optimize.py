"""Transformer fusions, with a gate on their count: a fusion that no longer matches must not go unseen."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from export.errors import ExportError
from export.progress import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from export.checkpoint.reader import Checkpoint

_LISTED = frozenset({"MatMulInteger"})
"""Operators worth counting beside those of the domain com.microsoft."""


@dataclass(slots=True, frozen=True)
class Shape:
    """What a graph is made of, as far as fusions and gates have to know.

    Attributes:
        layers: Transformer layers.
        heads: Attention heads of a layer.
        hidden_size: Components of a token's vector.
        embedding_fusion: Whether the embedding becomes one operator.
        pre_normalised: Whether a layer normalises its input instead of its output.
        projected: Whether the embeddings are projected to the layers' width.
        predicts_words: Whether the graph ends in a head over the vocabulary.
    """

    layers: int
    heads: int
    hidden_size: int
    embedding_fusion: bool = True
    pre_normalised: bool = False
    projected: bool = False
    predicts_words: bool = False

    def fused(self) -> dict[str, int]:
        """How many of each operator the fusions must leave."""
        return {
            "EmbedLayerNormalization": int(self.embedding_fusion),
            "Attention": self.layers,
            "SkipLayerNormalization": 2 * self.layers,
            # The head over the vocabulary has an activation of its own.
            "BiasGelu": self.layers + self.predicts_words,
        }


def shape_of(checkpoint: Checkpoint) -> Shape:
    """The shape of a checkpoint's graph."""
    return Shape(
        layers=checkpoint.layers,
        heads=checkpoint.heads,
        hidden_size=checkpoint.hidden_size,
        embedding_fusion=checkpoint.family.embedding_fusion,
        pre_normalised=checkpoint.family.pre_normalised,
        projected=checkpoint.embedding_size != checkpoint.hidden_size,
        predicts_words=checkpoint.task == "fill_mask",
    )


def fuse(raw: Path, fused: Path, shape: Shape) -> None:
    """Fuses a graph with ONNX Runtime's optimizer, offline transformations only.

    Args:
        raw: The graph as exported.
        fused: Where to write.
        shape: What the graph is made of.

    Raises:
        ExportError: The graph did not fuse completely.
    """
    with quiet():
        _optimize(raw, fused, shape)
    # The optimizer's objects refer to one another, and hold the model until they are looked for.
    gc.collect()
    _restore(fused, raw)
    check_counts(operators(fused), shape.fused(), "the fusion")


def _optimize(raw: Path, fused: Path, shape: Shape) -> None:
    model = _light(raw)
    if shape.pre_normalised:
        _put_branches_first(model.graph)
    options = FusionOptions("bert")
    # Where the sum of the embeddings is used beside its normalisation, the fused operator would be one more copy.
    options.enable_embed_layer_norm = shape.embedding_fusion
    optimized = optimize_model(
        model,
        model_type="bert",
        num_heads=shape.heads,
        hidden_size=shape.hidden_size,
        optimization_options=options,
        # What the runtime does by itself at load time stays its own business.
        opt_level=0,
    )
    optimized.save_model_to_file(str(fused))


def _light(raw: Path) -> onnx.ModelProto:
    """The graph with the matrices that no fusion looks into as inputs: those of products that are not square.

    The optimizer copies the model for each inference of shapes. With two thirds of its bytes elsewhere BERT-large
    fuses in 5 GB instead of 13. A new model is made, since a message keeps the memory of what is removed from it.
    """
    whole = onnx.load(raw)
    names = _aside(whole.graph)
    graph = onnx.GraphProto(name=whole.graph.name)
    graph.node.extend(whole.graph.node)
    graph.input.extend(whole.graph.input)
    graph.output.extend(whole.graph.output)
    graph.initializer.extend(tensor for tensor in whole.graph.initializer if tensor.name not in names)
    graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in whole.graph.initializer
        if tensor.name in names
    )
    return onnx.helper.make_model(graph, opset_imports=whole.opset_import, ir_version=whole.ir_version)


def _restore(fused: Path, raw: Path) -> None:
    """Gives the graph made of the light one its matrices back."""
    model, whole = onnx.load(fused), onnx.load(raw).graph
    names = _aside(whole)
    inputs = [value for value in model.graph.input if value.name not in names]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.extend(tensor for tensor in whole.initializer if tensor.name in names)
    onnx.save(model, fused)


def _aside(graph: onnx.GraphProto) -> frozenset[str]:
    used = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    matrices = (tensor for tensor in graph.initializer if tensor.name in used)
    return frozenset(tensor.name for tensor in matrices if len(set(tensor.dims)) > 1)


def _put_branches_first(graph: onnx.GraphProto) -> None:
    """Turns residual additions so that what was computed stands before what it is added to.

    The fusion of attention follows the first addition that it meets from a residual one. Where a layer
    normalises its input, that is the sum of the embeddings in the first layer, and the fusion loses its way.
    """
    producers = {name: node for node in graph.node for name in node.output}

    def is_branch(name: str) -> bool:
        node = producers.get(name)
        parents = [] if node is None else [producers.get(parent) for parent in node.input]
        return (
            node is not None and node.op_type == "Add" and any(p is not None and p.op_type == "MatMul" for p in parents)
        )

    for node in graph.node:
        if node.op_type == "Add" and not is_branch(node.input[0]) and is_branch(node.input[1]):
            node.input[0], node.input[1] = node.input[1], node.input[0]


def operators(path: Path) -> dict[str, int]:
    """How many of each fused or quantised operator a graph holds."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    counts = Counter(node.op_type for node in nodes if node.domain == "com.microsoft" or node.op_type in _LISTED)
    return dict(sorted(counts.items()))


def check_counts(counts: dict[str, int], expected: dict[str, int], step: str) -> None:
    """The gate.

    Raises:
        ExportError: Some operator is there more or less often than it must be.
    """
    for operator, count in expected.items():
        if counts.get(operator, 0) != count:
            raise ExportError(
                f"{step} of the graph is incomplete: {counts.get(operator, 0)} {operator}, {count} expected; "
                "the installed torch, transformers and onnxruntime do not fit together"
            )
