"""The matrices of a graph that are worth 8 bits, by what they are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import numpy_helper

from export.graph.nodes import matrices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_PRODUCTS = frozenset({"Attention", "MatMul"})
"""Operators that multiply their first input with their second."""

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
    """

    activations: str
    outputs: tuple[str, ...]
    weights: tuple[str, ...]


def find(graph: onnx.GraphProto) -> list[Product]:
    """The products of a graph with its matrices, but for those that make the decision."""
    weights = matrices(graph)
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        decides = any(part in node.name for part in _DECISIONS)
        if node.op_type in _PRODUCTS and node.input[1] in weights and not decides:
            users.setdefault(node.input[0], []).append(node)
    return [
        Product(name, tuple(node.output[0] for node in nodes), tuple(node.input[1] for node in nodes))
        for name, nodes in users.items()
    ]


class Constants:
    """The constants of a graph that is being rewritten."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._places = {tensor.name: tensor for tensor in graph.initializer}

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return numpy_helper.to_array(self._places[name]).astype(np.float32, copy=False)

    def __setitem__(self, name: str, array: NDArray[np.generic] | np.generic) -> None:
        made = numpy_helper.from_array(np.asarray(array, order="C"), name)
        if name in self._places:
            self._places[name].CopyFrom(made)
        else:
            self._places[name] = self._graph.initializer.add()
            self._places[name].CopyFrom(made)

    def joined(self, names: Iterable[str]) -> NDArray[np.float32]:
        """Matrices side by side, as one product with the same activations."""
        return np.concatenate([self[name] for name in names], axis=1)

    def drop_unused(self) -> None:
        """Removes what no operator reads any longer."""
        used = {name for node in self._graph.node for name in node.input}
        kept = [tensor for tensor in self._graph.initializer if tensor.name in used]
        if len(kept) < len(self._graph.initializer):
            copies = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in kept]
            del self._graph.initializer[:]
            self._graph.initializer.extend(copies)
            self._places = {tensor.name: tensor for tensor in self._graph.initializer}
