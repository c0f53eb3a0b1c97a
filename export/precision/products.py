"""The matrix products of a graph to quantize."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bertserve.export.graph.nodes import matrices

if TYPE_CHECKING:
    import onnx

_PRODUCTS = frozenset({"Attention", "MatMul"})
"""Operators that multiply their first input with their second."""

_ACTIVATIONS = frozenset({"BiasGelu", "FastGelu"})
"""Activation operators that work on each channel, with a fused bias."""

_DECISIONS = ("/classifier/", "/qa_outputs/", "/sentence/", "/heads/")
"""Parts of the names of the last matrices, which have a few columns, cost nothing and stay in fp32.

So do those of a `Gemm`, which works on one vector of each text.
"""

_WORDS = "/sparse/blocks"
"""Part of the names of a sparse encoder's last matrices."""


@dataclass(slots=True, frozen=True)
class Product:
    """All products of one tensor of activations, which is quantized once for them.

    Attributes:
        activations: The tensor's name.
        outputs: The operators' outputs, in the graph's order.
        weights: Their matrices' names.
        source: The product whose output, with bias and activation, is this tensor, if nothing else reads either: then
            channels may be repeated. Otherwise empty.
    """

    activations: str
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    source: str = ""


def multiplies_words(node: onnx.NodeProto) -> bool:
    """Whether an operator is one of a sparse encoder's products with its vocabulary."""
    return _WORDS in node.name


def find(graph: onnx.GraphProto, *, words: bool = True) -> list[Product]:
    """The products of a graph to quantize; without `words`, not those of a sparse encoder with its vocabulary."""
    weights = matrices(graph)
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        decides = any(part in node.name for part in _DECISIONS) or (not words and multiplies_words(node))
        if node.op_type in _PRODUCTS and node.input[1] in weights and not decides:
            users.setdefault(node.input[0], []).append(node)
    products = {node.output[0] for nodes in users.values() for node in nodes if node.op_type == "MatMul"}
    takers = Counter(name for node in graph.node for name in node.input)
    functions = {
        node.output[0]: node.input[0]
        for node in graph.node
        if node.op_type in _ACTIVATIONS
        and len(node.input) > 1
        and node.input[0] in products
        and takers[node.input[0]] == takers[node.output[0]] == 1
    }
    return [
        Product(
            name,
            tuple(node.output[0] for node in nodes),
            tuple(node.input[1] for node in nodes),
            functions.get(name, ""),
        )
        for name, nodes in users.items()
    ]
