"""The parts of a split model: how they fit together, and how to run all of them in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from serving.engine.base import check_interface
from serving.engine.batches import Padder
from serving.engine.cpu import ort
from serving.engine.specs import PARTIAL
from serving.errors import BundleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from serving.engine.base import Batch
    from serving.engine.cpu.backend import LaneModel
    from serving.engine.cpu.ort import Tensors
    from serving.engine.specs import ModelSpec
    from serving.records import Array


class Interface(msgspec.Struct, frozen=True):
    """The inputs and outputs of a part.

    Attributes:
        inputs: Name and type of each input, in ONNX Runtime's terms.
        outputs: Name, type and shape of each output; -1 is a dynamic dimension.
    """

    inputs: list[tuple[str, str]]
    outputs: list[tuple[str, str, tuple[int, ...]]]


class Part(Protocol):
    """The interface of one graph of a split model; see `GraphPart`."""

    inputs: list[tuple[str, str]]
    outputs: list[tuple[str, str, tuple[int, ...]]]

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> Tensors:
        """Returns the outputs for its own inputs among these tensors; raises EngineFault on failure."""


def interface(part: Part) -> Interface:
    return Interface(part.inputs, part.outputs)


def check(model: ModelSpec, parts: Sequence[Interface]) -> None:
    """Compares the parts with each other and with the manifest; raises BundleError if they do not match."""
    known = dict.fromkeys(model.inputs, "tensor(int32)")
    for number, part in enumerate(parts, 1):
        for name, kind in part.inputs:
            if known.get(name) != kind:
                where = f"{model.path}: part {number} of {len(parts)}"
                raise BundleError(f"{where} reads {name} as {kind}, which no earlier part outputs")
        known |= {name.removesuffix(PARTIAL): kind for name, kind, _ in part.outputs}
    outputs = [(name, ort.TYPES.get(kind), shape) for name, kind, shape in parts[-1].outputs]
    check_interface(model, [(name, "int32") for name in model.inputs], outputs)


def files(model: ModelSpec) -> list[ModelSpec]:
    """Returns each file of a model as a model of its own."""
    own = msgspec.structs.replace(model, parts=(), split_by=None, ranks=1, lookups=False)
    return [
        own,
        *(
            msgspec.structs.replace(own, path=part.path, sha256=part.sha256, data_sha256=part.data_sha256)
            for part in model.parts
        ),
    ]


def stages(model: ModelSpec) -> tuple[list[ModelSpec], list[ModelSpec]]:
    """Returns a model's parts by layers, and the lookups of all parts but the first, which run before them."""
    graphs = files(model)
    return graphs[: model.stages], graphs[model.stages :]


def ranks(model: ModelSpec) -> list[list[ModelSpec]]:
    graphs = files(model)
    segments = len(graphs) // model.ranks
    return [graphs[segments * rank :][:segments] for rank in range(model.ranks)]


class Chain:
    """A lane's model whose parts run one after another in this process, for tools that prove it."""

    def __init__(
        self,
        model: ModelSpec,
        threads: int,
        open_part: Callable[[ModelSpec, int], Part] = ort.open_part,
    ) -> None:
        """Loads every part with this many threads; raises BundleError if one cannot be loaded or they do not match."""
        parts, lookups = stages(model)
        self._parts: list[Part] = [ort.open_part(lookup, threads) for lookup in lookups]
        self._parts += [open_part(part, threads) for part in parts]
        check(model, [interface(part) for part in self._parts])
        self._padder = Padder(model)
        self._outputs = [spec.name for spec in model.outputs]

    def run(self, batch: Batch) -> list[Array]:
        return self.answers(dict(self._padder.tensors(batch)))

    def answers(self, tensors: Tensors) -> list[Array]:
        for part in self._parts:
            tensors |= part.run(tensors)
        return [tensors[name] for name in self._outputs]


class RankChain:
    """A lane's model whose ranks run one after another in this process."""

    def __init__(self, model: ModelSpec, threads: int) -> None:
        """Loads every segment; raises BundleError if one cannot be loaded or they do not match."""
        self._ranks = [[ort.open_part(segment, threads) for segment in segments] for segments in ranks(model)]
        for segments in self._ranks:
            check(model, [interface(segment) for segment in segments])
        self._padder = Padder(model)
        self._outputs = [spec.name for spec in model.outputs]

    def run(self, batch: Batch) -> list[Array]:
        given = self._padder.tensors(batch)
        held: list[Tensors] = [dict(given) for _ in self._ranks]
        for segments in zip(*self._ranks, strict=True):
            made = [segment.run(tensors) for segment, tensors in zip(segments, held, strict=True)]
            partial = {name for name in made[0] if name.endswith(PARTIAL)}
            sums = {
                name.removesuffix(PARTIAL): sum(each[name] for each in made[1:]) + made[0][name] for name in partial
            }
            for tensors, own in zip(held, made, strict=True):
                tensors.update({name: own[name] for name in own.keys() - partial} | sums)
        return [held[0][name] for name in self._outputs]


def load(model: ModelSpec, threads: Sequence[int]) -> Sequence[LaneModel]:
    """Loads a model as `ort.load` does; a split model runs in this process, once for all lanes, which take turns."""
    if model.split_by is None:
        return ort.load(model, threads)
    loaded = RankChain(model, threads[0]) if model.split_by == "tensors" else Chain(model, threads[0])
    return [loaded] * len(threads)
