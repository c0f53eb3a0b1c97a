"""fp16 arithmetic on a CPU, to prove fp16 graphs without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from bertserve.export.graph import nodes
from bertserve.export.graph.editor import GraphEditor
from bertserve.export.precision import ranges

if TYPE_CHECKING:
    from pathlib import Path

    from onnx import NodeProto

_QUANTISES = frozenset({"QuantizeLinear", "DequantizeLinear"})


def emulate(source: Path, target: Path) -> None:
    """Writes a copy of an fp16 graph that computes fp16 arithmetic on a CPU.

    ONNX Runtime's CPU provider has no fp16 kernels for most operators: it computes in FP32 and drops the casts in
    between, so nothing is rounded and nothing overflows except the weights. In the copy, every operator computes in
    FP32, as tensor cores accumulate, and its result is cast to fp16.

    In a quantized graph (see `qdq`) activations pass through the same 8-bit values. They and the dequantized matrices
    are multiplied in FP32, which holds each product of two such values exactly. The matrices are written out, so that
    ONNX Runtime does not fuse them into 8-bit products, whose intermediate results saturate on CPUs without VNNI.
    """
    editor = GraphEditor(source, target)
    graph = editor.graph
    editor.lift_constants()
    halves = set(editor.of_type(TensorProto.FLOAT16))
    halves |= nodes.activations(graph, halves, TensorProto.FLOAT16)
    steps: dict[str, NodeProto] = {}
    for node in graph.node:
        name = node.output[0]
        if node.op_type == "DequantizeLinear" and node.input[0] in editor:
            values, scale = (editor[each].astype(np.float32) for each in node.input[:2])
            editor[f"{name}:wide"] = values * scale
            continue
        quantises = node.op_type in _QUANTISES
        if node.op_type == "Cast" or node.op_type in ranges.MOVES or (halves.isdisjoint(node.output) and not quantises):
            steps[name] = node
            continue
        for half in halves.intersection(node.input):
            if f"{half}:wide" not in editor:
                steps.setdefault(f"{half}:wide", nodes.cast(half, f"{half}:wide", TensorProto.FLOAT))
        wide = nodes.copy(node, [f"{each}:wide" if each in halves else each for each in node.input])
        if quantises:
            wide.output[0] = f"{name}:wide" if name in halves else name
            steps[wide.output[0]] = wide
            continue
        wide.output[0] = f"{name}:exact"
        steps[wide.output[0]] = wide
        steps[name] = nodes.cast(wide.output[0], name, TensorProto.FLOAT16)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(steps.values())
    editor.write()
