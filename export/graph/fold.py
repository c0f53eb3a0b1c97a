"""Computes at the export what a graph would compute anew for every text although no input takes part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from export.graph.nodes import lift_constants, replace

if TYPE_CHECKING:
    from pathlib import Path


def fold(path: Path) -> None:
    """Puts constants in the place of the operators that have only constants as inputs."""
    model = onnx.load(path)
    graph = model.graph
    lift_constants(graph)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    kept = []
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if not inputs or not all(name in constants for name in inputs):
            kept.append(node)
            continue
        alone = helper.make_graph(
            [node], "node", [], [onnx.ValueInfoProto(name=name) for name in node.output], [constants[n] for n in inputs]
        )
        made = ReferenceEvaluator(helper.make_model(alone, opset_imports=model.opset_import)).run(None, {})
        for name, array in zip(node.output, made, strict=True):
            constants[name] = numpy_helper.from_array(np.asarray(array), name)
    replace(graph, kept)
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    tensors = [onnx.TensorProto.FromString(t.SerializeToString()) for name, t in constants.items() if name in used]
    del graph.initializer[:]
    graph.initializer.extend(tensors)
    onnx.save(model, path)
