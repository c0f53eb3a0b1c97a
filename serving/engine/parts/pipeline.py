"""A model split by layers: the first part in the engine process, each other part in a child process.

A batch passes from part to part, and the last part answers the waiting lane, so every part may work on another batch.
If the parts share an embedding table, the batch first passes through all other parts, which look up the tokens that
they hold. Each part does so in parallel with the batch that it computes. The engine process owns the others: it ends
when one of them ends, and they end with it.
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
        """Starts the processes and loads every part.

        Args:
            model: Model to load.
            threads: Cores that all parts share.
            lanes: Maximum number of batches in flight.
            nice: Nice value of the other processes, relative to this one.
            places: GPU of each part; empty to run on CPU cores.
            open_first: Opens the part of this process, with a number of threads.

        Raises:
            BundleError: A part cannot be served.
        """
        parts, lookups = chain.stages(model)
        cores = shares(threads, len(parts))
        arenas = [os.memfd_create(f"{model.name} lane {lane}") for lane in range(lanes)]
        with contextlib.ExitStack() as unused:
            answers = [self._pair(unused) for _ in range(lanes)]
            theirs = [end for _, end in answers]
            # A batch passes through the lookups, if any, and then through the parts.
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
        # Names of the tensors that the other processes read, whether from the batch or from another part.
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
        """Returns the entry of a line of `count` processes, and the inbox and outboxes of each process."""
        pairs = [self._pair(unused) for _ in range(count)]
        for outbox, _ in pairs[1:]:
            unused.callback(outbox.close)
        goals = [*([outbox] for outbox, _ in pairs[1:]), answers]
        return pairs[0][0], [[inbox, *goal] for (_, inbox), goal in zip(pairs, goals, strict=True)]


class Lane:
    """A lane's path through the parts."""

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
        """Returns the model's outputs for a batch's tensors; raises EngineFault."""
        step = self._with(tensors, Step(self._lane, 0, []))
        for lookup in self._lookups:
            step = self._sent(lookup, step)
            tensors |= self._arena.get(step.tensors)
        # The first part runs one batch at a time, as every part does.
        with self._turn:
            answered = self._first.run(tensors)
        step = self._sent(self._outbox, self._with(answered, step))
        views = self._arena.get(step.tensors)
        # Copies, because the next batch overwrites the arena.
        return [np.array(views[name]) for name in self._outputs]

    def _with(self, tensors: ort.Tensors, step: Step) -> Step:
        """Returns the step extended by those of the tensors that other processes read."""
        shared = ((name, array) for name, array in tensors.items() if name in self._wanted)
        placed, at = self._arena.put(shared, step.end)
        return Step(self._lane, at, [*step.tensors, *placed])

    def _sent(self, outbox: socket.socket, step: Step) -> Step:
        """Sends a step through other processes; returns the result, or raises EngineFault if one of them failed."""
        try:
            send(outbox, step)
            step = receive(self._answers, Step)
        except (OSError, EOFError):
            end("a part closed its socket")
        if step.fault:
            raise EngineFault(step.fault)
        return step


def serve(part: chain.Part, inbox: socket.socket, outboxes: Sequence[socket.socket], arenas: Sequence[Arena]) -> None:
    """Runs each incoming batch; raises EOFError or OSError when the previous or next part has ended.

    Args:
        part: Part to run.
        inbox: Socket from the previous part.
        outboxes: Socket to the next part; for the last part, a socket to each lane.
        arenas: Arena of each lane.
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
    """Loads a model as `ort.load` does; a split model is loaded once for all lanes, with child processes."""
    if model.split_by is None:
        return ort.load(model, threads)
    if model.split_by == "tensors":
        return [Ranks(model, threads[0], nice)]
    return Pipeline(model, threads[0], len(threads), nice).lanes
