"""Cuts large tables of embeddings by their rows, so that parts can share one that is larger than any of them may be.

A word is looked up in each piece, and the piece that has it wins: the same row as before, to the bit. The fused
embedding is taken apart for it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, helper

from export.graph import nodes as graphs
from export.graph.draft import Draft

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_FUSED = frozenset({"EmbedLayerNormalization", "QEmbedLayerNormalization"})
_MASK, _SCALES, _ZEROS = 7, 8, 13
"""Inputs of the quantised embedding: five scales follow the mask, of three tables and two vectors, and five zeros."""


def cut(source: Path, target: Path, pieces: int, largest: int) -> None:
    """Writes a graph whose tables of more than `largest` bytes are cut into pieces; lies beside its source."""
    draft = Draft(source, target)
    draft.lift_constants()
    maker = Maker(draft, pieces, largest)
    graphs.replace(draft.graph, [made for node in draft.graph.node for made in maker.instead(node)])
    draft.drop_unused()
    draft.save()


class Maker:
    """Replaces what looks up large tables."""

    def __init__(self, draft: Draft, pieces: int, largest: int) -> None:
        self._draft, self._pieces, self._largest = draft, pieces, largest
        self._inputs = {value.name for value in draft.graph.input}

    def instead(self, node: NodeProto) -> Iterator[NodeProto]:
        """The nodes that take a node's place, itself where it is left alone."""
        if node.op_type in _FUSED and self._is_large(node.input[2]):
            yield from self._embedding(node)
        elif node.op_type == "Gather" and node.input[1] in self._inputs and self._is_large(node.input[0]):
            yield from self.lookup(node.input[0], node.input[1], node.output[0])
        else:
            yield node

    def _is_large(self, name: str) -> bool:
        return name in self._draft and self._draft[name].nbytes > self._largest

    def lookup(self, table: str, ids: str, found: str) -> Iterator[NodeProto]:
        """The rows of some ids, from the pieces of a table."""
        rows = self._draft[table]
        starts = [len(rows) * piece // self._pieces for piece in range(self._pieces + 1)]
        axis = self.constant(f"{found}.axis", np.array([-1]))
        before = ""
        for piece, (start, end) in enumerate(pairwise(starts)):
            name = f"{found}.{piece}"
            own, first, last, zero = (
                self.constant(f"{name}.{role}", value)
                for role, value in (
                    ("rows", rows[start:end]),
                    ("first", np.int32(start)),
                    ("last", np.int32(end - start - 1)),
                    ("zero", np.int32(0)),
                )
            )
            yield helper.make_node("Sub", [ids, first], [f"{name}.moved"])
            yield helper.make_node("Max", [f"{name}.moved", zero], [f"{name}.above"])
            yield helper.make_node("Min", [f"{name}.above", last], [f"{name}.index"])
            target = found if piece == self._pieces - 1 else f"{name}.so_far"
            if not before:
                yield helper.make_node("Gather", [own, f"{name}.index"], [target])
            else:
                yield helper.make_node("GreaterOrEqual", [ids, first], [f"{name}.here"])
                yield helper.make_node("Unsqueeze", [f"{name}.here", axis], [f"{name}.chosen"])
                yield helper.make_node("Gather", [own, f"{name}.index"], [f"{name}.row"])
                yield helper.make_node("Where", [f"{name}.chosen", f"{name}.row", before], [target])
            before = target

    def _embedding(self, node: NodeProto) -> Iterator[NodeProto]:
        """The fused embedding in ONNX's own operators: the sum of three rows, normalised."""
        whole = node.output[0]
        ids, types, words, positions, segments, scale, shift = node.input[:7]
        yield from self.lookup(words, ids, f"{whole}.words")
        parts = [self._number(node, 0, f"{whole}.words")]
        length, zero = self.constant(f"{whole}.second", np.array([1])), self.constant(f"{whole}.zero", np.array([0]))
        yield helper.make_node("Shape", [ids], [f"{whole}.shape"])
        yield helper.make_node("Gather", [f"{whole}.shape", length], [f"{whole}.length"])
        yield helper.make_node("Slice", [positions, zero, f"{whole}.length", zero], [f"{whole}.positions"])
        parts.append(self._number(node, 1, f"{whole}.positions"))
        if types and segments:
            yield helper.make_node("Gather", [segments, types], [f"{whole}.segments"])
            parts.append(self._number(node, 2, f"{whole}.segments"))
        for _, made in parts:
            yield from made
        total = parts[0][0]
        for number, (name, _) in enumerate(parts[1:]):
            yield helper.make_node("Add", [total, name], [f"{whole}.sum.{number}"])
            total = f"{whole}.sum.{number}"
        normal = [self._number(node, at, name) for at, name in ((3, scale), (4, shift))]
        for _, made in normal:
            yield from made
        epsilon = next((attribute.f for attribute in node.attribute if attribute.name == "epsilon"), 1e-12)
        names = [total, *(name for name, _ in normal)]
        yield helper.make_node("LayerNormalization", names, [whole], axis=-1, epsilon=epsilon)
        if len(node.output) > 1 and node.output[1]:
            yield helper.make_node("ReduceSum", [node.input[_MASK], length], [node.output[1]], keepdims=0)

    def _number(self, node: NodeProto, at: int, name: str) -> tuple[str, list[NodeProto]]:
        """What has been looked up, as numbers: its name, and the node that makes them of 8 bits."""
        if node.op_type == "EmbedLayerNormalization":
            return name, []
        inputs = [name, node.input[_SCALES + at], node.input[_ZEROS + at]]
        made = f"{node.output[0]}.{at}.number"
        return made, [helper.make_node("DequantizeLinear", inputs, [made])]

    def constant(self, name: str, value: NDArray[Any] | np.generic) -> str:
        """The name of a constant, which is added."""
        if name not in self._draft:
            self._draft[name] = value
        return name
