"""A model cut by its layers: the first part in the engine process, each other one in a process that it starts.

A batch goes from part to part, and the last one answers the lane that waits for it; so every part may work on another
batch. The engine process owns the others: it ends when one of them does, and they end with it.
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
from serving.engine.parts.processes import Order, end, loaded, shares, start
from serving.errors import EngineFault
from serving.records import ModelSpec  # noqa: TC001  read at run time by msgspec

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from serving.records import Array, Batch

log = logging.getLogger("bertserve.engine")


class Pipeline:
    """The processes of one model."""

    def __init__(self, model: ModelSpec, threads: int, lanes: int, nice: int) -> None:
        """Starts them and loads every part; raises BundleError where one cannot be served."""
        first, *others = chain.files(model)
        own, *theirs = shares(threads, 1 + len(others))
        arenas = [os.memfd_create(f"{model.name} lane {lane}") for lane in range(lanes)]
        with contextlib.ExitStack() as unused:
            answers = [self._pair(unused) for _ in range(lanes)]
            inbox, self._next = pair()
            controls = []
            for number, _ in enumerate(others, 2):
                following, outbox = pair()
                is_last = number == 1 + len(others)
                outboxes = [theirs_end for _, theirs_end in answers] if is_last else [outbox]
                name = f"part {number} of {1 + len(others)} of {model.name}"
                controls.append((name, start(name, "lanes" if is_last else "next", [inbox, *outboxes], arenas)))
                inbox.close()
                outbox.close()
                inbox = following
            inbox.close()
        for (_, control), part, cores in zip(controls, others, theirs, strict=True):
            send(control, Order([part], cores, nice))
        self._first = ort.open_part(first, own)
        interfaces = [chain.interface(self._first), *(each for control in controls for each in loaded(*control))]
        chain.check(model, interfaces)
        # What of a batch's own tensors the other parts read; what parts answer is looked for by name.
        wanted = {name for part in interfaces[1:] for name, _ in part.inputs}
        turn = threading.Lock()
        self.lanes = [
            _Lane(lane, model, self._first, turn, Arena(arena), self._next, ours, wanted)
            for lane, (arena, (ours, _)) in enumerate(zip(arenas, answers, strict=True))
        ]

    @staticmethod
    def _pair(unused: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair()
        unused.callback(theirs.close)
        return ours, theirs


class _Lane:
    """A lane's way through the parts."""

    def __init__(
        self,
        lane: int,
        model: ModelSpec,
        first: ort.GraphPart,
        turn: threading.Lock,
        arena: Arena,
        outbox: socket.socket,
        answers: socket.socket,
        wanted: set[str],
    ) -> None:
        self._lane = lane
        self._padder = Padder(model)
        self._outputs = [spec.name for spec in model.outputs]
        self._first, self._turn, self._arena = first, turn, arena
        self._outbox, self._answers, self._wanted = outbox, answers, wanted

    def run(self, batch: Batch) -> list[Array]:
        tensors: ort.Tensors = dict(self._padder.tensors(batch))
        # The first part has one batch at a time, as every part has.
        with self._turn:
            answered = self._first.run(tensors)
        shared = ((name, array) for name, array in (tensors | answered).items() if name in self._wanted)
        placed, at = self._arena.put(shared, 0)
        try:
            send(self._outbox, Step(self._lane, at, placed))
            step = receive(self._answers, Step)
        except (OSError, EOFError):
            end("a part has closed its socket")
        if step.fault:
            raise EngineFault(step.fault)
        views = self._arena.get(step.tensors)
        # Copies, since the next batch is written over them.
        return [np.array(views[name]) for name in self._outputs]


def serve(
    part: ort.GraphPart, inbox: socket.socket, outboxes: Sequence[socket.socket], arenas: Sequence[Arena]
) -> None:
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
