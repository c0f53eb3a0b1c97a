"""Transformer fusions, with a check on their count."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import numpy_helper
from onnxruntime.transformers.fusion_options import FusionOptions
from onnxruntime.transformers.optimizer import optimize_model

from bertserve.export.checkpoint.families.family import ACTIVATIONS, BERT_EMBEDDING, BERT_LAYER
from bertserve.export.checkpoint.sparse import blocks
from bertserve.export.errors import ExportError
from bertserve.export.graph import flow
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.graph.nodes import matrices
from bertserve.export.progress import quiet
from bertserve.serving.records import IDS
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from bertserve.export.checkpoint.reader import Checkpoint

_LISTED = frozenset({"MatMulInteger"})
"""Operators to count beside those of the domain com.microsoft."""


@dataclass(slots=True, frozen=True)
class Shape:
    """The structure of a graph, for fusions and checks.

    Attributes:
        layer: Fused operators of a layer, beside its activation.
        activation: The operator of a layer's fused activation; None if it is not fused.
        word_activation: That of the vocabulary head.
        other_activations: The same for activations without a bias: only `FastGelu` accepts that.
        convolves: Whether a convolution is added to the first layer's result.
        embedding: Fused operators of the embedding.
        projected: Whether embeddings are projected to the layers' size.
        head_products: Matrix products of a head, beside its last one.
        predicts_words: Whether the graph ends in a vocabulary head.
        word_blocks: Blocks of that head's last matrix.
        stored_layers: Layers with weights of their own; 0 stands for all.
    """

    layers: int
    heads: int
    hidden_size: int
    layer: Mapping[str, int] = field(default_factory=lambda: BERT_LAYER)
    products: int = 6
    activation: str | None = "BiasGelu"
    word_activation: str | None = "BiasGelu"
    other_activations: Sequence[str | None] = ()
    convolves: bool = False
    embedding: Mapping[str, int] = field(default_factory=lambda: BERT_EMBEDDING)
    projected: bool = False
    head_products: int = 0
    predicts_words: bool = False
    word_blocks: int = 1
    shared_layers: bool = False
    stored_layers: int = 0

    @property
    def embedding_fusion(self) -> bool:
        """Whether the embedding becomes one operator."""
        return "EmbedLayerNormalization" in self.embedding

    @property
    def attention_fusion(self) -> bool:
        """Whether a layer's attention becomes one operator."""
        return "Attention" in self.layer

    def fused(self) -> dict[str, int]:
        """Number of each operator after the fusions."""
        counts = Counter(self.embedding)
        counts.update({operator: count * self.layers for operator, count in self.layer.items()})
        counts.update({self.activation: self.layers} if self.activation else {})
        counts.update([self.word_activation] if self.predicts_words and self.word_activation else [])
        counts.update([operator for operator in self.other_activations if operator == "FastGelu"])
        counts.update(["SkipLayerNormalization"] if self.convolves else [])
        return counts


def shape_of(checkpoint: Checkpoint) -> Shape:
    family, task = checkpoint.encoder.family, TASKS[checkpoint.task]
    predicts_words = bool(checkpoint.candidates or checkpoint.active)
    return Shape(
        layers=checkpoint.encoder.layers,
        heads=checkpoint.encoder.size("heads"),
        hidden_size=checkpoint.encoder.hidden_size,
        layer=family.layer,
        products=family.products,
        activation=None if family.gated else ACTIVATIONS[checkpoint.encoder.activation],
        word_activation=None if family.gated else ACTIVATIONS[family.head_activation or checkpoint.encoder.activation],
        other_activations=tuple(ACTIVATIONS.get(name) for name in checkpoint.other_activations),
        convolves=checkpoint.encoder.convolves,
        # Without positions and token types there is no sum for a fused normalization.
        embedding=family.embedding if checkpoint.encoder.known_segments or family.offset_positions else {},
        projected=family.projection == "always" or checkpoint.encoder.embedding_size != checkpoint.encoder.hidden_size,
        head_products=0 if task.headless or predicts_words else family.head_products,
        predicts_words=predicts_words,
        word_blocks=blocks(checkpoint.encoder.vocab_size) if checkpoint.active else 1,
        shared_layers=family.shared_layers,
        stored_layers=checkpoint.encoder.stored_layers,
    )


def fuse(raw: Path, fused: Path, shape: Shape) -> None:
    """Fuses a graph with ONNX Runtime's optimizer, offline transformations only.

    Raises:
        ExportError: The graph did not fuse completely.
    """
    editor = GraphEditor(raw, fused)
    with quiet():
        _restore(editor, _optimize(editor, shape))
    # The optimizer's objects form reference cycles, which hold the model until a collection.
    gc.collect()
    if shape.shared_layers:
        editor.share_equal()
    editor.save()
    check_counts(operators(fused), shape.fused(), "fusion")
    flow.check(raw, fused)


