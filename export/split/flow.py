"""A graph as a sequence of steps: what each step computes, reads and holds, and what crosses a cut between two.

Nodes that depend on the inputs alone and read no weights (masks, positions, lengths), or on weights alone, are no
steps: each part computes them anew. All other nodes are steps, in the graph's own order. A cut between two steps sends
the tensors that later steps read.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from export.graph.editor import MAPPED, GraphEditor
from export.split.tables import FUSED, table_of
from serving.records import IDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from pathlib import Path

_LIGHT = 1 << 12
"""Maximum bytes of a constant that every part may hold."""

_LOOKUPS = FUSED | {"Gather"}
"""Lookup operators. Reading rows of their tables costs nothing."""

_SMALL = frozenset({"tensor(int32)", "tensor(int64)", "tensor(bool)"})
"""Types of lengths and positions. A hidden state has none of them."""

_ERRORS_ONLY = 3

_HIDDEN_AXES = 3
"""Texts, tokens, and components of each token."""


class Flow:
    """A graph's steps.

    Attributes:
        steps: Indices of the nodes that are steps.
        last_cut: The first step that computes an output of the graph. No cut lies after it.
    """

    def __init__(self, editor: GraphEditor, looked_up: Collection[str] = ()) -> None:
        """Reads a graph. What computes a tensor of `looked_up` is a step, however small its table."""
        graph = editor.graph
        self.nodes = list(graph.node)
        self._inputs = {value.name for value in graph.input}
        self._outputs = [value.name for value in graph.output]
        self.bytes = {tensor.name: _size(tensor) for tensor in graph.initializer}
        self._elements = {tensor.name: prod(tensor.dims) for tensor in graph.initializer}
        self._makers = {name: at for at, node in enumerate(self.nodes) for name in node.output if name}
        self.steps = self._steps({*looked_up})
        self._step_of = {at: step for step, at in enumerate(self.steps)}
        self.last_cut = min(self._step_of[self._makers[name]] for name in self._outputs)
        self._free: dict[int, frozenset[int]] = {}

    def _steps(self, looked_up: set[str]) -> list[int]:
        told, held, main = set(self._inputs), dict[str, int](), set[str]()
        steps = []
        for at, node in enumerate(self.nodes):
            reads = [name for name in node.input if name]
            size = max([self.bytes.get(name, 0) + held.get(name, 0) for name in reads], default=0)
            depends = not told.isdisjoint(reads)
            if depends and (size > _LIGHT or not main.isdisjoint(reads) or not looked_up.isdisjoint(node.output)):
                steps.append(at)
                main.update(node.output)
            if depends:
                told.update(node.output)
            else:
                held.update(dict.fromkeys(node.output, size))
        return steps

    def before(self, at: int) -> frozenset[int]:
        """The nodes that are no steps and that a node needs, by index."""
        known = self._free.get(at)
        if known is None:
            makers = {self._makers[name] for name in self.nodes[at].input if name in self._makers}
            free = makers - self._step_of.keys()
            known = frozenset(free).union(*[self.before(each) for each in free])
            self._free[at] = known
        return known

    def part(self, start: int, end: int) -> list[NodeProto]:
        """The nodes of a part: its own steps and what they need."""
        own = self.steps[start:end]
        return [self.nodes[at] for at in sorted(set(own).union(*[self.before(at) for at in own]))]

    @cached_property
    def weights(self) -> list[frozenset[str]]:
        """For each step, the constants that its part holds for it."""
        return [
            frozenset(name for each in (at, *self.before(at)) for name in self.nodes[each].input if name in self.bytes)
            for at in self.steps
        ]

    @cached_property
    def work(self) -> list[int]:
        """Approximate cost of each step: multiplications per token."""
        return [sum(self._elements[name] for name in self._factors(at)) for at in self.steps]

    def _factors(self, at: int) -> Iterator[str]:
        """The constants by which a step multiplies, directly or after nodes that are no steps."""
        node = self.nodes[at]
        if node.op_type in _LOOKUPS:
            return
        for name in node.input:
            if name in self._elements:
                yield name
            elif name in self._makers and self._makers[name] not in self._step_of:
                yield from self._factors(self._makers[name])

    @cached_property
    def table(self) -> tuple[str, int]:
        """The largest table in which an input is looked up, and the step that does it; an empty name without one."""
        named = ((table_of(self.nodes[at], self._inputs), step) for step, at in enumerate(self.steps))
        found = [(name, step) for name, step in named if name in self.bytes]
        return max(found, key=lambda each: self.bytes[each[0]], default=("", 0))

    def behind(self, name: str) -> int:
        """The step after the one that computes a tensor."""
        return self._step_of[self._makers[name]] + 1

    def crossing(self, step: int) -> list[str]:
        """The tensors computed before a cut that are read after it or are outputs of the graph."""
        made = {name: None for at in self.steps[:step] for name in self.nodes[at].output if name}
        read = {name for at in self.steps[step:] for name in self.nodes[at].input} | set(self._outputs)
        return [name for name in made if name in read]

    def made(self, start: int, end: int) -> list[str]:
        """The outputs of a part: the graph's own outputs in their order, then the tensors that later parts read."""
        own = {name for at in self.steps[start:end] for name in self.nodes[at].output}
        answers = [name for name in self._outputs if name in own]
        return [*answers, *(name for name in self.crossing(end) if name in own and name not in answers)]

    @property
    def inputs(self) -> set[str]:
        """Names of the graph's own inputs."""
        return self._inputs


