"""Helpers for ONNX nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto, helper

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from onnx import GraphProto, NodeProto

_NEVER_FLOAT = frozenset(
    {"QuantizeLinear", "Shape", "Size", "NonZero", "ArgMax", "ArgMin", "IsNaN", "IsInf"}
    | {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
)


def activations(graph: GraphProto, constants: AbstractSet[str], kind: int) -> set[str]:
    """Names of the tensors of one float type that nodes compute.

    Types follow from the operators alone, including fused ones, which shape inference does not know.

    Args:
        graph: In topological order.
        constants: The initializers of this type.
        kind: The type, a number of `TensorProto.DataType`.
    """
    names: set[str] = set()
    for node in graph.node:
        is_kind = any(name in names or name in constants for name in node.input)
        if node.op_type == "Cast":
            is_kind = next(attribute.i for attribute in node.attribute if attribute.name == "to") == kind
        elif node.op_type == "ConstantOfShape":
            is_kind = kind == next((attribute.t.data_type for attribute in node.attribute), TensorProto.FLOAT)
        if is_kind and node.op_type not in _NEVER_FLOAT:
            names.update(node.output if node.op_type == "Split" else node.output[:1])
    return names


def matrices(graph: GraphProto) -> set[str]:
    """Names of the float32 initializers with two dimensions."""
    return {
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2  # noqa: PLR2004
    }


def replace(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Replaces the nodes of a graph; some may be its own."""
    # Copied first: clearing the list deletes the content of its own nodes.
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def cast(source: str, target: str, to: int) -> NodeProto:
    """A node that casts one tensor to another type, a number of `TensorProto.DataType`."""
    return helper.make_node("Cast", [source], [target], name=target, to=to)


def copy(node: NodeProto, inputs: list[str]) -> NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.input[:] = inputs
    return made
