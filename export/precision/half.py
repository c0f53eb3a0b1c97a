"""Converts fp32 to fp16 with FP32 islands, such that no input can overflow.

Matrix products run in fp16, and so do the operators between two of them: bias, activation, splitting into heads.
Everything else is FP32: normalizations with the residual additions before them, softmax with its scale and mask,
pooling. The islands are found by structure, so a new architecture needs no new names. No product is in an island, since
TensorRT has no FP32 product for the T4 (compute capability 7.5). A maximum of a product is exact in fp16 too, and saves
the cast of a large tensor.

A fused normalization between products reads and writes fp16 if its sum is proven to fit: ONNX Runtime's CUDA kernel
computes in FP32 inside (https://github.com/microsoft/onnxruntime/pull/28682). That saves four casts per layer.

A product whose result could exceed fp16's range (see `ranges`) is stored divided by a power of two, which costs no
precision: the division is folded into its weights and undone in the next island.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

import numpy as np
from onnx import TensorProto, helper

from bertserve.export.errors import ExportError
from bertserve.export.graph import nodes
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.precision import ranges

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from onnx import GraphProto, NodeProto

    Array = NDArray[np.float32]

LARGEST = 65504.0
"""fp16's largest number."""

_ROOM = 4.0
"""Headroom of a product's bound below `LARGEST`, for a bias and rounding."""
_PRODUCTS = frozenset({"MatMul", "Gemm"})
_FUSED_PRODUCTS = frozenset({"Attention", "MultiHeadAttention"})
FUSED_NORMALIZATION = "SkipLayerNormalization"
Normalization = Literal["fp16", "fp32"]
"""The precision of fused normalizations that may run in fp16."""
NORMALIZATIONS: tuple[Normalization, ...] = ("fp16", "fp32")
"""The faster first; it rounds the residuals."""
_LINEAR = ranges.MOVES | {"Add", "Sub", "Mul", "Div", "Relu"}
"""Operators that commute with a scale by a power of two."""
_LARGEST_OF = "ReduceMax"
_BETWEEN = _LINEAR | {"Erf", "Tanh", "Sigmoid", "Pow", "Gelu", "BiasGelu", "FastGelu"}
"""Operators that may run in fp16 between two products."""


def convert(
    source: Path, target: Path, *, shared_layers: bool = False, normalizations: Normalization = NORMALIZATIONS[0]
) -> Mapping[str, int]:
    """Writes the fp16 form of an fp32 graph.

    Inputs stay as they are, outputs stay float32.

    Args:
        source: The graph, as exported (for TensorRT, which fuses itself) or after the fusions (for ONNX Runtime's CUDA
            provider).
        target: Where to write.
        shared_layers: Whether layers share their weights.
        normalizations: One of `NORMALIZATIONS`.

    Returns:
        For tensors of the fp16 graph, the power of two that their values must be multiplied with.

    Raises:
        ExportError: A weight exceeds fp16's range, or the graph cannot be kept in range.
    """
    editor = GraphEditor(source, target)
    editor.lift_constants()
    exponents = _Conversion(editor, normalizations).run()
    if shared_layers:
        editor.share_equal()
    editor.write()
    return exponents


