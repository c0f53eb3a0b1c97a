"""INT8 for TensorRT: explicit quantization in the fp16 graph, with the ranges of the other INT8 forms.

The input of each product with a matrix passes through a `QuantizeLinear` and a `DequantizeLinear`; the matrix is stored
as
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx

from bertserve.export.errors import ExportError
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.graph.nodes import replace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bertserve.export.graph.optimize import Shape
    from bertserve.export.precision.equalise import Cut
    from bertserve.export.precision.products import Product

    Floats = NDArray[np.float32]

_OPSET, _IR_VERSION = 19, 9
"""The first versions in which a `QuantizeLinear` takes fp16."""
_COLUMNS = 1
_LARGEST = 127
_MIDDLE = 128
"""The unsigned value that becomes 0."""


def quantize(
    halved: Path,
    quantized: Path,
    shape: Shape,
    exponents: Mapping[str, int],
    products: Sequence[Product],
    cuts: Mapping[str, Cut],
) -> None:
    """Quantizes an fp16 graph.

    Raises:
        ExportError: The graph holds fewer matrices than its layers must have.
    """
    editor = GraphEditor(halved, quantized)
    editor.move_out()
    editor.convert(_OPSET, _IR_VERSION)
    found = _Quantiser(editor, exponents, {name: cuts[each.activations] for each in products for name in each.outputs})
    found.run()
    expected = shape.products * (shape.stored_layers or shape.layers)
    if found.count < expected:
        raise ExportError(
            f"quantization of the TensorRT graph is incomplete: found {found.count} products with a matrix, expected "
            f"{expected}; the installed versions of torch and transformers are incompatible"
        )
    if shape.shared_layers:
        editor.share_equal()
    editor.write()


class _Quantiser:
    def __init__(self, editor: GraphEditor, exponents: Mapping[str, int], cuts: Mapping[str, Cut]) -> None:
        self._draft = editor
        self._exponents, self._cuts = exponents, cuts
        self._users: dict[str, list[onnx.NodeProto]] = {}
        for node in editor.graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)
        self._seen: dict[str, tuple[Floats, float]] = {}
        """By quantized tensor: the factor of its channels and the offset."""
        self.count = 0

    def run(self) -> None:
        nodes: list[onnx.NodeProto] = []
        for node in self._draft.graph.node:
            cut = self._cuts.get(node.output[0])
            nodes += [node] if cut is None else self._quantize(node, cut)
        replace(self._draft.graph, nodes)
        self._draft.drop_unused()

    def _quantize(self, node: onnx.NodeProto, cut: Cut) -> list[onnx.NodeProto]:
        """A product of 8-bit values, with the operators that make them."""
        activations, matrix = node.input
        before = [] if activations in self._seen else self._activations(activations, cut)
        factors, shift = self._seen[activations]
        weight = f"{node.output[0]}.matrix"
        values, scale, zero = (f"{weight}.{part}" for part in ("values", "scale", "zero"))
        array, scales = _eight_bits(self._draft[matrix].astype(np.float32) / factors[:, None])
        self._draft[values], self._draft[scale] = array, scales
        self._draft[zero] = np.zeros(array.shape[1], np.int8)
        made = onnx.helper.make_node("DequantizeLinear", [values, scale, zero], [weight], axis=_COLUMNS)
        node.input[:] = [f"{activations}.cut", weight]
        self.count += 1
        added = -shift * (array * scales.astype(np.float32)).sum(axis=0)
        return [*before, made, node, *(self._shift_back(node, added.astype(np.float16)) if shift else [])]

    def _activations(self, name: str, cut: Cut) -> list[onnx.NodeProto]:
        """Shifts activations into the signed range, and quantizes them."""
        make, part = onnx.helper.make_node, f"{name}.cut"
        scale, zero, values = f"{part}.scale", f"{part}.zero", f"{part}.values"
        self._draft[scale] = step = np.float16(cut.scale * 2.0 ** -self._exponents.get(name, 0))
        self._draft[zero] = np.int8(0)
        # As fp16 holds them, so that the matrix and the bias undo exactly that.
        factors = (1 / cut.factors).astype(np.float16)
        shift = np.float16((int(cut.zero) - _MIDDLE) * float(step))
        self._seen[name] = factors.astype(np.float32), float(shift)
        nodes = []
        if not cut.is_even:
            self._draft[f"{part}.factors"] = factors
            nodes.append(make("Mul", [name, f"{part}.factors"], [f"{part}.divided"]))
            name = f"{part}.divided"
        if shift:
            self._draft[f"{part}.shift"] = shift
            nodes.append(make("Add", [name, f"{part}.shift"], [f"{part}.shifted"]))
            name = f"{part}.shifted"
        nodes.append(make("QuantizeLinear", [name, scale, zero], [values]))
        nodes.append(make("DequantizeLinear", [values, scale, zero], [part]))
        return nodes

    def _shift_back(self, node: onnx.NodeProto, added: NDArray[np.float16]) -> list[onnx.NodeProto]:
        """Adds the shift of a product's activations to its bias, or behind it."""
        name, users = node.output[0], self._users.get(node.output[0], [])
        bias = f"{name}.bias"
        if len(users) == 1 and users[0].op_type == "Add":
            (known,) = (each for each in users[0].input if each != name)
            if known in self._draft and self._draft[known].shape == added.shape:
                self._draft[bias] = (self._draft[known].astype(np.float32) + added).astype(np.float16)
                users[0].input[:] = [name, bias]
                return []
        self._draft[bias] = added
        node.output[0] = f"{name}.shifted"
        return [onnx.helper.make_node("Add", [node.output[0], bias], [name])]


def _eight_bits(matrix: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """A matrix as values and an fp16 scale for each column: `matrix ≈ values * scale`."""
    # One step of fp16 above, so that the largest number stays within 127, and a column of zeros has a scale.
    scale = np.nextafter((np.abs(matrix).max(axis=0) / _LARGEST).astype(np.float16), np.float16(np.inf))
    return np.rint(matrix / scale.astype(np.float32)).astype(np.int8), scale
