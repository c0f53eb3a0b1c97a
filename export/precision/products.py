"""The matrices of a graph that are worth 8 bits, by what they are multiplied with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from export.graph.nodes import matrices

if TYPE_CHECKING:
    import onnx

_PRODUCTS = frozenset({"Attention", "MatMul"})
"""Operators that multiply their first input with their second."""

_ACTIVATIONS = frozenset({"BiasGelu", "FastGelu"})
"""Operators that make a channel of a channel, with a bias fused into them."""

_DECISIONS = ("/classifier/", "/qa_outputs/")
"""Parts of the names of the last matrices: a few columns, which cost nothing and decide everything.

So are those of a `Gemm`, which works on one vector of each text.
"""


@dataclass(slots=True, frozen=True)
class Product:
    """Everything that one tensor of activations is multiplied with: it is quantised once for all of them.

    Attributes:
        activations: The tensor's name.
        outputs: The operators' outputs, in the graph's order.
        weights: Their matrices' names.
        source: The product whose output, with a bias and behind an activation function, these activations are, if
            nothing else takes either: a channel can then be there more than once. Empty: there is none.
    """

    activations: str
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    source: str = ""


def find(graph: onnx.GraphProto) -> list[Product]:
    """The products of a graph with its matrices, but for those that make the decision."""
    weights = matrices(graph)
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        decides = any(part in node.name for part in _DECISIONS)
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