class _Conversion:
    """Decides node by node, in topological order, and writes the graph anew."""

    def __init__(self, editor: GraphEditor, normalizations: Normalization) -> None:
        self._draft = editor
        self._normalizations = normalizations
        self._graph = graph = editor.graph
        self._constants = float_constants(editor)
        self._floats = nodes.activations(graph, self._constants.keys(), TensorProto.FLOAT)
        self._ranges = ranges.of_graph(graph, self._constants)
        self._producers = {name: node for node in graph.node for name in node.output}
        self._outputs = {output.name for output in graph.output}
        self._planned = self._plan()
        self._least_exponents = self._demands()
        self._exponents: dict[str, int] = {}
        """For fp16 tensors, the power of two that their values must be multiplied with."""
        self._nodes: list[NodeProto] = []
        self._made: set[str] = set()
        self._names: dict[tuple[str, bool], str] = {}
        """The name of a tensor in fp16 (true) and in FP32 (false)."""

    def run(self) -> Mapping[str, int]:
        """Replaces the nodes and the float initializers; returns the tensors' exponents."""
        for node in self._graph.node:
            exponent = self._exponent(node) if node.output[0] in self._planned else None
            if exponent is None:
                self._keep(node)
            else:
                self._halve(node, exponent)
        self._draft.keep({t.name for t in self._graph.initializer if t.name not in self._constants} | self._made)
        del self._graph.node[:], self._graph.value_info[:]
        self._graph.node.extend(self._nodes)
        return self._exponents

    def _plan(self) -> set[str]:
        """First outputs of the nodes to run in fp16: products, tables, and operators between products."""
        consumers = _consumers(self._graph)
        after: set[str] = set()
        for node in self._graph.node:
            sources = {name for name in node.input if name in self._floats}
            if _is_product(node) or (node.op_type in _BETWEEN and sources and sources <= after):
                after.update(node.output)
        before: set[str] = set()
        for node in reversed(self._graph.node):
            users = [user for name in node.output for user in consumers[name]]
            leading_on = [_is_product(user) or user.output[0] in before for user in users]
            if not any(leading_on) or not self._outputs.isdisjoint(node.output):
                continue
            if node.op_type in _BETWEEN and all(leading_on):
                before.update(node.output)
            elif self._normalizations == "fp16" and node.op_type == FUSED_NORMALIZATION and self._sum_fits(node):
                before.update(node.output)
                after.update(node.output)
        between = after & before
        return {
            node.output[0]
            for node in self._graph.node
            if _is_product(node)
            or self._is_table(node)
            or node.output[0] in between
            or self._is_largest_of_product(node)
        }

    def _sum_fits(self, node: NodeProto) -> bool:
        """Whether fp16 holds what a fused normalization adds, and the numbers that it multiplies with."""
        terms = sum(self._ranges[name].peak if name in self._ranges else math.inf for name in node.input[:2])
        weights = (np.abs(self._constants[name]).max() for name in node.input[2:] if name)
        return len(node.output) == 1 and terms + max(weights) <= LARGEST

    def _is_largest_of_product(self, node: NodeProto) -> bool:
        product = self._producers.get(node.input[0]) if node.op_type == _LARGEST_OF else None
        return product is not None and _is_product(product)

    def _is_table(self, node: NodeProto) -> bool:
        return node.op_type == "Gather" and node.input[0] in self._constants

    def _demands(self) -> dict[str, int]:
        """Scores multiply two activations, so the queries' weights carry their division."""
        demands: dict[str, int] = {}
        for node in self._graph.node:
            if node.op_type == "MatMul" and self._floats.issuperset(node.input):
                at = self._origin(node.input[0])
                demands[at] = max(demands.get(at, 0), self._needed(node.output[0]))
        return demands

    def _origin(self, name: str) -> str:
        """The fp16 tensor from which this one follows by linear steps, and whose exponent can be chosen."""
        while name in self._planned and not _is_product(node := self._producers[name]):
            name = next(source for source in node.input if source in self._floats)
        return name

    def _needed(self, name: str) -> int:
        """The power of two by which the tensor must be divided to fit."""
        peak = self._ranges[name].peak if name in self._ranges else 0
        return max(0, math.ceil(math.log2(peak * _ROOM / LARGEST))) if peak > 0 else 0

    def _exponent(self, node: NodeProto) -> int | None:
        """The exponent of the node's fp16 result; None if it must be computed in FP32."""
        name = node.output[0]
        exponents = [self._exponent_given(source) for source in node.input if source in self._floats]
        if node.op_type in _PRODUCTS and len(exponents) == 1:
            return max(*exponents, self._needed(name), self._least_exponents.get(name, 0))
        exponent = _carry(node, exponents)
        if exponent is not None and (name not in self._ranges or self._ranges[name].peak <= LARGEST * 2.0**exponent):
            return exponent
        if _is_product(node):
            raise ExportError(
                f"{node.op_type} {node.name or name}: its result can exceed the range of fp16; use another --precision"
            )
        return None

    def _exponent_given(self, name: str) -> int:
        exponent = self._exponents.get(name)
        return max(self._needed(name), self._least_exponents.get(name, 0)) if exponent is None else exponent

    def _keep(self, node: NodeProto) -> None:
        """Keeps a node, with its inputs in FP32."""
        factor = self._factor_to_absorb(node)
        inputs = [self._single(name) if factor is None else self._absorb(name, factor) for name in node.input]
        self._nodes.append(nodes.copy(node, inputs))

    def _factor_to_absorb(self, node: NodeProto) -> float | None:
        """The scale behind divided scores, which can undo the division."""
        divided = [name for name in node.input if self._exponents.get(name)]
        scales = [name for name in node.input if name in self._constants and self._constants[name].size == 1]
        return 2.0 ** self._exponents[divided[0]] if node.op_type == "Mul" and divided and scales else None

    def _absorb(self, name: str, factor: float) -> str:
        if name in self._exponents:
            return self._cast(name, f"{name}:undivided by {factor:g}", TensorProto.FLOAT)
        return self._make(f"{name}:times {factor:g}", self._constants[name] * np.float32(factor))

    def _halve(self, node: NodeProto, exponent: int) -> None:
        """Converts a node to fp16 inputs and outputs."""
        inputs = [
            self._half_constant(name, self._constant_exponent(node, position, exponent))
            if name in self._constants
            else self._half(name)
            for position, name in enumerate(node.input)
        ]
        renamed = [f"{name}:fp16" if name in self._outputs else name for name in node.output]
        copy = nodes.copy(node, inputs)
        copy.output[:] = renamed
        self._nodes.append(copy)
        self._exponents.update(dict.fromkeys(renamed, exponent))
        for name, half in zip(node.output, renamed, strict=True):
            if name != half:
                self._restore(half, name)

    def _constant_exponent(self, node: NodeProto, position: int, exponent: int) -> int:
        """The power of two by which a constant is divided, so that the result is."""
        if node.op_type in _PRODUCTS and position == 1:
            return exponent - self._exponent_given(node.input[0])
        return exponent if node.op_type in ("Add", "Sub", "Gemm") else 0

    def _half(self, name: str) -> str:
        if name not in self._floats or name in self._exponents:
            return name
        if (name, True) not in self._names:
            exponent = self._exponent_given(name)
            source = self._times(name, -exponent) if exponent else name
            self._names[name, True] = self._cast(source, f"{name}:fp16", TensorProto.FLOAT16)
            self._exponents[f"{name}:fp16"] = exponent
        return self._names[name, True]

    def _single(self, name: str) -> str:
        if name in self._constants and name not in self._made:
            self._made.add(name)
            if self._constants[name].size == 1:  # it may be another number now
                self._draft[name] = self._constants[name]
        if name not in self._exponents:
            return name
        if (name, False) not in self._names:
            self._names[name, False] = self._restore(name, f"{name}:fp32")
        return self._names[name, False]

    def _restore(self, half: str, single: str) -> str:
        exponent = self._exponents[half]
        if not exponent:
            return self._cast(half, single, TensorProto.FLOAT)
        return self._times(self._cast(half, f"{single}:divided", TensorProto.FLOAT), exponent, single)

    def _half_constant(self, name: str, exponent: int) -> str:
        made = f"{name}:fp16:{exponent}"
        if made not in self._made:
            array = self._constants[name] * np.float32(2.0**-exponent)
            peak = np.abs(array).max(initial=0)
            if not peak <= LARGEST:
                raise ExportError(
                    f"{name} has {peak:.3g}, but the fp16 maximum is {LARGEST:g}; use another --precision"
                )
            self._make(made, array.astype(np.float16))
        return made

    def _make(self, name: str, array: NDArray[np.float16] | Array) -> str:
        self._draft[name] = array
        self._made.add(name)
        return name

    def _cast(self, source: str, target: str, to: int) -> str:
        self._nodes.append(nodes.cast(source, target, to))
        return target

    def _times(self, source: str, exponent: int, target: str = "") -> str:
        factor, target = f"two to the {exponent}", target or f"{source}:divided"
        self._make(factor, np.array(2.0**exponent, np.float32))
        self._nodes.append(helper.make_node("Mul", [source, factor], [target], name=target))
        return target


