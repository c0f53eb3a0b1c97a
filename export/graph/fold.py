"""Constant folding: computes at export what no input changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from bertserve.export.graph.nodes import replace

if TYPE_CHECKING:
    from bertserve.export.graph.editor import GraphEditor


def fold(editor: GraphEditor) -> None:
    """Replaces operators whose inputs are all constants."""
    editor.lift_constants()
    remaining = []
    for node in editor.graph.node:
        inputs = [name for name in node.input if name]
        if not inputs or not all(name in editor for name in inputs):
            remaining.append(node)
            continue
        takes, gives = ([onnx.ValueInfoProto(name=name) for name in names] for names in (inputs, node.output))
        alone = helper.make_graph([node], "node", takes, gives)
        evaluator = ReferenceEvaluator(helper.make_model(alone, opset_imports=editor.model.opset_import))
        made = evaluator.run(None, {name: editor[name] for name in inputs})
        for name, array in zip(node.output, made, strict=True):
            editor[name] = np.asarray(array)
    replace(editor.graph, remaining)
    editor.drop_unused()
