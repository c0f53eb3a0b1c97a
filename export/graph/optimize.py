"""Transformer fusions, with a gate on their count: a fusion that no longer matches must not go unseen."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx
from onnx import numpy_helper
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from export.checkpoint.families.family import ACTIVATIONS, BERT_EMBEDDING, BERT_LAYER
from export.errors import ExportError
from export.progress import quiet

if TYPE_CHECKING:
    from collections.abc import Mapping
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
        layer: Fused operators of a layer beside its activation's.
        products: A layer's products with a matrix.
        activation: The operator that a layer's activation becomes; None for one that stays as it is.
        embedding: Fused operators of the embedding.
        projected: Whether the embeddings are projected to the layers' width.
        head_products: Products of a head with a matrix, beside its last one.
        predicts_words: Whether the graph ends in a head over the vocabulary.
        shared_layers: Whether layers share their weights.
    """

    layers: int
    heads: int
    hidden_size: int
    layer: Mapping[str, int] = field(default_factory=lambda: BERT_LAYER)
    products: int = 6
    activation: str | None = "BiasGelu"
    embedding: Mapping[str, int] = field(default_factory=lambda: BERT_EMBEDDING)
    projected: bool = False
    head_products: int = 0
    predicts_words: bool = False
    shared_layers: bool = False

    @property
    def embedding_fusion(self) -> bool:
        """Whether the embedding becomes one operator."""
        return "EmbedLayerNormalization" in self.embedding

    @property
    def attention_fusion(self) -> bool:
        """Whether a layer's attention becomes one operator."""
        return "Attention" in self.layer

    def fused(self) -> dict[str, int]:
        """How many of each operator the fusions must leave."""
        counts = Counter(self.embedding)
        counts.update({operator: count * self.layers for operator, count in self.layer.items()})
        if self.activation is not None:
            # The head over the vocabulary has an activation of its own.
            counts[self.activation] = self.layers + self.predicts_words
        return counts


def shape_of(checkpoint: Checkpoint) -> Shape:
    """The shape of a checkpoint's graph."""
    family = checkpoint.family
    return Shape(
        layers=checkpoint.layers,
        heads=checkpoint.heads,
        hidden_size=checkpoint.hidden_size,
        layer=family.layer,
        products=family.products,
        activation=None if family.gated else ACTIVATIONS[checkpoint.activation],
        # Without positions and segments nothing is added that its normalisation could take in.
        embedding=family.embedding if checkpoint.known_segments or family.offset_positions else {},
        projected=family.projection == "always" or checkpoint.embedding_size != checkpoint.hidden_size,
        head_products=0 if checkpoint.task in {"embed", "embed_tokens", "fill_mask"} else family.head_products,
        predicts_words=checkpoint.task == "fill_mask",
        shared_layers=family.shared_layers,
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
    if shape.shared_layers:
        share_equal(fused)
    check_counts(operators(fused), shape.fused(), "the fusion")


def _optimize(raw: Path, fused: Path, shape: Shape) -> None:
    model = _light(raw)
    _put_branches_first(model.graph)
    options = FusionOptions("bert")
    # Where the sum of the embeddings is used beside its normalisation, the fused operator would be one more copy.
    options.enable_embed_layer_norm = shape.embedding_fusion
    options.enable_attention = shape.attention_fusion
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
    """Turns residual additions so that what was computed last stands before what it is added to.

    The fusion of attention follows the first addition that it meets from a residual one. Where that is the layer's
    own input (the sum or the projection of the embeddings, in the first layer), the fusion loses its way.
    """
    producers = {name: (at, node) for at, node in enumerate(graph.node) for name in node.output}

    def is_branch(name: str) -> bool:
        parents = [producers.get(parent, (0, None))[1] for parent in producers[name][1].input]
        return producers[name][1].op_type == "Add" and any(p is not None and p.op_type == "MatMul" for p in parents)

    for node in graph.node:
        if node.op_type == "Add" and all(name in producers for name in node.input):
            first, second = node.input
            if is_branch(second) and producers[first][0] < producers[second][0]:
                node.input[0], node.input[1] = second, first


def share_equal(path: Path) -> None:
    """Keeps one of the initialisers that are equal: layers that share weights are traced with a copy for each."""
    model = onnx.load(path)
    kept: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    names = {}
    for tensor in model.graph.initializer:
        content = hashlib.sha256(numpy_helper.to_array(tensor).tobytes()).digest()
        names[tensor.name] = kept.setdefault((tensor.data_type, tuple(tensor.dims), content), tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    copies = [tensor for tensor in model.graph.initializer if names[tensor.name] == tensor.name]
    shared = onnx.GraphProto(name=model.graph.name)
    shared.node.extend(model.graph.node)
    shared.input.extend(model.graph.input)
    shared.output.extend(model.graph.output)
    shared.initializer.extend(copies)
    onnx.save(onnx.helper.make_model(shared, opset_imports=model.opset_import, ir_version=model.ir_version), path)


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
