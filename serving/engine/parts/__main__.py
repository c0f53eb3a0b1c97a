"""The process of a part or a rank: loads its graphs, and runs batches until its sockets close."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from serving.children import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.parts.chain import Part
    from serving.engine.parts.exchange import Arena


def main(kind: str, controls: list[int], arenas: list[int], *descriptors: list[int]) -> None:
    """Serves until the neighboring processes end; does not return.

    Args:
        kind: Either `part`, with or without a second graph for lookups in an embedding table, or `rank`.
        controls: Descriptor of the control socket, on which the order arrives.
        arenas: Descriptors of shared memory.
        descriptors: Socket descriptors of each graph of a part: the inbox, then the outboxes. For a rank, the inbox,
            then its peers.
    """
    end_with_parent()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    # Two groups may contain the same socket, which must have one owner.
    sockets = {each: socket.socket(fileno=each) for each in {*controls, *(each for way in descriptors for each in way)}}
    (control,), *ways = ([sockets[each] for each in way] for way in (controls, *descriptors))
    # These imports are slow, and the parent may end meanwhile.
    from serving.engine.cpu import ort  # noqa: PLC0415
    from serving.engine.parts import ranks  # noqa: PLC0415
    from serving.engine.parts.chain import interface  # noqa: PLC0415
    from serving.engine.parts.exchange import Arena, receive, send  # noqa: PLC0415
    from serving.engine.parts.processes import Loaded, Order  # noqa: PLC0415
    from serving.errors import BundleError  # noqa: PLC0415

    try:
        order = receive(control, Order)
        os.nice(order.nice)
        shared = [Arena(arena) for arena in arenas]
        try:
            # A lookup runs on a core beside a part, and has little to do.
            graphs: list[Part] = [
                ort.open_part(graph, order.threads if kind == "rank" or number == 0 else 1)
                for number, graph in enumerate(order.graphs)
                if number or order.place is None
            ]
            if order.place is not None:
                from serving.engine.parts import devices  # noqa: PLC0415  needs the libraries of a GPU

                graphs.insert(0, devices.open_part(order.graphs[0], order.place))
        except BundleError as error:
            send(control, Loaded([], str(error)))
            receive(control, Order)  # waits for the end of the engine process, which reports the reason
            return
        send(control, Loaded([interface(graph) for graph in graphs]))
        if kind == "rank":
            inbox, *others = ways[0]
            ranks.serve(ranks.Rank(order.rank, graphs, others, shared[0]), inbox, shared[0])
        threading.excepthook = _end
        for lookup, way in zip(graphs[1:], ways[1:], strict=True):
            threading.Thread(target=_serve, args=(lookup, way, shared), daemon=True).start()
    except (EOFError, OSError):
        os._exit(0)
    _serve(graphs[0], ways[0], shared)


def _end(failed: threading.ExceptHookArgs) -> None:
    """Ends the process: one that no longer serves its second graph must not go on with the first."""
    sys.__excepthook__(failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
    os._exit(1)


def _serve(part: Part, way: Sequence[socket.socket], arenas: Sequence[Arena]) -> None:
    from serving.engine.parts import pipeline  # noqa: PLC0415  as above

    inbox, *outboxes = way
    try:
        pipeline.serve(part, inbox, outboxes, arenas)
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *([int(word) for word in words.split(",")] for words in sys.argv[2:]))