def _optimize(editor: GraphEditor, shape: Shape) -> onnx.ModelProto:
    model = _light(editor)
    _put_branches_first(model.graph)
    _take_lengths_from_ids(model.graph)
    options = FusionOptions("bert")
    # If the sum of the embeddings is also used without normalization, the fused operator would be an additional copy.
    options.enable_embed_layer_norm = shape.embedding_fusion
    options.enable_attention = shape.attention_fusion
    optimized = optimize_model(
        model,
        model_type="bert",
        num_heads=shape.heads,
        hidden_size=shape.hidden_size,
        optimization_options=options,
        # Runtime transformations at load time are left to the runtime.
        opt_level=0,
    )
    optimized.topological_sort()
    fused: onnx.ModelProto = optimized.model
    return fused


def _light(editor: GraphEditor) -> onnx.ModelProto:
    """The graph without matrices that fusions do not inspect: non-square ones of products, and tables.

    Matrices of products become inputs. Tables keep one row, because the embedding fusion reads their width. The
    optimizer copies the model for each shape inference: without most of its bytes, it needs a fraction of the memory.
    """
    whole, aside, tables = editor.graph, _matrices(editor.graph), _tables(editor.graph)
    graph = onnx.GraphProto(name=whole.name)
    graph.node.extend(whole.node)
    graph.input.extend(whole.input)
    graph.output.extend(whole.output)
    for tensor in whole.initializer:
        if tensor.name in aside:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            array = editor[tensor.name]
            graph.initializer.append(
                numpy_helper.from_array(array[:1] if tensor.name in tables else array, tensor.name)
            )
    return onnx.helper.make_model(graph, opset_imports=editor.model.opset_import, ir_version=editor.model.ir_version)


def _restore(editor: GraphEditor, light: onnx.ModelProto) -> None:
    """Applies the changes of the light graph to the whole graph."""
    aside = _matrices(editor.graph) | _tables(editor.graph)
    for tensor in light.graph.initializer:
        array = numpy_helper.to_array(tensor)
        if tensor.name not in editor or (tensor.name not in aside and not np.array_equal(editor[tensor.name], array)):
            editor[tensor.name] = array
    editor.keep(aside.union(tensor.name for tensor in light.graph.initializer))
    del editor.graph.node[:], editor.model.opset_import[:]
    editor.graph.node.extend(light.graph.node)
    editor.model.opset_import.extend(light.opset_import)


def _matrices(graph: onnx.GraphProto) -> frozenset[str]:
    used = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    return frozenset(t.name for t in graph.initializer if t.name in used and len(set(t.dims)) > 1)


def _tables(graph: onnx.GraphProto) -> frozenset[str]:
    """Tables that are only used for lookups."""
    uses = [(name, (node.op_type, at) == ("Gather", 0)) for node in graph.node for at, name in enumerate(node.input)]
    looked_up, others = ({name for name, is_table in uses if is_table is wanted} for wanted in (True, False))
    return frozenset(looked_up & matrices(graph) - others)


def _put_branches_first(graph: onnx.GraphProto) -> None:
    """Orders the inputs of residual additions: the latest result first.

    The attention fusion follows the first addition that it meets. If that is the layer's own input (the sum or
    projection of the embeddings, in the first layer), the fusion fails.
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


def _take_lengths_from_ids(graph: onnx.GraphProto) -> None:
    """Takes a batch's shape from its ids if the graph takes it from word vectors.

    The fused embedding looks words up itself. The remaining original lookup would repeat that for a shape only, and
    fp16 would hold the table twice.
    """
    producers = {name: node for node in graph.node for name in node.output}
    axes = {node.output[0]: numpy_helper.to_array(node.attribute[0].t) for node in graph.node if _is_number(node)}
    for node in graph.node:
        words = producers.get(node.input[0]) if node.op_type == "Shape" else None
        if words is not None and words.op_type == "Gather" and words.input[1] == IDS:
            users = [user for user in graph.node if node.output[0] in user.input]
            if all(user.op_type == "Gather" and axes.get(user.input[1], -1) in (0, 1) for user in users):
                node.input[0] = IDS


def _is_number(node: onnx.NodeProto) -> bool:
    return node.op_type == "Constant" and node.attribute[0].name == "value" and not node.attribute[0].t.dims


def operators(path: Path) -> dict[str, int]:
    """Number of each fused or quantized operator in a graph."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    counts = Counter(node.op_type for node in nodes if node.domain == "com.microsoft" or node.op_type in _LISTED)
    return dict(sorted(counts.items()))


def check_counts(counts: dict[str, int], expected: dict[str, int], step: str) -> None:
    """Checks the number of fused operators.

    Raises:
        ExportError: A number differs from what it must be.
    """
    for operator, count in expected.items():
        if counts.get(operator, 0) != count:
            raise ExportError(
                f"{step} of the graph is incomplete: found {counts.get(operator, 0)} {operator}, expected {count}; "
                "the installed versions of torch, transformers and onnxruntime are incompatible"
            )
