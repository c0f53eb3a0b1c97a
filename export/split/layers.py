"""Splits a graph between its layers into parts with about equal work, none larger than its share allows."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from onnx import ValueInfoProto

from export.errors import ExportError
from export.graph import nodes as graphs
from export.graph.editor import GraphEditor
from export.split import tables
from export.split.flow import Flow, Kinds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SLACK = 1.1
"""Maximum weights of a part, as a multiple of an equal share."""

LARGEST_PART = 1 << 20
"""Like `MAPPED` of `export.graph.editor`, but smaller: parts save memory, and those of small models should too."""

_WORTH = 0.95
"""Cuts that send more, such as the rows of a shared table, must reduce the slowest part's work below this share."""

_MAX_CROSSING = 4
"""Maximum tensors that a cut sends, besides lengths and positions. Between layers lie one or two hidden states."""


class _Cuts(NamedTuple):
    """The end of each part but the last, the work of the slowest part, and the bytes that each part holds."""

    ends: list[int]
    work: float
    sizes: list[float]


def split(source: Path, targets: Sequence[Path], *, engines: bool = False) -> list[Path]:
    """Writes the parts of a graph, one to each target, in the order in which they run.

    The rows of the largest embedding table are shared if it leaves one part too much work or allows no cut. Each part
    but the first then has a second graph, which looks words up. These graphs run before the parts, in the same order.
    Graphs for TensorRT `engines` share no table, and only hidden states go from part to part.

    Returns:
        The files of the parts, then those of the second graphs.

    Raises:
        ExportError: No cut leaves every part small enough.
    """
    editor = GraphEditor(source, targets[0])
    editor.lift_constants()
    flow, parts = Flow(editor), len(targets)
    whole = sum(flow.bytes[name] for name in frozenset[str]().union(*flow.weights))
    limit, sent = SLACK * whole / parts, _sent(editor, flow, engines=engines)
    plain, shared = _cuts(flow, flow.weights, sent, parts, limit), None
    table, step = flow.table
    if table and not engines:
        weights = [*flow.weights]
        weights[step] -= {table}
        shared = _cuts(flow, weights, {at: count for at, count in sent.items() if at > step}, parts, limit)
    if shared is not None and (plain is None or shared.work < _WORTH * plain.work):
        return _with_shared(source, targets, flow, shared, table)
    if plain is not None:
        _write(source, targets, flow, plain.ends)
        return [*targets]
    largest = max(flow.bytes, key=flow.bytes.__getitem__)
    raise ExportError(
        f"cannot split this model into {parts} parts by layers: a part would have more than {limit / whole:.0%} of the "
        f"weights ({largest} alone is {flow.bytes[largest] / whole:.0%})"
    )


def _sent(editor: GraphEditor, flow: Flow, *, engines: bool) -> dict[int, int]:
    """The number of large tensors that each possible cut sends, by the step after the cut."""
    crossing = {step: flow.crossing(step) for step in range(1, flow.last_cut + 1)}
    kinds = Kinds(editor, {name for names in crossing.values() for name in names})
    return {
        step: sum(not kinds.is_small(name) for name in names)
        for step, names in crossing.items()
        if not engines or all(map(kinds.is_hidden_state, names))
    }


def _with_shared(source: Path, targets: Sequence[Path], flow: Flow, cuts: _Cuts, table: str) -> list[Path]:
    """Writes parts that share a table, so that all hold about the same."""
    editor = GraphEditor(source, targets[0])
    editor.lift_constants()
    count, first, *others = len(editor[table]), *_filled(cuts.sizes, flow.bytes[table])
    # The first part's rows are the last piece: it runs after the graphs that look words up for it.
    ends = _ends(count, [*others, first])
    in_pieces = source.with_name(f"{source.stem}.pieces.onnx")
    found = tables.cut(source, in_pieces, table, ends[:-1])
    editor = GraphEditor(in_pieces, targets[0])
    pieces = Flow(editor, found)
    moved = len(pieces.steps) - len(flow.steps)
    lookups = [target.with_name(f"{target.stem}.lookup.onnx") for target in targets[1:]]
    stages = [*map(pieces.behind, found[:-1]), *(end + moved for end in cuts.ends)]
    _write(in_pieces, [*lookups, *targets], pieces, stages)
    return [*targets, *lookups]


