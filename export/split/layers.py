"""Cuts a graph between its layers: parts with about equal work, none of them larger than its share allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import ValueInfoProto

from export.errors import ExportError
from export.graph import nodes as graphs
from export.graph.draft import Draft
from export.split import tables
from export.split.flow import Flow, Kinds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SLACK = 1.1
"""A part may hold so many times its equal share of the weights."""

_PIECES = 4
"""Of a table for each part: the more, the nearer its cut is to the best one."""

_MOST_CROSSING = 4
"""Tensors that a cut may send beside lengths and positions; between layers there are one or two hidden states."""


def split(source: Path, targets: Sequence[Path]) -> None:
    """Writes the parts of a graph, one to each target, in the order in which they run.

    Where a table of embeddings leaves no cut that keeps the limit on weights, it is cut too.

    Raises:
        ExportError: No cut leaves every part small enough.
    """
    try:
        _split(source, targets)
    except ExportError:
        with_pieces = source.with_name(f"{source.stem}.pieces.onnx")
        draft = Draft(source, targets[0])
        whole = sum(draft[tensor.name].nbytes for tensor in draft.graph.initializer)
        tables.cut(source, with_pieces, _PIECES * len(targets), whole // (_PIECES * len(targets)))
        _split(with_pieces, targets)


def _split(source: Path, targets: Sequence[Path]) -> None:
    draft = Draft(source, targets[0])
    draft.lift_constants()
    flow = Flow(draft)
    cuts = range(1, flow.last_cut + 1)
    crossing = {step: flow.crossing(step) for step in cuts}
    kinds = Kinds(draft, {name for names in crossing.values() for name in names})
    sent = {step: sum(not kinds.is_small(name) for name in names) for step, names in crossing.items()}
    ends = _ends(flow, sent, len(targets))
    known = set[str]()
    for target, start, end in zip(targets, [0, *ends], [*ends, len(flow.steps)], strict=False):
        part = Draft(source, target)
        part.lift_constants()
        narrow(part, flow, kinds, known, start, end)
        known.update(flow.made(start, end))
        part.write()


def _ends(flow: Flow, sent: dict[int, int], parts: int) -> list[int]:
    """Where each part but the last one ends: with as few tensors sent as the limit on weights lets be."""
    whole = sum(flow.bytes[name] for name in frozenset[str]().union(*flow.weights))
    limit = SLACK * whole / parts
    for most in range(1, _MOST_CROSSING + 1):
        found = _best(flow, [step for step, count in sent.items() if count <= most], parts, limit)
        if found is not None:
            return found
    largest = max(flow.bytes, key=flow.bytes.__getitem__)
    raise ExportError(
        f"this model cannot be split in {parts} by layers: a part would hold more than {limit / whole:.0%} of the "
        f"weights ({largest} alone is {flow.bytes[largest] / whole:.0%})"
    )


def _best(flow: Flow, cuts: Sequence[int], parts: int, limit: float) -> list[int] | None:
    """The cuts whose slowest part has least to do; None where none keeps every part within the limit."""
    places = [0, *cuts, len(flow.steps)]
    costs = {
        (first, last): cost
        for first, start in enumerate(places)
        for last, cost in _costs(flow, places, first, start, limit)
    }
    # For each number of parts, by where the last of them ends: the slowest part's work, the largest's weights.
    best: dict[int, tuple[tuple[float, float], list[int]]] = {0: ((0.0, 0.0), [])}
    for _ in range(parts):
        following: dict[int, tuple[tuple[float, float], list[int]]] = {}
        for (first, last), (work, size) in costs.items():
            if first not in best:
                continue
            (slowest, largest), ends = best[first]
            candidate = (max(slowest, work), max(largest, size)), [*ends, places[last]]
            if last not in following or candidate < following[last]:
                following[last] = candidate
        best = following
    found = best.get(len(places) - 1)
    return None if found is None else found[1][:-1]


def _costs(
    flow: Flow, places: Sequence[int], first: int, start: int, limit: float
) -> list[tuple[int, tuple[float, float]]]:
    """Work and weights of the parts that begin at a place, by where they end, as far as the limit on weights."""
    held, costs, work = set[str](), [], 0
    for last in range(first + 1, len(places)):
        for step in range(max(start, places[last - 1]), places[last]):
            held |= flow.weights[step]
            work += flow.work[step]
        size = sum(flow.bytes[name] for name in held)
        if size > limit:
            break
        costs.append((last, (float(work), float(size))))
    return costs


def narrow(part: Draft, flow: Flow, kinds: Kinds, known: set[str], start: int, end: int) -> None:
    """Leaves one part of a graph; `known` are the tensors that parts before it answer."""
    graph = part.graph
    nodes = flow.part(start, end)
    read = {name for node in nodes for name in node.input}
    inputs = [value for value in graph.input if value.name in read]
    inputs += [kinds.described(name) for name in sorted(known & read)]
    own = {value.name: value for value in graph.output}
    outputs = [own.get(name) or kinds.described(name) for name in flow.made(start, end)]
    graphs.replace(graph, nodes)
    described = [[ValueInfoProto.FromString(value.SerializeToString()) for value in side] for side in (inputs, outputs)]
    del graph.input[:], graph.output[:]
    graph.input.extend(described[0])
    graph.output.extend(described[1])
    del graph.value_info[:]
    part.drop_unused()