class Kinds:
    """The types and shapes of a graph's tensors, as ONNX Runtime infers them: it knows its own operators."""

    def __init__(self, editor: GraphEditor, names: Iterable[str]) -> None:
        wanted = sorted(set(names))
        light = ModelProto()
        light.CopyFrom(_without_weights(editor))
        light.graph.output.extend(
            ValueInfoProto(name=name) for name in wanted if name not in {o.name for o in light.graph.output}
        )
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = _ERRORS_ONLY
        session = onnxruntime.InferenceSession(light.SerializeToString(), options, ["CPUExecutionProvider"])
        self._found = {output.name: output for output in session.get_outputs()}

    def is_small(self, name: str) -> bool:
        return self._found[name].type in _SMALL

    def is_hidden_state(self, name: str) -> bool:
        """Whether a tensor has a fixed number of components for each token of each text."""
        shape = self._found[name].shape
        return len(shape) == _HIDDEN_AXES and isinstance(shape[-1], int) and not self.is_small(name)

    def is_of_tokens(self, name: str) -> bool:
        """Whether its first two dimensions are those of the inputs."""
        return list(self._found[name].shape[:2]) == ["batch", "sequence"]

    def described(self, name: str) -> ValueInfoProto:
        """Declares a tensor as an input or output of a part."""
        found = self._found[name]
        kind = _KINDS[found.type]
        if not found.shape:
            return helper.make_tensor_value_info(name, kind, None)
        # Each dimension that varies gets its own name: the engine need not find two of them equal.
        dims = [size if isinstance(size, int) else f"{name}.{axis}" for axis, size in enumerate(found.shape)]
        return helper.make_tensor_value_info(name, kind, dims)


def read_sizes_of_inputs(source: Path, target: Path) -> None:
    """Writes a graph that reads the numbers of texts and tokens from an input, not from computed tensors.

    What depends on these sizes alone, such as masks, then depends on the inputs alone, and every part computes it anew.
    """
    editor = GraphEditor(source, target)
    editor.lift_constants()
    readers: dict[str, list[NodeProto]] = {}
    for node in editor.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    inputs = {value.name for value in editor.graph.input}
    shapes = [
        node
        for node in editor.graph.node
        if node.op_type == "Shape"
        and node.input[0] not in inputs
        and all(_reads_texts_or_tokens(editor, reader) for reader in readers.get(node.output[0], []))
    ]
    kinds = Kinds(editor, {node.input[0] for node in shapes})
    # The embeddings: ONNX Runtime cannot infer that there are as many rows of positions as tokens.
    normalised = next((node.output[0] for node in editor.graph.node if node.op_type == "LayerNormalization"), "")
    for node in shapes:
        if node.input[0] == normalised or kinds.is_of_tokens(node.input[0]):
            node.input[0] = IDS
    editor.write(MAPPED)


def _reads_texts_or_tokens(editor: GraphEditor, node: NodeProto) -> bool:
    """Whether a node reads the first or the second dimension of a shape."""
    return node.op_type == "Gather" and node.input[1] in editor and bool(np.all(editor[node.input[1]] <= 1))


_KINDS = {
    "tensor(float)": TensorProto.FLOAT,
    "tensor(float16)": TensorProto.FLOAT16,
    "tensor(int8)": TensorProto.INT8,
    "tensor(uint8)": TensorProto.UINT8,
    "tensor(int32)": TensorProto.INT32,
    "tensor(int64)": TensorProto.INT64,
    "tensor(bool)": TensorProto.BOOL,
}


def _without_weights(editor: GraphEditor) -> ModelProto:
    """The graph with its large constants as inputs."""
    whole = editor.graph
    graph = helper.make_graph(whole.node, whole.name, whole.input, whole.output)
    for tensor in whole.initializer:
        if _size(tensor) > _LIGHT or tensor.data_location == TensorProto.EXTERNAL:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        else:
            graph.initializer.append(tensor)
    return helper.make_model(graph, opset_imports=editor.model.opset_import, ir_version=editor.model.ir_version)


def _size(tensor: TensorProto) -> int:
    """Bytes of a constant."""
    return prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
