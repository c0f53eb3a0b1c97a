"""INT8 for OpenVINO: weights of 8 bits in a plain ONNX graph; activations by ranges seen on text, or while running.

The graph keeps its standard operators; each large weight becomes 8-bit integers behind a `DequantizeLinear`, which
OpenVINO recognises. Static, the activations pass through a `QuantizeLinear` and a `DequantizeLinear` before each
product, and it multiplies in INT8 at once. Dynamic, it gives every row of activations scales of its own: nearer to
fp32, and slower by a fifth to a third. Either way an answer does not depend on its neighbours in the batch.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from export.errors import ExportError
from export.graph.draft import Draft
from export.graph.nodes import matrices, replace
from export.precision import equalise
from export.precision.products import find
from serving.host import installing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from export.graph.optimize import Shape
    from export.precision.equalise import Cut

_LEVELS = 255
_LARGE_TABLE = 1 << 20
"""Numbers of a table of which every compiled graph would otherwise hold a copy in float32: a vocabulary's."""
_COLUMNS, _ROWS = 1, 0
_AXES = {("MatMul", 1): _COLUMNS, ("Gather", 0): _ROWS}
"""Where an operator takes a weight, and which way the weight is cut: one scale for each index of that axis.

A product is cut by its outputs, a table by its tokens.
"""


def require_library() -> None:
    """Makes sure that OpenVINO is there, to prove its artifacts with.

    Raises:
        ExportError: It is not installed.
    """
    if importlib.util.find_spec("openvino") is None:
        raise ExportError(f"an artifact for OpenVINO is proven with its library: {installing('openvino')}")


def quantize(raw: Path, quantized: Path, shape: Shape, cuts: Mapping[str, Cut] | None) -> None:
    """Quantises a fp32 graph.

    Args:
        raw: The graph as exported, not fused: OpenVINO reads standard operators of any architecture and fuses
            them itself.
        quantized: Where to write.
        shape: What the graph is made of.
        cuts: How the activations of each product are cut, by their names; None leaves that to the running engine.

    Raises:
        ExportError: The graph holds fewer matrices than its layers must have.
    """
    draft = Draft(raw, quantized)
    found = 0 if cuts is None else _cut_products(draft, cuts)
    axes = _weights(draft.graph)
    found += sum(axis == _COLUMNS for axis in axes.values())
    expected = shape.products * (shape.stored_layers or shape.layers)
    if found < expected:
        raise ExportError(
            f"the quantisation of the graph is incomplete: {found} products with a weight, "
            f"{expected} expected; the installed torch and transformers do not fit together"
        )
    for name, axis in axes.items():
        # Beside activations with a range only the tables are left: the last matrices stay exact.
        if cuts is None or axis == _ROWS:
            _replace(draft, name, axis)
    if shape.shared_layers:
        draft.share_equal()
    draft.write()


def _cut_products(draft: Draft, cuts: Mapping[str, Cut]) -> int:
    """Puts 8-bit values before and into every product that is not a decision; how many they are."""
    graph = draft.graph
    by_output = {name: product for product in find(graph) for name in product.outputs}
    nodes: list[onnx.NodeProto] = []
    done: set[str] = set()
    for node in graph.node:
        product = by_output.get(node.output[0])
        if product is not None:
            cut = cuts[product.activations]
            if product.activations not in done:
                done.add(product.activations)
                nodes += _cut_activations(draft, product.activations, cut)
            weight = f"{node.output[0]}.matrix"
            nodes.append(_matrix(draft, weight, draft[node.input[1]] * cut.factors[:, None]))
            node.input[:] = [f"{product.activations}.cut", weight]
        nodes.append(node)
    replace(graph, nodes)
    draft.drop_unused()
    return len(by_output)


def _cut_activations(draft: Draft, name: str, cut: Cut) -> list[onnx.NodeProto]:
    make, part = onnx.helper.make_node, f"{name}.cut"
    step, zero, values = f"{part}.step", f"{part}.zero", f"{part}.values"
    draft[step], draft[zero] = cut.scale, cut.zero
    nodes = []
    if not cut.is_even:
        draft[f"{part}.factors"] = 1 / cut.factors
        nodes.append(make("Mul", [name, f"{part}.factors"], [f"{part}.divided"]))
        name = f"{part}.divided"
    nodes.append(make("QuantizeLinear", [name, step, zero], [values]))
    nodes.append(make("DequantizeLinear", [values, step, zero], [part]))
    return nodes


def _matrix(draft: Draft, name: str, matrix: NDArray[np.float32]) -> onnx.NodeProto:
    """A matrix as 8-bit values and the operator that scales its columns."""
    values, scale = f"{name}.values", f"{name}.scale"
    draft[values], draft[scale] = equalise.eight_bits(matrix)
    return onnx.helper.make_node("DequantizeLinear", [values, scale], [name], axis=_COLUMNS)


def _weights(graph: onnx.GraphProto) -> dict[str, int]:
    """Names of the matrices to quantise, and the axis of their scales."""
    names = matrices(graph)
    return {
        name: _AXES[node.op_type, position]
        for node in graph.node
        for position, name in enumerate(node.input)
        if name in names and (node.op_type, position) in _AXES
    }


def _replace(draft: Draft, name: str, axis: int) -> None:
    """Puts 8-bit values and what scales them in the place of a weight."""
    graph = draft.graph
    values, scale, zero = eight_bits(draft[name], axis)
    del draft[name]
    users = [node for node in graph.node if name in node.input]
    is_looked_up = values.size >= _LARGE_TABLE and all(node.op_type == "Gather" for node in users)
    if is_looked_up:
        scale, zero = scale[:, None], zero[:, None].astype(np.float32)
    parts: dict[str, NDArray[Any]] = {f"{name}.values": values, f"{name}.scale": scale, f"{name}.zero": zero}
    for key, array in parts.items():
        draft[key] = array
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
    """Rows of a large table, scaled once they are found: OpenVINO would hold a scaled table in float32."""
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

    The range of each row or column is cut into 255 steps from its least to its largest number. It always
    holds 0, as ONNX asks for, so that 0 stays exactly 0.

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
