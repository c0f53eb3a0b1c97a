"""The processes that an engine process starts for the parts of a model: how they begin, and how all of them end."""

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
"""Exit status of an engine process that has lost a part; EX_OSERR of sysexits.h."""


class Place(msgspec.Struct, frozen=True):
    """The GPU that a part runs on.

    Attributes:
        gpu: Its index among those that a process may use.
        max_batch_tokens: Padded tokens of the largest batch.
    """

    engine: Literal["ort-cuda", "tensorrt"]
    gpu: int
    max_batch_tokens: int


class Order(msgspec.Struct, frozen=True):
    """What a process loads.

    Attributes:
        graphs: Its part and perhaps what looks words up, or the segments of its rank, each as a model of its own.
        threads: Cores to use, for what runs on cores.
        nice: How much less urgent than the engine process it is.
        rank: Which one it is, where all of them work on one batch.
        place: Of the part; None where it runs on cores.
    """

    graphs: list[ModelSpec]
    threads: int
    nice: int
    rank: int = 0
    place: Place | None = None


class Loaded(msgspec.Struct, frozen=True):
    """The answer to an order.

    Attributes:
        interfaces: What each graph takes and answers.
        refused: Why they cannot be loaded; empty where they were.
    """

    interfaces: list[chain.Interface]
    refused: str = ""


def shares(threads: int, parts: int) -> list[int]:
    """How many cores each part has.

    >>> shares(2, 2), shares(8, 3), shares(1, 2)
    ([1, 1], [2, 3, 3], [1, 1])
    """
    ends = [threads * number // parts for number in range(parts + 1)]
    return [max(1, end - start) for start, end in pairwise(ends)]


def start(
    name: str, kind: Literal["part", "rank"], ways: Sequence[Sequence[socket.socket]], arenas: Sequence[int]
) -> socket.socket:
    """Starts a process, whose failure will end this one; returns the socket of its order."""
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
    """What a process has loaded; raises BundleError where it must not be served."""
    try:
        answer = receive(control, Loaded)
    except EOFError:
        end(f"{name} ended while it was loading")
    if answer.refused:
        raise BundleError(answer.refused)
    return answer.interfaces


def end(why: str) -> NoReturn:
    """Ends this process: what is left of a model answers nothing, and its supervisor starts all of it again."""
    log.error("%s", why)
    for handler in logging.root.handlers:
        handler.flush()
    os._exit(PART_ENDED)


def _watch(name: str, process: subprocess.Popen[bytes]) -> None:
    # One whose sockets were closed has ended well: this process has let its model go, or another part ended before it.
    if status := process.wait():
        end(f"{name} ended with status {status}")
