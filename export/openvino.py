"""INT8 for OpenVINO: weights of 8 bits in a plain ONNX graph, activations quantised while running.

The graph keeps its standard operators; each large weight becomes 8-bit integers behind a `DequantizeLinear`.
OpenVINO recognises the pair, multiplies in INT8 and gives every row of activations scales of its own, so an
answer does not depend on its neighbours in the batch. Nothing is calibrated.

Static INT8 takes a fifth less time on long batches and was measured as not good enough: with ranges from real
text, the 1st percentile of the demo model's cosines to PyTorch is 0.972, against 0.996 here.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import numpy_helper

from export.errors import ExportError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MATRICES_OF_A_LAYER = 6
_LEVELS = 255
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
        raise ExportError("an artifact for OpenVINO is proven with its library: pip install bertserve[openvino]")


def quantize(raw: Path, quantized: Path, *, layers: int) -> None:
    """Quantises the weights of a fp32 graph.

    Args:
        raw: The graph as exported, not fused: OpenVINO reads standard operators of any architecture and fuses
            them itself.
        quantized: Where to write; one file, without external data.
        layers: Transformer layers of the model.

    Raises:
        ExportError: The graph holds fewer matrices than its layers must have.
    """
    model = onnx.load(raw)
    axes = _weights(model.graph)
    products = sum(axis == _COLUMNS for axis in axes.values())
    if products < _MATRICES_OF_A_LAYER * layers:
        raise ExportError(
            f"the quantisation of the graph is incomplete: {products} products with a weight, "
            f"{_MATRICES_OF_A_LAYER * layers} expected; the installed torch and transformers do not fit together"
        )
    for name, axis in axes.items():
        _replace(model.graph, name, axis)
    onnx.save(model, quantized)


def _weights(graph: onnx.GraphProto) -> dict[str, int]:
    """Names of the matrices to quantise, and the axis of their scales."""
    matrices = {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) == 2  # noqa: PLR2004
    }
    return {
        name: _AXES[node.op_type, place]
        for node in graph.node
        for place, name in enumerate(node.input)
        if name in matrices and (node.op_type, place) in _AXES
    }


def _replace(graph: onnx.GraphProto, name: str, axis: int) -> None:
    """Puts 8-bit values and a `DequantizeLinear` in the place of a weight; its users see the old name."""
    weight = next(tensor for tensor in graph.initializer if tensor.name == name)
    graph.initializer.remove(weight)
    values, scale, zero = eight_bits(numpy_helper.to_array(weight), axis)
    parts: dict[str, NDArray[Any]] = {f"{name}.values": values, f"{name}.scale": scale, f"{name}.zero": zero}
    graph.initializer.extend(numpy_helper.from_array(part, key) for key, part in parts.items())
    graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", list(parts), [name], axis=axis))


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