def _filled(held: Sequence[float], amount: float) -> list[float]:
    """Distributes an amount over several parts, the least filled first; returns what each one gets.

    >>> _filled([5, 1, 2], 3)
    [0.0, 2.0, 1.0]
    """
    ascending = sorted(held)
    levels = ((amount + sum(ascending[:few])) / few for few in range(1, len(held) + 1))
    level = min(levels)
    return [max(0.0, level - each) for each in held]


def _ends(count: int, shares: Sequence[float]) -> list[int]:
    """The end of each piece of a table with so many rows, in proportion to the shares; each has at least one row.

    >>> _ends(10, [4, 4, 0, 0])
    [4, 8, 9, 10]
    """
    ends: list[int] = []
    for left, share in zip(range(len(shares) - 1, -1, -1), accumulate(shares), strict=True):
        fair = round(count * share / sum(shares))
        ends.append(min(max(fair, (ends[-1] if ends else 0) + 1), count - left))
    return ends


def _write(source: Path, targets: Sequence[Path], flow: Flow, ends: Sequence[int]) -> None:
    """Writes the steps between the ends, one graph to each target."""
    editor = GraphEditor(source, targets[0])
    editor.lift_constants()
    kinds = Kinds(editor, {name for end in ends for name in flow.crossing(end)})
    known = set[str]()
    for target, start, end in zip(targets, [0, *ends], [*ends, len(flow.steps)], strict=True):
        part = GraphEditor(source, target)
        part.lift_constants()
        narrow(part, flow, kinds, known, start, end)
        known.update(flow.made(start, end))
        part.write(LARGEST_PART)


def _cuts(
    flow: Flow, weights: Sequence[frozenset[str]], sent: dict[int, int], parts: int, limit: float
) -> _Cuts | None:
    """The best cuts; None if none keeps the limit on weights. Cuts that send more tensors must be worth it."""
    best = None
    for most in range(1, _MAX_CROSSING + 1):
        found = _best(flow, weights, [step for step, count in sent.items() if count <= most], parts, limit)
        if found is not None and (best is None or found.work < _WORTH * best.work):
            best = found
    return best


def _best(flow: Flow, weights: Sequence[frozenset[str]], cuts: Sequence[int], parts: int, limit: float) -> _Cuts | None:
    """The cuts with the least work for the slowest part; None if none keeps every part within the limit."""
    places = [0, *cuts, len(flow.steps)]
    costs = {
        (first, last): cost
        for first, start in enumerate(places)
        for last, cost in _costs(flow, weights, places, first, start, limit)
    }
    # For each number of parts, by the end of the last one: the slowest part's work and the largest part's weights.
    best: dict[int, tuple[tuple[float, float], list[int]]] = {0: ((0.0, 0.0), [0])}
    for _ in range(parts):
        following: dict[int, tuple[tuple[float, float], list[int]]] = {}
        for (first, last), (work, size) in costs.items():
            if first not in best:
                continue
            (slowest, largest), passed = best[first]
            candidate = (max(slowest, work), max(largest, size)), [*passed, last]
            if last not in following or candidate < following[last]:
                following[last] = candidate
        best = following
    if (found := best.get(len(places) - 1)) is None:
        return None
    (slowest, _), passed = found
    sizes = [costs[first, last][1] for first, last in pairwise(passed)]
    return _Cuts([places[each] for each in passed[1:-1]], slowest, sizes)


def _costs(
    flow: Flow, weights: Sequence[frozenset[str]], places: Sequence[int], first: int, start: int, limit: float
) -> list[tuple[int, tuple[float, float]]]:
    """Work and weights of the parts that begin at a place, by their end, up to the limit on weights."""
    held, costs, work = set[str](), [], 0
    for last in range(first + 1, len(places)):
        for step in range(max(start, places[last - 1]), places[last]):
            held |= weights[step]
            work += flow.work[step]
        size = sum(flow.bytes[name] for name in held)
        if size > limit:
            break
        costs.append((last, (float(work), float(size))))
    return costs


def narrow(part: GraphEditor, flow: Flow, kinds: Kinds, known: set[str], start: int, end: int) -> None:
    """Reduces a graph to one part; `known` are the outputs of earlier parts."""
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
