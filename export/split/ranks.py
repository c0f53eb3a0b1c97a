"""Splits each layer between ranks (tensor parallelism), as Megatron-LM does (arXiv 1909.08053, section 3).

A rank has some of the attention heads, some of the columns of the first feed-forward matrix, and the matching rows of
the matrices that follow. The outputs of those are partial sums, which the ranks add up between two segments of the
graph. The table of word embeddings is shared by rows in the same way. Every rank computes the normalizations and
residual sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from onnx import NodeProto, TensorProto, helper

from export.errors import ExportError
from export.graph import nodes as graphs
from export.graph.editor import GraphEditor
from export.split.flow import Flow, Kinds
from export.split.layers import LARGEST_PART, SLACK, narrow
from export.split.tables import Maker
from serving.engine.specs import PARTIAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

_ACTIVATIONS = frozenset({"BiasGelu", "FastGelu"})
"""Fused with the bias of the product before them, which is split too."""


def split(source: Path, ranks: int, name: Callable[[int, int], Path]) -> list[Path]:
    """Writes the segments of each rank, in order, rank after rank.

    Args:
        source: An fp32 graph after the fusions.
        ranks: Number of ranks.
        name: The file of a rank's segment; both count from 1.

    Raises:
        ExportError: The graph does not consist of layers that can be split like this.
    """
    whole = sum(_size(tensor) for tensor in GraphEditor(source, source).graph.initializer)
    written: list[Path] = []
    for rank in range(ranks):
        own = source.with_name(f"{source.stem}.rank{rank}.onnx")
        sums = _Rank(source, own, rank, ranks).write()
        written += _segments(own, sums, lambda segment, rank=rank: name(rank + 1, segment))  # type: ignore[misc]
        held = sum(_size(tensor) for tensor in GraphEditor(own, own).graph.initializer)
        if held > SLACK * whole / ranks:
            raise ExportError(
                f"cannot split this model into {ranks} parts by tensors: a rank would have {held / whole:.0%} of the "
                "weights, because only layers and word embeddings are split; try --split-by layers"
            )
    return written


def _segments(graph: Path, sums: list[str], name: Callable[[int], Path]) -> list[Path]:
    """Writes the segments of a rank's graph. All but the last end at a partial sum."""
    editor = GraphEditor(graph, graph)
    flow = Flow(editor)
    makers = {output: step for step, at in enumerate(flow.steps) for output in flow.nodes[at].output}
    ends = [*sorted(makers[each + PARTIAL] + 1 for each in sums), len(flow.steps)]
    kinds = Kinds(editor, {made for end in ends[:-1] for made in flow.crossing(end)})
    known, paths = set[str](), []
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
        paths.append(name(number))
        part = GraphEditor(graph, paths[-1])
        narrow(part, flow, kinds, known, start, end)
        known.update(flow.made(start, end))
        part.write(LARGEST_PART)
    return paths


class _Rank(Maker):
    """One rank's share of a graph."""

    def __init__(self, source: Path, target: Path, rank: int, ranks: int) -> None:
        editor = GraphEditor(source, target)
        editor.lift_constants()
        super().__init__(editor)
        self._rank, self._ranks = rank, ranks
        self._largest = sum(_size(tensor) for tensor in editor.graph.initializer) // (8 * ranks)
        self._sums: dict[str, int] = {}
        """The tensors that the ranks add up, with the number of components of their vectors."""
        self._users: dict[str, list[NodeProto]] = {}
        for node in editor.graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)

    def write(self) -> list[str]:
        """Saves the rank's graph; returns the names of the tensors that the ranks add up."""
        graph = self.editor.graph
        layers = [*self._attentions(), *self._feed_forwards()]
        if not layers:
            raise ExportError(
                "--split-by tensors supports only BERT layers (BERT, RoBERTa, XLM-R, ELECTRA, Megatron-BERT and others "
                "with the same attention); try --split-by layers"
            )
        for product in layers:
            self._sums[product.output[0]] = self.editor[product.input[1]].shape[1]
            product.output[0] += PARTIAL
        graphs.replace(graph, [made for node in graph.node for made in self.instead(node)])
        for name, width in self._sums.items():
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "sequence", width]))
            graph.output.append(helper.make_tensor_value_info(name + PARTIAL, TensorProto.FLOAT, None))
        self.editor.drop_unused()
        self.editor.save()
        return list(self._sums)

    def is_cut(self, table: str) -> bool:
        return self.editor[table].nbytes > self._largest

    def lookup(self, table: str, ids: str, found: str) -> Iterator[NodeProto]:
        """The rows of the rank's own words, and zeros for all others."""
        rows = self.editor[table]
        first, end = (len(rows) * rank // self._ranks for rank in (self._rank, self._rank + 1))
        own = self.constant(f"{found}.own", rows[first:end])
        nothing = self.constant(f"{found}.nothing", np.float32(0))
        yield from self.index(ids, found, first, end)
        yield helper.make_node("Equal", [f"{found}.moved", f"{found}.index"], [f"{found}.here"])
        yield helper.make_node("Gather", [own, f"{found}.index"], [f"{found}.row"])
        yield from self.where(f"{found}.here", found, f"{found}.row", nothing, found + PARTIAL)
        self._sums[found] = rows.shape[1]

    def _attentions(self) -> Iterator[NodeProto]:
        """Splits the attention heads. Yields the products after them, whose outputs are partial sums."""
        for node in self.editor.graph.node:
            if node.op_type != "Attention":
                continue
            heads = next(attribute for attribute in node.attribute if attribute.name == "num_heads")
            if heads.i % self._ranks:
                raise ExportError(f"{heads.i} attention heads cannot be split evenly between {self._ranks} ranks")
            (product,) = self._users[node.output[0]]
            for name in (node.input[1], node.input[2]):
                thirds = np.split(self.editor[name], 3, axis=-1)
                self.editor[name] = np.concatenate([self._share(third, -1) for third in thirds], axis=-1)
            self.editor[product.input[1]] = self._share(self.editor[product.input[1]], 0)
            heads.i //= self._ranks
            yield product

    def _feed_forwards(self) -> Iterator[NodeProto]:
        """Splits the feed-forward layers. Yields their second products, whose outputs are partial sums."""
        makers = {output: node for node in self.editor.graph.node for output in node.output}
        for node in self.editor.graph.node:
            first = makers.get(node.input[0]) if node.op_type in _ACTIVATIONS else None
            if first is None or first.op_type != "MatMul":
                continue
            following = self._users[node.output[0]]
            if len(following) != 1 or following[0].op_type != "MatMul":
                continue  # the activation of a task head
            for owner, at, axis in ((first, 1, -1), (node, 1, -1), (following[0], 1, 0)):
                self.editor[owner.input[at]] = self._share(self.editor[owner.input[at]], axis)
            yield following[0]

    def _share(self, array: NDArray[Any], axis: int) -> NDArray[Any]:
        if array.shape[axis] % self._ranks:
            raise ExportError(f"{array.shape[axis]} columns cannot be split evenly between {self._ranks} ranks")
        return np.split(array, self._ranks, axis=axis)[self._rank]


def _size(tensor: TensorProto) -> int:
    return int(np.prod(tensor.dims)) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
