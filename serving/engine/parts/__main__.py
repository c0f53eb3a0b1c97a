"""The process of a part or a rank: loads its graphs, and runs what comes until the sockets around it close."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1
"""Of `prctl`: which signal this process gets when its parent ends (linux/prctl.h)."""


def main(kind: str, descriptors: list[int], arenas: list[int]) -> None:
    """Serves until the processes around it end; does not return.

    Args:
        kind: Where answers go: to the `next` part, to the `lanes`, or of a `rank` to the other ones.
        descriptors: Of the control socket, of the one that batches come by, and of those for answers.
        arenas: Of shared memory.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    control, inbox, *others = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    # Slow to import, and the parent may end meanwhile.
    from serving.engine.cpu import ort  # noqa: PLC0415
    from serving.engine.parts import pipeline, ranks  # noqa: PLC0415
    from serving.engine.parts.chain import interface  # noqa: PLC0415
    from serving.engine.parts.exchange import Arena, receive, send  # noqa: PLC0415
    from serving.engine.parts.processes import Loaded, Order  # noqa: PLC0415
    from serving.errors import BundleError  # noqa: PLC0415

    try:
        order = receive(control, Order)
        os.nice(order.nice)
        try:
            graphs = [ort.open_part(graph, order.threads) for graph in order.graphs]
        except BundleError as error:
            send(control, Loaded([], str(error)))
            receive(control, Order)  # until the engine process, which tells why, has ended
            return
        send(control, Loaded([interface(graph) for graph in graphs]))
        shared = [Arena(arena) for arena in arenas]
        if kind == "rank":
            ranks.serve(ranks.Rank(order.rank, graphs, others, shared[0]), inbox, shared[0])
        pipeline.serve(graphs[0], inbox, others, shared)
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *([int(word) for word in words.split(",")] for words in sys.argv[2:]))
