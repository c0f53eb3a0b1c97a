"""A CUDA driver without a GPU, behind the very functions of NVIDIA's Python bindings that the server calls.

A GPU's memory is this machine's, at real addresses; what a stream is given is done when somebody waits for it, and
not before; a capture writes down instead of doing; an error that is sticky stays. So a missing wait, an address that
moved under a graph or a thread without a context shows as it would on a GPU. A test compares the signatures here
with those of the real bindings.

`SIMULATED_GPU` in the environment describes the machine, as JSON: `gpus` (`name`, `capability`, `memory`), `driver`
(CUDA's version, as 13000), `init` (what cuInit answers), `fault` (a file: while it is there its content is done to
the next wait: a number is an error, `hang` never comes back), `free` (a file: while it is there its content is the free
memory), `missing` (modules of TensorRT that are not installed).
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import threading
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class CUresult(IntEnum):
    """The statuses that are simulated, with the driver's numbers and names."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ECC_UNCORRECTABLE = 214
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901


OK = CUresult.CUDA_SUCCESS
STICKY = frozenset({214, 700, 719})


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUstreamCaptureMode(IntEnum):
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class CUuuid(NamedTuple):
    bytes: bytes


class Handle(int):
    """What the bindings answer instead of an integer: it must be made one."""


class Stream:
    """What waits to be done, in order."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.captured: list[Callable[[], None]] | None = None

    def give(self, work: Callable[[], None]) -> None:
        """Queues work, or writes it down."""
        (self.queue if self.captured is None else self.captured).append(work)


class Machine:
    """The machine: GPUs, memory, streams and graphs.

    Attributes:
        said: Its description.
        calls: Every function that was called, in order.
        fail: Statuses that functions answer instead of doing anything, by name.
    """

    def __init__(self, described: str = "") -> None:
        self.said: dict[str, Any] = json.loads(described or "{}")
        said = self.said
        self.gpus = said.get("gpus", [{"name": "Simulated T4", "capability": [7, 5], "memory": 1 << 30}])
        self.driver = said.get("driver", 13000)
        self.init = said.get("init", 0)
        self.fault = Path(said["fault"]) if "fault" in said else None
        self.calls: list[str] = []
        self.fail: dict[str, int] = {}
        self.sticky = 0
        self.memory: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.streams: dict[int, Stream] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.graph_bytes = 0
        self.numbers = itertools.count(1000)
        self.thread = threading.local()

    @property
    def used(self) -> int:
        return sum(ctypes.sizeof(buffer) for buffer in self.memory.values()) + self.graph_bytes * len(self.graphs)

    @property
    def total(self) -> int:
        return int(self.gpus[getattr(self.thread, "current", 1) - 1]["memory"])

    @property
    def free(self) -> int:
        file = Path(self.said.get("free", ""))
        return int(file.read_text()) if file.is_file() else self.total - self.used

    def begin(self, name: str, *, context: bool = True) -> CUresult:
        """What a function answers before it does anything."""
        self.calls.append(name)
        if self.sticky:
            return CUresult(self.sticky)
        if name in self.fail:
            return self.broken(self.fail[name])
        if context and not getattr(self.thread, "current", False):
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        return OK

    def broken(self, code: int) -> CUresult:
        """An error, which stays if it is of that kind."""
        if code in STICKY:
            self.sticky = code
        return CUresult(code)

    def provoke(self) -> CUresult:
        if self.fault is None or not self.fault.exists():
            return OK
        word = self.fault.read_text()
        if word == "hang":
            threading.Event().wait()
        self.fault.unlink(missing_ok=True)
        return self.broken(int(word))


MACHINE = Machine(os.environ.get("SIMULATED_GPU", ""))


def reset(described: str = "") -> Machine:
    global MACHINE  # noqa: PLW0603  the module is the driver
    MACHINE = Machine(described)
    return MACHINE


def give(stream: int, work: Callable[[], None]) -> None:
    """What libraries on top of the driver do: queue work of their own."""
    MACHINE.streams[int(stream)].give(work)


def cuInit(flags: int) -> tuple[CUresult]:
    del flags
    MACHINE.calls.append("cuInit")
    return (CUresult(MACHINE.init),)


def cuGetErrorName(error: CUresult) -> tuple[CUresult, bytes]:
    return OK, error.name.encode()


def cuDriverGetVersion() -> tuple[CUresult, int]:
    return OK, MACHINE.driver


def cuDeviceGetCount() -> tuple[CUresult, int]:
    return OK, len(MACHINE.gpus)


def cuDeviceGet(ordinal: int) -> tuple[CUresult, Handle | None]:
    if ordinal >= len(MACHINE.gpus):
        return CUresult.CUDA_ERROR_NO_DEVICE, None
    return OK, Handle(ordinal)


def cuDeviceGetAttribute(attrib: CUdevice_attribute, dev: Handle) -> tuple[CUresult, int]:
    return OK, MACHINE.gpus[dev]["capability"][attrib - 75]


def cuDeviceGetName(length: int, dev: Handle) -> tuple[CUresult, bytes]:
    return OK, MACHINE.gpus[dev]["name"].encode().ljust(length, b"\0")


def cuDeviceGetUuid(dev: Handle) -> tuple[CUresult, CUuuid]:
    """Sixteen bytes."""
    return OK, CUuuid(bytes([int(dev)]) * 16)


def cuDeviceTotalMem(dev: Handle) -> tuple[CUresult, int]:
    return OK, MACHINE.gpus[dev]["memory"]


def cuDevicePrimaryCtxRetain(dev: Handle) -> tuple[CUresult, Handle | None]:
    status = MACHINE.begin("cuDevicePrimaryCtxRetain", context=False)
    return status, Handle(dev + 1) if status is OK else None


def cuCtxSetCurrent(ctx: Handle) -> tuple[CUresult]:
    MACHINE.thread.current = int(ctx)
    return (OK,)


def cuCtxSynchronize() -> tuple[CUresult]:
    status = MACHINE.begin("cuCtxSynchronize")
    if status is OK:
        for number in MACHINE.streams:
            drain(number)
    return (status,)


def cuMemGetInfo() -> tuple[CUresult, int | None, int | None]:
    status = MACHINE.begin("cuMemGetInfo")
    return (OK, MACHINE.free, MACHINE.total) if status is OK else (status, None, None)


def cuMemAlloc(bytesize: int) -> tuple[CUresult, Handle | None]:
    """Memory on the GPU, until it is full."""
    status = MACHINE.begin("cuMemAlloc")
    if status is OK and MACHINE.used + bytesize > MACHINE.total:
        status = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    if status is not OK:
        return status, None
    return OK, Handle(_keep(MACHINE.memory, bytesize))


def cuMemFree(dptr: int) -> tuple[CUresult]:
    del MACHINE.memory[int(dptr)]
    return (MACHINE.begin("cuMemFree"),)


def cuMemAllocHost(bytesize: int) -> tuple[CUresult, int | None]:
    """Pinned memory; the bindings answer a plain integer here."""
    status = MACHINE.begin("cuMemAllocHost")
    return (OK, _keep(MACHINE.pinned, bytesize)) if status is OK else (status, None)


def cuMemcpyHtoDAsync(dstDevice: int, srcHost: int, ByteCount: int, hStream: int) -> tuple[CUresult]:
    return _copy("cuMemcpyHtoDAsync", dstDevice, srcHost, ByteCount, hStream, MACHINE.memory, MACHINE.pinned)


def cuMemcpyDtoHAsync(dstHost: int, srcDevice: int, ByteCount: int, hStream: int) -> tuple[CUresult]:
    return _copy("cuMemcpyDtoHAsync", dstHost, srcDevice, ByteCount, hStream, MACHINE.pinned, MACHINE.memory)


def cuStreamCreate(Flags: int) -> tuple[CUresult, Handle | None]:
    del Flags
    status = MACHINE.begin("cuStreamCreate")
    if status is not OK:
        return status, None
    number = next(MACHINE.numbers)
    MACHINE.streams[number] = Stream()
    return OK, Handle(number)


def cuStreamSynchronize(hStream: int) -> tuple[CUresult]:
    status = MACHINE.begin("cuStreamSynchronize")
    if MACHINE.streams[int(hStream)].captured is not None:
        return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    if status is OK:
        status = MACHINE.provoke()
    if status is OK:
        drain(int(hStream))
    return (MACHINE.broken(MACHINE.sticky) if MACHINE.sticky else status,)


def cuStreamBeginCapture(hStream: int, mode: CUstreamCaptureMode) -> tuple[CUresult]:
    assert isinstance(mode, CUstreamCaptureMode)
    status = MACHINE.begin("cuStreamBeginCapture")
    MACHINE.streams[int(hStream)].captured = []
    return (status,)


def cuStreamEndCapture(hStream: int) -> tuple[CUresult, Handle | None]:
    status = MACHINE.begin("cuStreamEndCapture")
    stream = MACHINE.streams[int(hStream)]
    work, stream.captured = stream.captured, None
    if status is not OK or work is None:
        return status or CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None
    number = next(MACHINE.numbers)
    MACHINE.graphs[number] = work
    return OK, Handle(number)


def cuGraphInstantiate(hGraph: int, flags: int) -> tuple[CUresult, Handle | None]:
    del flags
    status = MACHINE.begin("cuGraphInstantiate")
    if status is not OK:
        return status, None
    number = next(MACHINE.numbers)
    MACHINE.graphs[number] = list(MACHINE.graphs[int(hGraph)])
    return OK, Handle(number)


def cuGraphDestroy(hGraph: int) -> tuple[CUresult]:
    del MACHINE.graphs[int(hGraph)]
    return (MACHINE.begin("cuGraphDestroy"),)


def cuGraphExecDestroy(hGraphExec: int) -> tuple[CUresult]:
    del MACHINE.graphs[int(hGraphExec)]
    return (MACHINE.begin("cuGraphExecDestroy"),)


def cuGraphLaunch(hGraphExec: int, hStream: int) -> tuple[CUresult]:
    status = MACHINE.begin("cuGraphLaunch")
    if status is OK:
        for work in MACHINE.graphs[int(hGraphExec)]:
            give(hStream, work)
    return (status,)


def _keep(place: dict[int, Any], size: int) -> int:
    buffer = (ctypes.c_char * size)()
    address = ctypes.addressof(buffer)
    place[address] = buffer
    return address


def _copy(
    name: str, target: int, source: int, size: int, stream: int, targets: dict[int, Any], sources: dict[int, Any]
) -> tuple[CUresult]:
    status = MACHINE.begin(name)
    for address, known in ((int(target), targets), (int(source), sources)):
        if address not in known or size > ctypes.sizeof(known[address]):
            return (MACHINE.broken(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS),)
    if status is OK:
        give(stream, lambda: ctypes.memmove(int(target), int(source), size))
    return (status,)


def drain(stream: int) -> None:
    queue, MACHINE.streams[stream].queue = MACHINE.streams[stream].queue, []
    for work in queue:
        work()
