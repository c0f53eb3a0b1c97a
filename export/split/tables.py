"""Cuts an embedding table by rows, so that every part holds some of it.

Each word is looked up in every piece, and the piece that has it wins: the same row as before, bit for bit. The fused
embedding operator then takes these rows as its table.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from export.graph import nodes as graphs
from export.graph.editor import GraphEditor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FUSED = frozenset({"EmbedLayerNormalization", "QEmbedLayerNormalization"})
"""ONNX Runtime's operators that look up all embeddings."""


def table_of(node: NodeProto, inputs: Collection[str]) -> str:
    """The table in which a node looks up an input of the graph; empty if there is none."""
    if node.op_type in FUSED and node.input[0] in inputs:
        return node.input[2]
    if node.op_type == "Gather" and node.input[1] in inputs:
        return node.input[0]
    return ""


def cut(source: Path, target: Path, table: str, ends: Sequence[int]) -> list[str]:
    """Writes a graph whose table is cut before some of its rows, into the folder of its source.

    The lookups in the pieces come before everything else. Returns, for each piece, the name of the rows found so far.
    """
    editor = GraphEditor(source, target)
    editor.lift_constants()
    maker = _Pieces(editor, table, [0, *ends, len(editor[table])])
    nodes = [made for node in editor.graph.node for made in maker.instead(node)]
    graphs.replace(editor.graph, [*maker.first, *nodes])
    editor.drop_unused()
    editor.save()
    return maker.found


class Maker:
    """Replaces table lookups."""

    def __init__(self, editor: GraphEditor) -> None:
        self.editor = editor
        self._inputs = {value.name for value in editor.graph.input}

    def is_cut(self, table: str) -> bool:
        raise NotImplementedError

    def lookup(self, table: str, ids: str, found: str) -> Iterator[NodeProto]:
        """Nodes that look up the rows of some ids."""
        raise NotImplementedError

    def instead(self, node: NodeProto) -> Iterator[NodeProto]:
        """The nodes that replace a node; the node itself if it is left alone."""
        table = table_of(node, self._inputs)
        if table not in self.editor or not self.is_cut(table):
            yield node
        elif node.op_type == "Gather":
            yield from self.lookup(table, node.input[1], node.output[0])
        else:
            yield from self._embedding(node)

    def _embedding(self, node: NodeProto) -> Iterator[NodeProto]:
        """The fused embedding operator, with one row per token as its table."""
        whole, ids, table = node.output[0], node.input[0], node.input[2]
        yield from self.lookup(table, ids, f"{whole}.words")
        width = self.constant(f"{whole}.width", np.array([-1, self.editor[table].shape[1]]))
        zero, one = (self.constant(f"{whole}.{number}", np.int64(number)) for number in (0, 1))
        yield helper.make_node("Reshape", [f"{whole}.words", width], [f"{whole}.rows"])
        yield helper.make_node("Size", [ids], [f"{whole}.size"])
        yield helper.make_node("Shape", [ids], [f"{whole}.shape"])
        yield helper.make_node("Range", [zero, f"{whole}.size", one], [f"{whole}.range"])
        yield helper.make_node("Cast", [f"{whole}.range"], [f"{whole}.numbers"], to=TensorProto.INT32)
        yield helper.make_node("Reshape", [f"{whole}.numbers", f"{whole}.shape"], [f"{whole}.ids"])
        node.input[0], node.input[2] = f"{whole}.ids", f"{whole}.rows"
        yield node

    def constant(self, name: str, value: NDArray[Any] | np.generic) -> str:
        """Adds a constant; returns its name."""
        if name not in self.editor:
            self.editor[name] = value
        return name

    def index(self, ids: str, name: str, start: int, end: int) -> Iterator[NodeProto]:
        """Computes `name.index`: the position of ids in a piece of a table. Ids of other pieces get its nearest row."""
        first, last, zero = (
            self.constant(f"{name}.{role}", np.int32(value))
            for role, value in (("first", start), ("last", end - start - 1), ("zero", 0))
        )
        yield helper.make_node("Sub", [ids, first], [f"{name}.moved"])
        yield helper.make_node("Max", [f"{name}.moved", zero], [f"{name}.above"])
        yield helper.make_node("Min", [f"{name}.above", last], [f"{name}.index"])

    def where(self, here: str, name: str, row: str, other: str, found: str) -> Iterator[NodeProto]:
        """Takes the row of each token that is here, and the other one elsewhere."""
        yield helper.make_node("Unsqueeze", [here, self.constant(f"{name}.axis", np.array([-1]))], [f"{name}.chosen"])
        yield helper.make_node("Where", [f"{name}.chosen", row, other], [found])


class _Pieces(Maker):
    """Cuts one table.

    Attributes:
        first: Nodes that look up its pieces.
        found: For each piece, the name of the rows found so far.
    """

    def __init__(self, editor: GraphEditor, table: str, ends: Sequence[int]) -> None:
        super().__init__(editor)
        self._table, self._ends = table, ends
        self.first: list[NodeProto] = []
        self.found: list[str] = []

    def is_cut(self, table: str) -> bool:
        return table == self._table

    def lookup(self, table: str, ids: str, found: str) -> Iterator[NodeProto]:
        self.first += self._lookups(self.editor[table], ids, found)
        yield from ()

    def _lookups(self, rows: NDArray[Any], ids: str, found: str) -> Iterator[NodeProto]:
        pieces = list(pairwise(self._ends))
        for piece, (start, end) in enumerate(pieces):
            name = f"{found}.{piece}"
            own = self.constant(f"{name}.rows", rows[start:end])
            yield from self.index(ids, name, start, end)
            before = self.found[-1] if self.found else ""
            self.found.append(found if end == len(rows) else f"{name}.so_far")
            if not before:
                yield helper.make_node("Gather", [own, f"{name}.index"], [self.found[-1]])
                continue
            yield helper.make_node("GreaterOrEqual", [ids, f"{name}.first"], [f"{name}.here"])
            yield helper.make_node("Gather", [own, f"{name}.index"], [f"{name}.row"])
            yield from self.where(f"{name}.here", name, f"{name}.row", before, self.found[-1])
