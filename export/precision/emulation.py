"""fp16 arithmetic on a CPU, so that an fp16 graph can be proven where there is no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import TensorProto

from export.graph import nodes
from export.graph.draft import Draft
from export.precision import ranges

if TYPE_CHECKING:
    from pathlib import Path

    from onnx import NodeProto


def emulate(source: Path, target: Path) -> None:
    """Writes a twin of an fp16 graph whose answers on a CPU are those of fp16 arithmetic.

    ONNX Runtime's CPU provider has no fp16 kernels for most operators. It computes in FP32 and drops the casts
    in between, so that nothing is rounded and nothing overflows but the weights. The twin says each of these
    steps: every operator computes in FP32, as tensor cores accumulate, and its result is cast to fp16.

    Args:
        source: The fp16 graph.
        target: Where to write.
    """
    draft = Draft(source, target)
    graph = draft.graph
    draft.lift_constants()
    halves = set(draft.of_type(TensorProto.FLOAT16))
    halves |= nodes.activations(graph, halves, TensorProto.FLOAT16)
    steps: dict[str, NodeProto] = {}
    for node in graph.node:
        if node.op_type == "Cast" or node.op_type in ranges.MOVES or halves.isdisjoint(node.output):
            steps[node.output[0]] = node
            continue
        for name in halves.intersection(node.input):
            steps[f"{name}:wide"] = nodes.cast(name, f"{name}:wide", TensorProto.FLOAT)
        wide = nodes.copy(node, [f"{name}:wide" if name in halves else name for name in node.input])
        wide.output[0] = f"{node.output[0]}:exact"
        steps[wide.output[0]] = wide
        steps[node.output[0]] = nodes.cast(wide.output[0], node.output[0], TensorProto.FLOAT16)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(steps.values())
    draft.write()