def _is_product(node: NodeProto) -> bool:
    return node.op_type in _PRODUCTS or node.op_type in _FUSED_PRODUCTS


def _carry(node: NodeProto, exponents: list[int]) -> int | None:
    """The exponent of a node's result for inputs with these exponents; None if fp16 cannot hold it."""
    if node.op_type in _PRODUCTS or node.op_type == "Mul":
        return sum(exponents)
    if node.op_type == _LARGEST_OF:
        return exponents[0]
    if node.op_type in _LINEAR and len(set(exponents)) == 1 and not (node.op_type == "Div" and len(exponents) > 1):
        return exponents[0]
    return None if any(exponents) else 0


def float_constants(editor: GraphEditor) -> dict[str, Array]:
    """The float32 initializers.

    A scalar beyond fp16's range is the -inf or -3.4e38 of a mask. It becomes fp16's lowest number: its exponential is 0
    as well, and it stays finite in whatever type a runtime adds it.
    """
    arrays = {name: editor[name] for name in editor.of_type(TensorProto.FLOAT)}
    return {name: np.clip(array, -LARGEST, LARGEST) if array.size == 1 else array for name, array in arrays.items()}


def _consumers(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """The nodes that read a tensor's values; other nodes may read its shape."""
    consumers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in graph.node:
        if node.op_type not in ("Shape", "Size"):
            for name in node.input:
                consumers[name].append(node)
    return consumers
