"""A GPU in use by an engine: memory, one stream, graphs, and the check whether the GPU is lost.

All work of an engine runs in one stream, so the contexts of all models can share their scratch memory. Memory is
allocated once, while models load, and never moves, because a graph stores addresses.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from bertserve.serving.engine.base import DeviceLost
from bertserve.serving.engine.gpu.cuda_driver import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.engine.gpu.cuda_driver import Driver
    from bertserve.serving.records import Array

log = logging.getLogger("bertserve.engine")

_RESERVE_SHARE = 0.05
"""Share of a GPU's memory that graphs leave free for allocations of libraries at run time."""


class Buffer:
    """A tensor in pinned host memory and on the GPU at `address`; neither moves."""

    def __init__(self, device: Device, dtype: Literal["int32", "float32"], size: int) -> None:
        self._device = device
        kind = np.dtype(dtype)
        count = max(1, size) * kind.itemsize
        self._item = kind.itemsize
        self._pinned = device.driver.allocate_pinned(count)
        # Never freed: while the array exists, code may write through it.
        self._host = np.frombuffer(memoryview((ctypes.c_char * count).from_address(self._pinned)), kind)
        self.address = device.allocate(count)

    def view(self, shape: tuple[int, ...]) -> Array:
        """Returns the pinned memory in a shape; `send` copies its content to the GPU."""
        return cast("Array", self._host[: math.prod(shape)].reshape(shape))

    def send(self, shape: tuple[int, ...]) -> None:
        self._device.driver.copy_in(self.address, self._pinned, math.prod(shape) * self._item, self._device.stream)

    def fetch(self, shape: tuple[int, ...]) -> None:
        self._device.driver.copy_out(self._pinned, self.address, math.prod(shape) * self._item, self._device.stream)


class Device:
    """A GPU in use by this process; all work goes through its `stream`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """Takes a GPU for the calling thread; raises CudaError if it cannot be used."""
        self.driver = driver
        self.gpu = driver.gpu(ordinal)
        self._entered = threading.local()
        self.enter()
        self.stream = driver.stream()
        self._scratch, self._scratch_size = 0, 0

    def enter(self) -> None:
        """Makes the GPU current for the calling thread too: CUDA's current context is per thread."""
        if not hasattr(self._entered, "here"):
            self.driver.use(self.gpu.ordinal)
            self._entered.here = True

    def allocate(self, size: int) -> int:
        """Returns the address of `size` new bytes on the GPU; logs the sizes if there is no room."""
        try:
            return self.driver.allocate(size)
        except CudaError as error:
            if error.out_of_memory:
                free, total = self.driver.memory()
                log.warning("out of GPU memory: %d MiB needed, %d MiB of %d free", size >> 20, free >> 20, total >> 20)
            raise

    def scratch(self, size: int) -> int:
        """Returns the address of scratch memory that all contexts share while they run, at least `size` bytes.

        Reserve it before anything runs: larger memory has another address, and the previous memory is freed.
        """
        if size > self._scratch_size:
            if self._scratch:
                self.wait()
                self.driver.free(self._scratch)
            self._scratch, self._scratch_size = self.allocate(size), size
        return self._scratch

    def wait(self) -> None:
        """Waits for the stream; raises CudaError if its work failed."""
        self.driver.wait(self.stream)

    def has_room(self, used_before: int = 0) -> bool:
        """Whether there is memory for one more graph; the last one took `used_before` bytes."""
        free, total = self.driver.memory()
        return free - used_before > _RESERVE_SHARE * total

    def capture(self, work: Callable[[], None]) -> int:
        """Captures what `work` queues as a graph; nothing of it runs."""
        self.driver.begin_capture(self.stream)
        try:
            work()
        except BaseException:
            try:
                self.driver.destroy_graph(self.driver.end_capture(self.stream))
            except CudaError as error:  # the capture failed: there is no graph to destroy
                log.info("CUDA graph capture failed: %s", error)
            raise
        return self.driver.end_capture(self.stream)

    def launch(self, graph: int) -> None:
        self.driver.launch(graph, self.stream)

    def check(self, reason: str, *, lost: bool) -> None:
        """Returns after a failure if the GPU still works.

        Args:
            reason: What failed, for the log.
            lost: Whether the GPU is known to be lost, or its memory to be full.

        Raises:
            DeviceLost: Nothing works in this process any more.
        """
        if lost:
            raise DeviceLost(reason)
        try:
            self.driver.finish()
        except CudaError as error:
            raise DeviceLost(f"{reason}; then {error}") from error
