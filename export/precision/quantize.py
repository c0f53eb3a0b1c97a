"""INT8 for ONNX Runtime: weights of 8 bits per channel; static or dynamic activations.

With static ranges, a text's answer does not depend on its neighbors in the batch, and no pass over the activations
computes them. If calibration text cannot determine the ranges, they are dynamic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx

from bertserve.export.graph.editor import MAPPED, GraphEditor
from bertserve.export.graph.nodes import copy, replace
from bertserve.export.graph.optimize import check_counts, operators
from bertserve.export.precision.equalise import eight_bits
from bertserve.export.precision.products import find

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.graph.optimize import Shape
    from bertserve.export.precision.equalise import Cut

_LEVELS = 255
_BLOCK = 1 << 22
"""Numbers of a table that are rounded at a time."""
_PARTS = 3
"""The fused matrix of attention holds queries, keys and values side by side."""


def quantize(
    fused: Path, quantized: Path, shape: Shape, cuts: Mapping[str, Cut], *, static: bool, words: bool = True
) -> None:
    """Quantizes a fused fp32 graph, except the last matrices.

    Args:
        fused: The graph after the fusions; before them attention would not be quantized as one operator.
        quantized: Where to write.
        shape: The structure of the graph.
        cuts: The quantization parameters of each product by name.
        static: Whether ranges are static.
        words: Whether a sparse encoder's products with its vocabulary are quantized.

    Raises:
        ExportError: Some matrix was not quantized.
    """
    editor = GraphEditor(fused, quantized)
    _Quantiser(editor, cuts, static=static, words=words).run()
    if shape.shared_layers:
        editor.share_equal()
    editor.write(MAPPED)
    expected = {
        "QAttention": shape.layers * shape.attention_fusion,
        "MatMulIntegerToFloat": (shape.products - _PARTS * shape.attention_fusion) * shape.layers
        + shape.projected
        + shape.head_products
        + (1 + shape.word_blocks * words) * shape.predicts_words,
        "QEmbedLayerNormalization": int(shape.embedding_fusion),
    }
    check_counts(operators(quantized), expected, "quantization")


class _Quantiser:
    def __init__(self, editor: GraphEditor, cuts: Mapping[str, Cut], *, static: bool, words: bool) -> None:
        self._draft, self._graph = editor, editor.graph
        self._cuts, self._static = cuts, static
        self._floats = set(editor.of_type(onnx.TensorProto.FLOAT))
        self._products = find(editor.graph, words=words)
        self._multiplied = {name for product in self._products for name in product.outputs}
        # Repetitions of each column of a product, by the product's output.
        self._repeats = {
            product.source: repeats
            for product in self._products
            if (repeats := cuts[product.activations].repeats) is not None
        }
        self._attention = {node.output[0]: node for node in editor.graph.node if node.op_type == "Attention"}
        self._cut: dict[str, str] = {}

    def run(self) -> None:
        """Replaces every product and table lookup by a quantized operator."""
        for product in self._products:
            attention = self._attention.get(product.activations)
            if attention is not None:
                self._divide_values(attention, self._cuts[product.activations])
        nodes: list[onnx.NodeProto] = []
        for node in self._graph.node:
            if node.output[0] in self._multiplied:
                nodes += self._quantize(node)
            elif node.input and node.input[0] in self._repeats:
                nodes.append(self._with_repeated_bias(node))
            elif node.op_type == "EmbedLayerNormalization":
                nodes.append(self._embedding(node))
            elif node.op_type == "Gather" and node.input[0] in self._floats:
                nodes += self._looked_up(node)
            else:
                nodes.append(node)
        replace(self._graph, nodes)
        self._draft.drop_unused()

    def _divide_values(self, attention: onnx.NodeProto, cut: Cut) -> None:
        """Scales the result of attention for free: it is a mean of the values, which the last columns compute."""
        for name in attention.input[1:3]:
            array = self._draft[name].copy()
            array[..., array.shape[-1] // _PARTS * (_PARTS - 1) :] /= cut.factors
            self._draft[name] = array

    def _quantize(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        name, cut = node.input[0], self._cuts[node.input[0]]
        made = [] if name in self._cut else self._activations(name, cut)
        values, step, zero = (f"{self._cut[name]}.{part}" for part in ("values", "step", "zero"))
        # By product, not by matrix: one with two uses is multiplied by the factors of each.
        matrix, scale = (f"{node.output[0]}.{part}" for part in ("matrix", "scale"))
        rows = cut.rows(self._draft[node.input[1]])
        if node.output[0] in self._repeats:
            rows = np.repeat(rows, self._repeats[node.output[0]], axis=1)
        self._draft[matrix], self._draft[scale] = eight_bits(rows)
        inputs = [values, matrix, step, scale, zero]
        operator = "MatMulIntegerToFloat"
        if node.op_type == "Attention":
            # Bias and mask of the attention are among them.
            bias, mask = node.input[2:4]
            inputs, operator = [*inputs[:2], bias, *inputs[2:4], mask, zero], "QAttention"
        quantised = onnx.helper.make_node(operator, inputs, list(node.output), node.name, domain="com.microsoft")
        quantised.attribute.extend(node.attribute)
        return [*made, quantised]

    def _activations(self, name: str, cut: Cut) -> list[onnx.NodeProto]:
        """Scales and quantizes activations; returns the names of values, scale and zero point."""
        part = self._cut[name] = f"{name}.cut"
        nodes = []
        if name not in self._attention and not cut.is_even:
            self._draft[f"{part}.factors"] = 1 / cut.divisors
            nodes.append(onnx.helper.make_node("Mul", [name, f"{part}.factors"], [f"{part}.divided"]))
            name = f"{part}.divided"
        step, zero = f"{part}.step", f"{part}.zero"
        if not self._static:
            values = [f"{part}.values", step, zero]
            return [*nodes, onnx.helper.make_node("DynamicQuantizeLinear", [name], values)]
        self._draft[step], self._draft[zero] = cut.scale, cut.zero
        return [*nodes, onnx.helper.make_node("QuantizeLinear", [name, step, zero], [f"{part}.values"])]

    def _with_repeated_bias(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The function between two products, for the first one's columns with their repetitions."""
        bias = f"{node.output[0]}.bias"
        self._draft[bias] = np.repeat(self._draft[node.input[1]], self._repeats[node.input[0]])
        return copy(node, [node.input[0], bias])

    def _looked_up(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Looks up 8-bit values and dequantizes the rows found."""
        values, scale, zero = self._table(node.input[0])
        found = copy(node, [values, *node.input[1:]])
        found.output[0] = f"{node.output[0]}.values"
        return [found, onnx.helper.make_node("DequantizeLinear", [found.output[0], scale, zero], [node.output[0]])]

    def _embedding(self, node: onnx.NodeProto) -> onnx.NodeProto:
        """The fused embedding with tables, scale and bias of its normalization in 8 bits."""
        ids, (mask,) = list(node.input[:2]), node.input[7:8] or [""]
        values, scales, zeros = zip(
            *(self._table(name) if name else ("", "", "") for name in node.input[2:7]), strict=True
        )
        inputs = [*ids, *values, mask, *scales, *zeros]
        made = onnx.helper.make_node("QEmbedLayerNormalization", inputs, node.output, node.name, domain="com.microsoft")
        made.attribute.extend(node.attribute)
        return made

    def _table(self, name: str) -> tuple[str, str, str]:
        """Names of a table's 8-bit values, scale and zero point; one range for the whole table, which holds 0."""
        values, scale, zero = f"{name}.values", f"{name}.scale", f"{name}.zero"
        if values not in self._draft:
            table = self._draft[name]
            self._draft[values], self._draft[scale], self._draft[zero] = _eight_bits(table)
        return values, scale, zero


def _eight_bits(table: NDArray[np.float32]) -> tuple[NDArray[np.uint8], np.float32, np.uint8]:
    low, high = min(float(table.min()), 0), max(float(table.max()), 0)
    scale = (high - low) / _LEVELS or 1.0
    zero, step = np.rint(-low / scale), np.float32(scale)
    values = np.empty(table.shape, np.uint8)
    rows = max(1, _BLOCK // max(1, table[:1].size))
    for at in range(0, len(table), rows):
        values[at : at + rows] = np.clip(np.rint(table[at : at + rows] / step) + zero, 0, _LEVELS)
    return values, step, np.uint8(zero)
