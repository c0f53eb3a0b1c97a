"""INT8 for OpenVINO: 8-bit weights in a plain ONNX graph; static or dynamic activations.

The graph keeps its standard operators; each large weight becomes 8-bit integers behind a `DequantizeLinear`, which
OpenVINO recognizes. Static: activations pass through a `QuantizeLinear` and a `DequantizeLinear` before each product,
which runs in INT8. Dynamic: OpenVINO gives every row of activations its own scale: closer to fp32, and slower by a
fifth to a third. Both ways, an answer does not depend on its neighbors in the batch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from bertserve.export.errors import ExportError
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.graph.nodes import matrices, replace
from bertserve.export.precision import equalise
from bertserve.export.precision.products import find, multiplies_words
from bertserve.serving.host import installing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.graph.optimize import Shape
    from bertserve.export.precision.equalise import Cut

_LEVELS = 255
_LARGE_TABLE = 1 << 20
"""Minimum numbers of a large table (a vocabulary's), of which every compiled graph would hold a float32 copy."""
_COLUMNS, _ROWS = 1, 0
_AXES = {("MatMul", 1): _COLUMNS, ("Gather", 0): _ROWS}
"""The weight input of an operator, and the axis of its scales.

A product has one scale per output, a table one per token.
"""


def require_library() -> None:
    """Makes sure that OpenVINO is available to prove its artifacts.

    Raises:
        ExportError: It is not installed.
    """
    if importlib.util.find_spec("openvino") is None:
        raise ExportError(f"an OpenVINO artifact is verified with OpenVINO: {installing('openvino')}")


def quantize(raw: Path, quantized: Path, shape: Shape, cuts: Mapping[str, Cut] | None, *, words: bool = True) -> None:
    """Quantizes a fp32 graph.

    Args:
        raw: The graph as exported, not fused: OpenVINO reads standard operators and fuses them itself.
        quantized: Where to write.
        shape: The structure of the graph.
        cuts: The quantization parameters of each product by name; None for dynamic ranges.
        words: Whether a sparse encoder's products with its vocabulary are quantized.

    Raises:
        ExportError: The graph holds fewer matrices than its layers must have.
    """
    editor = GraphEditor(raw, quantized)
    found = 0 if cuts is None else _cut_products(editor, cuts, words=words)
    axes = _weights(editor.graph, words=words)
    found += sum(axis == _COLUMNS for axis in axes.values())
    expected = shape.products * (shape.stored_layers or shape.layers)
    if found < expected:
        raise ExportError(
            f"quantization of the graph is incomplete: found {found} products with a weight, expected {expected}; "
            "the installed versions of torch and transformers are incompatible"
        )
    for name, axis in axes.items():
        # With static activations only the tables are left: the last matrices stay exact.
        if cuts is None or axis == _ROWS:
            _replace(editor, name, axis)
    if shape.shared_layers:
        editor.share_equal()
    editor.write()


def _cut_products(editor: GraphEditor, cuts: Mapping[str, Cut], *, words: bool) -> int:
    """Quantizes every product except the last matrices; returns their number."""
    graph = editor.graph
    by_output = {name: product for product in find(graph, words=words) for name in product.outputs}
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    for node in graph.node:
        product = by_output.get(node.output[0])
        if product is not None:
            cut = cuts[product.activations]
            if product.activations not in done:
                done.add(product.activations)
                nodes += _cut_activations(editor, product.activations, cut)
            weight = f"{node.output[0]}.matrix"
            nodes.append(_matrix(editor, weight, editor[node.input[1]] * cut.factors[:, None]))
            node.input[:] = [f"{product.activations}.cut", weight]
        nodes.append(node)
    replace(graph, nodes)
    editor.drop_unused()
    return len(by_output)


def _cut_activations(editor: GraphEditor, name: str, cut: Cut) -> list[onnx.NodeProto]:
    make, part = onnx.helper.make_node, f"{name}.cut"
    step, zero, values = f"{part}.step", f"{part}.zero", f"{part}.values"
    editor[step], editor[zero] = cut.scale, cut.zero
    nodes = []
    if not cut.is_even:
        editor[f"{part}.factors"] = 1 / cut.factors
        nodes.append(make("Mul", [name, f"{part}.factors"], [f"{part}.divided"]))
        name = f"{part}.divided"
    nodes.append(make("QuantizeLinear", [name, step, zero], [values]))
    nodes.append(make("DequantizeLinear", [values, step, zero], [part]))
    return nodes


def _matrix(editor: GraphEditor, name: str, matrix: NDArray[np.float32]) -> onnx.NodeProto:
    """A matrix as 8-bit values and the operator that scales its columns."""
    values, scale = f"{name}.values", f"{name}.scale"
    editor[values], editor[scale] = equalise.eight_bits(matrix)
    return onnx.helper.make_node("DequantizeLinear", [values, scale], [name], axis=_COLUMNS)


def _weights(graph: onnx.GraphProto, *, words: bool) -> dict[str, int]:
    """Names of the matrices to quantize, and the axis of their scales."""
    names = matrices(graph)
    return {
        name: _AXES[node.op_type, position]
        for node in graph.node
        if words or not multiplies_words(node)
        for position, name in enumerate(node.input)
        if name in names and (node.op_type, position) in _AXES
    }


def _replace(editor: GraphEditor, name: str, axis: int) -> None:
    """Replaces a weight by 8-bit values and a scale."""
    graph = editor.graph
    values, scale, zero = eight_bits(editor[name], axis)
    del editor[name]
    users = [node for node in graph.node if name in node.input]
    is_looked_up = values.size >= _LARGE_TABLE and all(node.op_type == "Gather" for node in users)
    if is_looked_up:
        scale, zero = scale[:, None], zero[:, None].astype(np.float32)
    parts: dict[str, NDArray[Any]] = {f"{name}.values": values, f"{name}.scale": scale, f"{name}.zero": zero}
    for key, array in parts.items():
        editor[key] = array
    if not is_looked_up:
        graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", list(parts), [name], axis=axis))
        return
    for node in users:
        made = _looked_up(node, list(parts))
        position = list(graph.node).index(node)
        graph.node.remove(node)
        for offset, part in enumerate(made):
            graph.node.insert(position + offset, part)


def _looked_up(node: onnx.NodeProto, parts: list[str]) -> list[onnx.NodeProto]:
    """Rows of a large table, scaled after lookup: OpenVINO would hold a scaled table in float32."""
    make, ids, rows = onnx.helper.make_node, node.input[1], node.output[0]
    names = [f"{rows}.{part}" for part in ("values", "scale", "zero")]
    return [
        *(make("Gather", [part, ids], [name]) for part, name in zip(parts, names, strict=True)),
        make("Cast", names[:1], [f"{rows}.float"], to=onnx.TensorProto.FLOAT),
        make("Sub", [f"{rows}.float", names[2]], [f"{rows}.steps"]),
        make("Mul", [f"{rows}.steps", names[1]], [rows]),
    ]


def eight_bits(
    weight: NDArray[np.float32], axis: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    """A matrix as values, scales and zero points: `weight ≈ (values - zero) * scale`.

    The range of each row or column has 255 steps from its minimum to its maximum. It always holds 0, as ONNX requires,
    so that 0 stays exactly 0.

    Args:
        weight: float32 [rows, columns].
        axis: 0 for scales per row, 1 per column.
    """
    low = np.minimum(weight.min(axis=1 - axis), 0)
    high = np.maximum(weight.max(axis=1 - axis), 0)
    scale = (high - low) / np.float32(_LEVELS)
    scale[scale == 0] = 1
    zero = np.rint(-low / scale)
    steps = np.rint(weight / np.expand_dims(scale, 1 - axis)) + np.expand_dims(zero, 1 - axis)
    return np.clip(steps, 0, _LEVELS).astype(np.uint8), scale, zero.astype(np.uint8)
