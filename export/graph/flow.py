"""Dependencies of a graph's tensors, which a fusion must preserve."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto

from bertserve.export.errors import ExportError

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from pathlib import Path

_MASK = 7
"""The input of `EmbedLayerNormalization` that only its second output depends on."""


def check(raw: Path, fused: Path) -> None:
    """Checks that fused operators read everything that they replace, beside the check on their count.

    Both graphs are cut at the tensors that both compute. The operators between two cuts must read as much after the
    fusion as before: each tensor, each input, and as many weights.

    Raises:
        ExportError: A fused operator reads less.
    """
    before, after = _Flow(raw), _Flow(fused)
    cut = before.inputs | (before.producers.keys() & after.producers.keys())
    for name in sorted(cut - before.inputs):
        old, new = before.sources(name, cut), after.sources(name, cut)
        # One operator may compute both a tensor and what depends on it.
        missing = [each for each in sorted(old.tensors - new.tensors) if not after.is_within(each, new.tensors, cut)]
        if missing or new.weights < old.weights:
            raise ExportError(
                f"graph fusion dropped {missing[0] if missing else 'a weight'}, which {name} depends on; the installed "
                "versions of torch, transformers and onnxruntime are incompatible"
            )


@dataclass(slots=True, frozen=True)
class _Sources:
    """Inputs of a tensor: tensors of the cut, and a number of weights."""

    tensors: frozenset[str]
    weights: int


class _Flow:
    def __init__(self, path: Path) -> None:
        self._graph = onnx.load(path, load_external_data=False).graph
        self.producers = {name: node for node in self._graph.node for name in node.output if name}
        self.inputs = {value.name for value in self._graph.input}

    @cached_property
    def _weights(self) -> dict[str, int]:
        """Sizes of the constants with more than one number."""
        tensors = [(tensor.name, tensor) for tensor in self._graph.initializer]
        for node in self._graph.node:
            if node.op_type == "Constant":
                tensors += [(node.output[0], each.t) for each in node.attribute if each.name == "value"]
        sizes = {name: prod(tensor.dims) for name, tensor in tensors if tensor.data_type == TensorProto.FLOAT}
        return {name: size for name, size in sizes.items() if size > 1}

    def sources(self, name: str, cut: AbstractSet[str]) -> _Sources:
        """The inputs of a tensor, up to the previous cut."""
        tensors, weights, seen = set[str](), 0, {name}
        todo = [name]
        while todo:
            for source in self._read(todo.pop()):
                weights += self._weights.get(source, 0)
                if source in cut:
                    tensors.add(source)
                elif source not in seen:
                    seen.add(source)
                    todo.append(source)
        return _Sources(frozenset(tensors), weights)

    def is_within(self, name: str, tensors: AbstractSet[str], cut: AbstractSet[str]) -> bool:
        """Whether a computed tensor depends only on these."""
        return name in self.producers and self.sources(name, cut).tensors <= tensors

    def _read(self, name: str) -> list[str]:
        """Tensors whose values an operator reads; shapes do not depend on a text."""
        node = self.producers.get(name)
        if node is None or node.op_type in {"Shape", "Size"}:
            return []
        is_mask = node.op_type == "EmbedLayerNormalization" and name != node.output[0]
        return [each for each in (node.input[_MASK:] if is_mask else node.input) if each]
