"""The CUDA driver: one method per call, and one exception for every failure.

Only this file imports NVIDIA's bindings. Addresses, streams and graphs are plain integers here. So tests can run the
layers above on a fake driver, and this file on a fake of the bindings. Each function of the bindings returns a status
first and then its results.
"""

from __future__ import annotations

from typing import Any

from bertserve.serving.engine.specs import Gpu

Native = Any
"""A module or an object of the bindings, which are untyped."""

SUCCESS = 0
OUT_OF_MEMORY = 2
NO_DEVICE = 100
OLD_DRIVER = 35
"""The CUDA runtime's code for a driver older than itself."""
NO_DRIVER = -1
"""Not a CUDA code: the driver's library or its bindings are missing."""

NOTHING_HERE = frozenset({NO_DRIVER, NO_DEVICE})
"""Codes of a machine without a GPU; any other failure to start is of a machine that should have one."""

_THREAD_LOCAL_CAPTURE = "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"
_NON_BLOCKING = 1
_NAME_BYTES = 256
_MAJOR, _MINOR = "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR"

_GPU_IS_LOST = frozenset(
    {
        *(214, 220, 221),  # uncorrectable memory error, NVLink
        *(700, 702, 709, 710),  # illegal address, launch timed out, context destroyed, device-side assert
        *(714, 715, 716, 717, 718, 719),  # stack, instruction, alignment, address space, program counter, launch failed
        *(721, 999),  # contained memory error, unknown
    }
)
"""Sticky errors: according to the driver's manual, every later call of the process fails too."""


class CudaError(Exception):
    """A driver call failed; `code` is the driver's number, or `NO_DRIVER` if there is no driver."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} (CUDA error {code})" if code != NO_DRIVER else f"{call}: {name}")
        self.call, self.code, self.name = call, code, name

    @property
    def sticky(self) -> bool:
        """Whether nothing works in this process any more."""
        return self.code in _GPU_IS_LOST

    @property
    def out_of_memory(self) -> bool:
        return self.code == OUT_OF_MEMORY


class Driver:
    """The driver calls that the layer above needs; each raises `CudaError`."""

    def __init__(self, bindings: Native) -> None:
        """Initializes the driver through `cuda.bindings.driver` or a fake of it."""
        self._cuda = bindings
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # the bindings raise it if the driver's library is missing
            raise CudaError("cuInit", NO_DRIVER, f"no NVIDIA driver found ({error})") from None

    # Driver and GPUs.

    def version(self) -> tuple[int, int]:
        """Returns the newest CUDA version that this driver supports, such as (13, 0)."""
        number = int(self._call("cuDriverGetVersion"))
        return number // 1000, number % 1000 // 10

    def gpus(self) -> list[Gpu]:
        return [self.gpu(ordinal) for ordinal in range(int(self._call("cuDeviceGetCount")))]

    def gpu(self, ordinal: int) -> Gpu:
        device = self._call("cuDeviceGet", ordinal)
        attributes = self._cuda.CUdevice_attribute
        major, minor = (
            int(self._call("cuDeviceGetAttribute", getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{which}"), device))
            for which in (_MAJOR, _MINOR)
        )
        name = bytes(self._call("cuDeviceGetName", _NAME_BYTES, device)).split(b"\0")[0].decode("utf-8", "replace")
        uuid = bytes(self._call("cuDeviceGetUuid", device).bytes).hex()
        parts = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
        memory = int(self._call("cuDeviceTotalMem", device))
        return Gpu(ordinal, name, f"GPU-{'-'.join(parts)}", f"{major}.{minor}", memory)

    # A GPU in use: the primary context, which is shared with libraries that use CUDA's runtime.

    def use(self, ordinal: int) -> None:
        """Makes a GPU current for the calling thread; other threads must call it themselves."""
        context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))
        self._call("cuCtxSetCurrent", context)

    def memory(self) -> tuple[int, int]:
        """Returns the free and the total bytes of the GPU's memory."""
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def finish(self) -> None:
        """Waits for all work on the GPU; fails if the GPU no longer works."""
        self._call("cuCtxSynchronize")

    # Memory.

    def allocate(self, size: int) -> int:
        """Allocates `size` bytes on the GPU; returns the address, which CUDA aligns to 256 bytes."""
        return int(self._call("cuMemAlloc", size))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def allocate_pinned(self, size: int) -> int:
        """Allocates `size` bytes of pinned host memory, which the GPU can access directly; returns the address."""
        return int(self._call("cuMemAllocHost", size))

    def copy_in(self, device: int, host: int, size: int, stream: int) -> None:
        """Queues a copy to the GPU; the host's bytes must be pinned and unchanged until it is done."""
        self._call("cuMemcpyHtoDAsync", device, host, size, stream)

    def copy_out(self, host: int, device: int, size: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", host, device, size, stream)

    # Streams.

    def stream(self) -> int:
        """Creates a stream that does not synchronize with any other."""
        return int(self._call("cuStreamCreate", _NON_BLOCKING))

    def wait(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    # Graphs: work that is captured once and launched again by a single call.

    def begin_capture(self, stream: int) -> None:
        """Starts to record the stream's work instead of running it; other threads may still use the GPU."""
        mode = getattr(self._cuda.CUstreamCaptureMode, _THREAD_LOCAL_CAPTURE)
        self._call("cuStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """Ends the recording and returns its executable graph."""
        graph = self._call("cuStreamEndCapture", stream)
        try:
            return int(self._call("cuGraphInstantiate", graph, 0))
        finally:
            self._call("cuGraphDestroy", graph)

    def launch(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Native) -> Native:
        status, *results = getattr(self._cuda, name)(*arguments)
        if int(status) != SUCCESS:
            raise CudaError(name, int(status), self._name(status))
        return results[0] if len(results) == 1 else tuple(results)

    def _name(self, status: Native) -> str:
        failed, name = self._cuda.cuGetErrorName(status)
        return bytes(name).decode("ascii", "replace") if int(failed) == SUCCESS and name else "an unknown error"


def explained(error: CudaError) -> str:
    """Describes a failure to use a GPU, and what to do."""
    if error.code in {NO_DRIVER, OLD_DRIVER}:
        return f"{error.name}; run this on the machine with the GPU, in a container with access to it"
    if error.code == NO_DEVICE:
        return "the NVIDIA driver finds no GPU (CUDA error 100); give the container access to one"
    if error.out_of_memory:
        return f"the GPU's memory is full ({error}); serve fewer or smaller models on it, or lower --max-batch-tokens"
    return str(error)


def load() -> Driver:
    """Loads the driver of this machine; raises CudaError, which names what is missing."""
    try:
        from cuda.bindings import driver  # noqa: PLC0415  optional: only GPUs need it
    except ImportError as error:
        raise CudaError("import", NO_DRIVER, f"NVIDIA's bindings are not installed ({error})") from error
    return Driver(driver)
