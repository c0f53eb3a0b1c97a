"""A model split by tensors: the first rank in the engine process, each other rank in a child process.

All ranks work on the same batch. Each rank runs its segments one after another. Between two segments it writes its
partial sums to shared memory, waits for the other ranks, and adds up the partial sums of all ranks, in the same order
everywhere.
"""

from __future__ import annotations

import os
from itertools import combinations
from typing import TYPE_CHECKING

from serving.engine.batches import Padder
from serving.engine.cpu import ort
from serving.engine.parts import chain
from serving.engine.parts.exchange import ALIGNED, Arena, Placed, Step, pair, receive, send
from serving.engine.parts.processes import Order, end, loaded, shares, start
from serving.engine.specs import PARTIAL
from serving.errors import EngineFault

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from serving.engine.base import Batch
    from serving.engine.specs import ModelSpec
    from serving.records import Array


class Ranks:
    """A lane's model, and the processes of its ranks. A rank that fails a batch ends all of them."""

    def __init__(self, model: ModelSpec, threads: int, nice: int) -> None:
        """Starts the processes and loads every rank; raises BundleError if one cannot be served."""
        graphs, cores = chain.ranks(model), shares(threads, model.ranks)
        meshed: list[list[socket.socket]] = [[] for _ in graphs]
        for one, other in combinations(range(len(graphs)), 2):
            for rank, socket_end in zip((one, other), pair(), strict=True):
                meshed[rank].append(socket_end)
        descriptor = os.memfd_create(model.name)
        controls, self._outboxes = [], []
        for rank in range(1, len(graphs)):
            outbox, inbox = pair()
            name = f"rank {rank + 1} of {len(graphs)} of {model.name}"
            controls.append((name, start(name, "rank", [[inbox, *meshed[rank]]], [descriptor])))
            self._outboxes.append(outbox)
            for theirs in (inbox, *meshed[rank]):
                theirs.close()
        for rank, (_, control) in enumerate(controls, 1):
            send(control, Order(graphs[rank], cores[rank], nice, rank))
        own = [ort.open_part(graph, cores[0]) for graph in graphs[0]]
        chain.check(model, [chain.interface(segment) for segment in own])
        for name, control in controls:
            chain.check(model, loaded(name, control))
        self._arena = Arena(descriptor)
        self._rank = Rank(0, own, meshed[0], self._arena)
        self._padder = Padder(model)
        self._outputs = [spec.name for spec in model.outputs]

    def run(self, batch: Batch) -> list[Array]:
        tensors: ort.Tensors = dict(self._padder.tensors(batch))
        placed, at = self._arena.put(tensors.items(), 0)

        def begin(reserved: int) -> None:
            self._arena.reserve(at + reserved)
            for outbox in self._outboxes:
                send(outbox, Step(0, at, placed))

        try:
            answered = self._rank.run(tensors, at, begin)
        except (OSError, EOFError, EngineFault) as error:
            end(f"a batch failed in a rank: {error}")
        return [answered[name] for name in self._outputs]


class Rank:
    """The work of one rank on a batch."""

    def __init__(
        self, number: int, segments: Sequence[chain.Part], peers: Sequence[socket.socket], arena: Arena
    ) -> None:
        self._number, self._segments, self._peers, self._arena = number, segments, peers, arena

    def run(self, tensors: ort.Tensors, at: int, begin: Callable[[int], None] = lambda _reserved: None) -> ort.Tensors:
        """Returns the final tensors of a batch; only those of the first rank include the outputs.

        Args:
            tensors: The batch.
            at: Offset in the arena from which partial sums may be stored.
            begin: Called with their size in bytes, before any is written.

        Raises:
            EngineFault: A segment cannot compute it.
            EOFError: Another rank has ended.
        """
        turn = 0
        for segment in self._segments if self._number == 0 else self._segments[:-1]:
            made = segment.run(tensors)
            for name in [name for name in made if name.endswith(PARTIAL)]:
                partial = made.pop(name)
                # Double buffering: no rank writes where another one may still read.
                area = (1 + len(self._peers)) * _aligned(partial.nbytes)
                if turn == 0:
                    begin(2 * area)
                tensors[name.removesuffix(PARTIAL)] = self._sum(partial, at + turn % 2 * area)
                turn += 1
            tensors |= made
        self._meet()
        return tensors

    def _sum(self, partial: NDArray[Any], at: int) -> NDArray[Any]:
        size = _aligned(partial.nbytes)
        self._arena.put([("", partial)], at + self._number * size)
        self._meet()
        ranks = range(1 + len(self._peers))
        places = [Placed(str(rank), partial.dtype.str, partial.shape, at + rank * size) for rank in ranks]
        views = list(self._arena.get(places).values())
        total: NDArray[Any] = views[0] + views[1]
        for view in views[2:]:
            total += view
        return total

    def _meet(self) -> None:
        for peer in self._peers:
            peer.sendall(b".")
        for peer in self._peers:
            if not peer.recv(1):
                raise EOFError


def serve(rank: Rank, inbox: socket.socket, arena: Arena) -> None:
    """Runs every batch that the first rank starts; raises EOFError or OSError when another rank has ended."""
    while True:
        step = receive(inbox, Step)
        rank.run(dict(arena.get(step.tensors)), step.end)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
