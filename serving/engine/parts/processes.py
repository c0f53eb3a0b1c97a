"""The child processes that an engine process starts for a split model: their start and their end."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec

from serving.children import module_command
from serving.engine.parts import chain  # noqa: TC001  read at run time by msgspec
from serving.engine.parts.exchange import pair, receive
from serving.engine.specs import ModelSpec  # noqa: TC001  read at run time by msgspec
from serving.errors import BundleError

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

log = logging.getLogger("bertserve.engine")

PART_ENDED = 71
"""Exit status of an engine process that lost a part; EX_OSERR of sysexits.h."""


class Place(msgspec.Struct, frozen=True):
    """The GPU that a part runs on.

    Attributes:
        gpu: Index among the GPUs that a process may use.
        max_batch_tokens: Padded tokens of the largest batch.
    """

    engine: Literal["ort-cuda", "tensorrt"]
    gpu: int
    max_batch_tokens: int


class Order(msgspec.Struct, frozen=True):
    """The load command for a child process.

    Attributes:
        graphs: Its part and, if needed, its lookup; or the segments of its rank. Each is a model of its own.
        threads: Cores to use, for graphs that run on CPU cores.
        nice: Nice value, relative to the engine process.
        rank: Index of the rank, for a model split by tensors.
        place: GPU of the part; None if it runs on CPU cores.
    """

    graphs: list[ModelSpec]
    threads: int
    nice: int
    rank: int = 0
    place: Place | None = None


class Loaded(msgspec.Struct, frozen=True):
    """The reply to an order.

    Attributes:
        interfaces: Inputs and outputs of each graph.
        refused: Why the graphs cannot be loaded; empty if they were.
    """

    interfaces: list[chain.Interface]
    refused: str = ""


def shares(threads: int, parts: int) -> list[int]:
    """Returns the number of cores for each part.

    >>> shares(2, 2), shares(8, 3), shares(1, 2)
    ([1, 1], [2, 3, 3], [1, 1])
    """
    ends = [threads * number // parts for number in range(parts + 1)]
    return [max(1, end - start) for start, end in pairwise(ends)]


def start(
    name: str, kind: Literal["part", "rank"], ways: Sequence[Sequence[socket.socket]], arenas: Sequence[int]
) -> socket.socket:
    """Starts a process whose failure ends this one; returns its control socket."""
    control, theirs = pair()
    with theirs:
        groups = [[theirs.fileno()], arenas, *([end.fileno() for end in way] for way in ways)]
        words = [kind, *(",".join(map(str, group)) for group in groups)]
        inherited = {descriptor for group in groups for descriptor in group}
        process = subprocess.Popen(
            module_command("serving.engine.parts", *words), pass_fds=inherited, stdin=subprocess.DEVNULL
        )
    threading.Thread(target=_watch, args=(name, process), daemon=True).start()
    return control


def loaded(name: str, control: socket.socket) -> list[chain.Interface]:
    """Waits for a process to load, and returns its interfaces; raises BundleError if it must not be served."""
    try:
        answer = receive(control, Loaded)
    except EOFError:
        end(f"{name} exited while loading")
    if answer.refused:
        raise BundleError(answer.refused)
    return answer.interfaces


def end(why: str) -> NoReturn:
    """Ends this process: the remaining parts cannot answer, and the supervisor restarts all of them."""
    log.error("%s", why)
    for handler in logging.root.handlers:
        handler.flush()
    os._exit(PART_ENDED)


def _watch(name: str, process: subprocess.Popen[bytes]) -> None:
    # A process whose sockets were closed ends with status 0: this process has released its model, or another part ended
    # before it.
    if status := process.wait():
        end(f"{name} exited with status {status}")
