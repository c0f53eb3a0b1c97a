"""What the processes of a server share from its start: their number, and the memory of their buffer budget."""

from __future__ import annotations

import math
import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertserve.serving.engine.base import EngineLoad

_TEXT_US = 130
"""CPU time of a front for a text of about 32 tokens, in microseconds (docs/benchmarks/fronts.md)."""

_TOKENS = 32
_UNMEASURED_GPU = 2
"""Fronts before a GPU whose speed is not known yet."""


def automatic(load: EngineLoad, cpus: int) -> int:
    """The number of fronts that feed an engine: by the costs that an earlier start has measured on this node.

    One CPU is left for the core process.
    """
    rates = [
        point.batch / point.us * 1e6
        for points in load.costs
        for point in points
        if point.kind == "wide" and point.tokens >= _TOKENS
    ]
    if not rates:
        return min(_UNMEASURED_GPU, max(1, cpus - 1)) if load.gpus else 1
    wanted = math.ceil(max(rates) * max(1, len(load.gpus)) * _TEXT_US / 1e6)
    return max(1, min(wanted, cpus - 1))


class SharedSlots:
    """Memory for an integer of each process. It needs no name, and ends with the last process.

    Attributes:
        descriptor: Passed to processes that open it.
        values: The integers.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.values = memoryview(mmap.mmap(descriptor, 0)).cast("q")

    @classmethod
    def create(cls, processes: int) -> SharedSlots:
        descriptor = os.memfd_create("bertserve")
        os.ftruncate(descriptor, 8 * processes)
        return cls(descriptor)
