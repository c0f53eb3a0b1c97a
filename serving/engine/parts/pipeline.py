"""A model cut by its layers: the first part in the engine process, each other one in a process that it starts.

A batch goes from part to part, and the last one answers the lane that waits for it; so every part may work on another
batch. Where the parts share a table, the batch goes through all other ones before, which look up the words that they
have: each does so beside the batch that it computes. The engine process owns the others: it ends when one of them does,
and they end with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from serving.engine.batches import Padder
from serving.engine.cpu import ort
from serving.engine.parts import chain
from serving.engine.parts.exchange import Arena, Step, pair, receive, send
from serving.engine.parts.processes import Order, Place, end, loaded, shares, start
from serving.engine.parts.ranks import Ranks
from serving.engine.specs import ModelSpec  # noqa: TC001  read at run time by msgspec
from serving.errors import EngineFault

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from serving.engine.base import Batch
    from serving.engine.cpu.backend import LaneModel
    from serving.records import Array

log = logging.getLogger("bertserve.engine")


class Pipeline:
    """The processes of one model."""

    def __init__(
        self,
        model: ModelSpec,
        threads: int,
        lanes: int,
        nice: int = 0,
        places: Sequence[Place] = (),
        open_first: Callable[[ModelSpec, int], chain.Part] = ort.open_part,
    ) -> None:
        """Starts them and loads every part.

        Args:
            model: What to load.
            threads: Cores that all parts share.
            lanes: How many batches may be under way.
            nice: How much less urgent than this process the others are.
            places: The GPU of each part; empty where they run on cores.
            open_first: Opens the part of this process, on so many cores.

        Raises:
            BundleError: A part cannot be served.
        """
        parts, lookups = chain.stages(model)
        cores = shares(threads, len(parts))
        arenas = [os.memfd_create(f"{model.name} lane {lane}") for lane in range(lanes)]
        with contextlib.ExitStack() as unused:
            answers = [self._pair(unused) for _ in range(lanes)]
            theirs = [end for _, end in answers]
            # A batch goes through the lookups, where there are any, and then through the parts.
            lines = [self._line(unused, len(line), theirs) for line in (lookups, parts[1:]) if line]
            controls = []
            for number in range(2, len(parts) + 1):
                name = f"part {number} of {len(parts)} of {model.name}"
                own = [ways[number - 2] for _, ways in reversed(lines)]
                controls.append((name, start(name, "part", own, arenas)))
        for number, (_, control) in enumerate(controls, 1):
            graphs, place = [parts[number], *lookups[number - 1 : number]], places[number] if places else None
            send(control, Order(graphs, cores[number], nice, place=place))
        self._first = open_first(parts[0], cores[0])
        found = [loaded(*control) for control in controls]
        others, shared = [own[0] for own in found], [lookup for _, *own in found for lookup in own]
        chain.check(model, [*shared, chain.interface(self._first), *others])
        # What of a batch's own tensors the other processes read; what parts answer is looked for by name.
        wanted = {name for part in (*shared, *others) for name, _ in part.inputs}
        outboxes, turn = [outbox for outbox, _ in lines], threading.Lock()
        self.lanes = [
            Lane(lane, model, self._first, turn, Arena(arena), outboxes, ours, wanted)
            for lane, (arena, (ours, _)) in enumerate(zip(arenas, answers, strict=True))
        ]

    @staticmethod
    def _pair(unused: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        unused.callback(theirs.close)
        return ours, theirs

    def _line(
        self, unused: contextlib.ExitStack, count: int, answers: list[socket.socket]
    ) -> tuple[socket.socket, list[list[socket.socket]]]:
        """Where a batch enters a line of so many, and for each where it comes from and where it goes to."""
        pairs = [self._pair(unused) for _ in range(count)]
        for outbox, _ in pairs[1:]:
            unused.callback(outbox.close)
        goals = [*([outbox] for outbox, _ in pairs[1:]), answers]
        return pairs[0][0], [[inbox, *goal] for (_, inbox), goal in zip(pairs, goals, strict=True)]


class Lane:
    """A lane's way through the parts."""

    def __init__(
        self,
        lane: int,
        model: ModelSpec,
        first: chain.Part,
        turn: threading.Lock,
        arena: Arena,
        outboxes: Sequence[socket.socket],
        answers: socket.socket,
        wanted: set[str],
    ) -> None:
        self._lane = lane
        self._padder = Padder(model)
        self._outputs = [spec.name for spec in model.outputs]
        self._first, self._turn, self._arena = first, turn, arena
        *self._lookups, self._outbox = outboxes
        self._answers, self._wanted = answers, wanted

    def run(self, batch: Batch) -> list[Array]:
        return self.answers(dict(self._padder.tensors(batch)))

    def answers(self, tensors: ort.Tensors) -> list[Array]:
        """What the model answers to a batch's tensors; raises EngineFault."""
        step = self._with(tensors, Step(self._lane, 0, []))
        for lookup in self._lookups:
            step = self._sent(lookup, step)
            tensors |= self._arena.get(step.tensors)
        # The first part has one batch at a time, as every part has.
        with self._turn:
            answered = self._first.run(tensors)
        step = self._sent(self._outbox, self._with(answered, step))
        views = self._arena.get(step.tensors)
        # Copies, since the next batch is written over them.
        return [np.array(views[name]) for name in self._outputs]

    def _with(self, tensors: ort.Tensors, step: Step) -> Step:
        """A step to which what other processes read of some tensors is added."""
        shared = ((name, array) for name, array in tensors.items() if name in self._wanted)
        placed, at = self._arena.put(shared, step.end)
        return Step(self._lane, at, [*step.tensors, *placed])

    def _sent(self, outbox: socket.socket, step: Step) -> Step:
        """What comes of a step that goes through other processes; raises EngineFault where one cannot compute it."""
        try:
            send(outbox, step)
            step = receive(self._answers, Step)
        except (OSError, EOFError):
            end("a part has closed its socket")
        if step.fault:
            raise EngineFault(step.fault)
        return step


def serve(part: chain.Part, inbox: socket.socket, outboxes: Sequence[socket.socket], arenas: Sequence[Arena]) -> None:
    """Runs each batch that comes; raises EOFError or OSError when the part before or behind has ended.

    Args:
        part: What to run.
        inbox: Of the part before.
        outboxes: Of the next part or, of the last one, of each lane.
        arenas: Of each lane.
    """
    while True:
        step = receive(inbox, Step)
        if not step.fault:
            arena = arenas[step.lane]
            try:
                placed, at = arena.put(part.run(arena.get(step.tensors)).items(), step.end)
                step = Step(step.lane, at, [*step.tensors, *placed])
            except EngineFault as fault:
                step = Step(step.lane, 0, [], fault.message)
        send(outboxes[step.lane % len(outboxes)], step)


def load(model: ModelSpec, threads: Sequence[int], nice: int = 0) -> Sequence[LaneModel]:
    """As `ort.load`; a model in parts is loaded once for all lanes, with processes for its parts."""
    if model.split_by is None:
        return ort.load(model, threads)
    if model.split_by == "tensors":
        return [Ranks(model, threads[0], nice)]
    return Pipeline(model, threads[0], len(threads), nice).lanes
