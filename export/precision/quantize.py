"""INT8 for ONNX Runtime: weights of 8 bits per channel; activations by ranges seen on real text, or while running.

A range that stands fixed belongs to no batch: a text's answer does not depend on its neighbours, and no pass over
the activations looks for it. Where calibration text cannot tell the ranges, they are found while running.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto
from onnxruntime.quantization import QuantType, quantize_dynamic

from export.graph.nodes import replace
from export.graph.optimize import check_counts, operators, share_equal
from export.precision.equalise import eight_bits
from export.precision.products import Constants, find
from export.progress import quiet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from export.graph.optimize import Shape
    from export.precision.equalise import Cut

_MATRICES_OF_WORDS = 2
_TABLES = ["EmbedLayerNormalization", "Gather"]
_PARTS = 3
"""The fused matrix of attention holds the queries', the keys' and the values' side by side."""


def quantize(fused: Path, quantized: Path, shape: Shape, cuts: Mapping[str, Cut], *, static: bool) -> None:
    """Quantises a fused fp32 graph, but for the matrices that make the decision.

    Args:
        fused: The graph after the fusions; before them attention would not be quantised as one operator.
        quantized: Where to write.
        shape: What the graph is made of.
        cuts: How the activations of each product are cut, by their names.
        static: Whether their ranges stand fixed; else they are found anew for each batch.

    Raises:
        ExportError: Some matrix was not quantised.
    """
    products = quantized.with_name(f"{quantized.name}.products")
    model = onnx.load(fused)
    _Quantiser(model.graph, cuts, static=static).run()
    onnx.save(model, products)
    with quiet():
        quantize_dynamic(
            products,
            quantized,
            op_types_to_quantize=_TABLES,
            weight_type=QuantType.QInt8,
            # Shape inference does not know the fused operators' outputs; all of them are float32.
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )
    products.unlink()
    expected = {
        "QAttention": shape.layers * shape.attention_fusion,
        "MatMulIntegerToFloat": (shape.products - _PARTS * shape.attention_fusion) * shape.layers
        + shape.projected
        + shape.head_products
        + _MATRICES_OF_WORDS * shape.predicts_words,
        "QEmbedLayerNormalization": int(shape.embedding_fusion),
    }
    if shape.shared_layers:
        share_equal(quantized)
    check_counts(operators(quantized), expected, "the quantisation")


class _Quantiser:
    def __init__(self, graph: onnx.GraphProto, cuts: Mapping[str, Cut], *, static: bool) -> None:
        self._graph, self._cuts, self._static = graph, cuts, static
        self._constants = Constants(graph)
        self._products = find(graph)
        self._multiplied = {name for product in self._products for name in product.outputs}
        self._attention = {node.output[0]: node for node in graph.node if node.op_type == "Attention"}
        self._cut: dict[str, str] = {}

    def run(self) -> None:
        """Puts a quantised operator in the place of every product."""
        for product in self._products:
            attention = self._attention.get(product.activations)
            if attention is not None:
                self._divide_values(attention, self._cuts[product.activations])
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            nodes += self._quantised(node) if node.output[0] in self._multiplied else [node]
        replace(self._graph, nodes)
        self._constants.drop_unused()

    def _divide_values(self, attention: onnx.NodeProto, cut: Cut) -> None:
        """Divides what attention answers at no cost: it is a mean of the values, which its last columns make."""
        for name in attention.input[1:3]:
            array = self._constants[name].copy()
            array[..., array.shape[-1] // _PARTS * (_PARTS - 1) :] /= cut.factors
            self._constants[name] = array

    def _quantised(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        name, cut = node.input[0], self._cuts[node.input[0]]
        made = [] if name in self._cut else self._activations(name, cut)
        values, step, zero = (f"{self._cut[name]}.{part}" for part in ("values", "step", "zero"))
        # By the product and not by the matrix: one that has two uses is multiplied by the factors of each.
        matrix, scale = (f"{node.output[0]}.{part}" for part in ("matrix", "scale"))
        self._constants[matrix], self._constants[scale] = eight_bits(
            self._constants[node.input[1]] * cut.factors[:, None]
        )
        inputs = [values, matrix, step, scale, zero]
        operator = "MatMulIntegerToFloat"
        if node.op_type == "Attention":
            # Bias and mask of the attention stand among them.
            bias, mask = node.input[2:4]
            inputs, operator = [*inputs[:2], bias, *inputs[2:4], mask, zero], "QAttention"
        quantised = onnx.helper.make_node(operator, inputs, list(node.output), node.name, domain="com.microsoft")
        quantised.attribute.extend(node.attribute)
        return [*made, quantised]

    def _activations(self, name: str, cut: Cut) -> list[onnx.NodeProto]:
        """Divides activations by their factors and cuts them; the values, the step and the zero have names."""
        part = self._cut[name] = f"{name}.cut"
        nodes = []
        if name not in self._attention and not cut.is_even:
            self._constants[f"{part}.factors"] = 1 / cut.factors
            nodes.append(onnx.helper.make_node("Mul", [name, f"{part}.factors"], [f"{part}.divided"]))
            name = f"{part}.divided"
        step, zero = f"{part}.step", f"{part}.zero"
        if not self._static:
            values = [f"{part}.values", step, zero]
            return [*nodes, onnx.helper.make_node("DynamicQuantizeLinear", [name], values)]
        self._constants[step], self._constants[zero] = cut.scale, cut.zero
        return [*nodes, onnx.helper.make_node("QuantizeLinear", [name, step, zero], [f"{part}.values"])]
