"""GPU discovery: the GPUs of this machine and the libraries that can use them, in a separate process.

A driver that hangs or a library that crashes then affects that process alone. The server never starts CUDA, which would
take memory on each GPU. `python -m bertserve.serving.engine.gpu.discovery` is that process: it prints one JSON object.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Literal

import msgspec

from bertserve.serving.engine.children import module_command
from bertserve.serving.engine.gpu import cuda_driver, tensorrt_library
from bertserve.serving.engine.specs import Gpu  # noqa: TC001  read at run time by msgspec
from bertserve.serving.host import installing

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 30.0
"""Time limit in seconds: a driver's first start may take some seconds without persistence mode."""

_KILL_S = 1.0
"""Seconds to wait for a killed process to end; one that can be killed ends sooner."""

Runtime = Literal["ort-cuda", "rtx", "enterprise"]
"""ONNX Runtime's CUDA provider, and the flavors of TensorRT."""

_PROVIDER = "CUDAExecutionProvider"

_MIN_CAPABILITY = {13: (7, 5), 12: (5, 0)}
"""Minimum compute capability that libraries have kernels for, by the major version of their CUDA."""


class Library(msgspec.Struct, frozen=True):
    """A library that can run models on a GPU.

    Attributes:
        version: Empty if it cannot be used.
        cuda: Major version of the CUDA that it was built for; 0 if unknown.
        problem: Why it cannot be used.
    """

    version: str = ""
    cuda: int = 0
    problem: str = ""


class Machine(msgspec.Struct, frozen=True):
    """The GPUs and libraries of this machine.

    Attributes:
        gpus: GPUs in CUDA's order.
        cuda: Newest CUDA version that the driver supports; (0, 0) without a driver.
        problem: Why no GPU can be used; empty if one can.
        broken: Whether a driver that is installed, or should be, does not work.
        libraries: Libraries by `Runtime`.
        free_bytes: Free memory of each GPU.
    """

    gpus: tuple[Gpu, ...] = ()
    cuda: tuple[int, int] = (0, 0)
    problem: str = ""
    broken: bool = False
    libraries: dict[str, Library] = {}
    free_bytes: tuple[int, ...] = ()

    def obstacles(self, name: str, runtime: Runtime, gpu: Gpu) -> Iterator[str]:
        """Yields the reasons why a library, called `name`, cannot run on a GPU of this machine."""
        library = self.libraries.get(runtime)
        if library is None or library.problem:
            yield library.problem if library else f"{name} was not checked"
            return
        if library.cuda > self.cuda[0]:
            newest = "{}.{}".format(*self.cuda)
            yield (
                f"the NVIDIA driver is too old: it supports CUDA up to {newest}, {name} {library.version} needs"
                f" {library.cuda}.0; install a newer driver, or {name} for CUDA {self.cuda[0]}"
            )
        least = _MIN_CAPABILITY.get(library.cuda, (0, 0))
        if tuple(map(int, gpu.compute_capability.split("."))) < least:
            yield (
                f"{gpu.name} has compute capability {gpu.compute_capability}, {name} for CUDA"
                f" {library.cuda} needs {'{}.{}'.format(*least)}"
            )


def look(limit_s: float = LIMIT_S) -> Machine:
    """Examines this machine in a separate process; never fails, and takes at most `limit_s`."""
    command = module_command("bertserve.serving.engine.gpu.discovery")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        answer, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # Not `subprocess.run`, which waits for the end: SIGKILL does not stop a process that hangs in the kernel.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILL_S)
        return Machine(problem=f"the NVIDIA driver did not respond within {limit_s:g} s", broken=True)
    try:
        return msgspec.json.decode(answer, type=Machine)
    except msgspec.DecodeError:
        return Machine(problem=f"GPU discovery exited with status {process.returncode}", broken=True)


def examine() -> Machine:
    try:
        driver = cuda_driver.load()
        gpus, free_bytes = driver.gpus(), []
        for gpu in gpus:
            driver.use(gpu.ordinal)
            free_bytes.append(driver.memory()[0])
        cuda = driver.version()
    except cuda_driver.CudaError as error:
        return Machine(problem=cuda_driver.explained(error), broken=error.code not in cuda_driver.NOTHING_HERE)
    if not gpus:
        return Machine(cuda=cuda, problem="the NVIDIA driver finds no GPU; give the container access to one")
    return Machine(
        tuple(gpus),
        cuda,
        libraries={"ort-cuda": _onnx_runtime(), "rtx": _tensorrt("rtx"), "enterprise": _tensorrt("enterprise")},
        free_bytes=tuple(free_bytes),
    )


def _onnx_runtime() -> Library:
    try:
        # This import fails if ONNX Runtime is not installed; the packages for CPUs and GPUs have the same module.
        from bertserve.serving.engine.cpu import ort  # noqa: PLC0415  needs its library
    except ImportError as error:
        return Library(problem=f"ONNX Runtime is not installed ({error}); run `{installing('gpu')}`")
    if _PROVIDER not in ort.providers():
        return Library(
            problem=f"ONNX Runtime {ort.VERSION} is installed without CUDA; run `{installing('gpu')}` in place of [cpu]"
        )
    return Library(ort.VERSION, _major(ort.cuda_version()))


def _tensorrt(flavour: tensorrt_library.Flavour) -> Library:
    try:
        return Library(str(tensorrt_library.load(flavour).__version__), _cuda_of(tensorrt_library.PACKAGES[flavour]))
    except tensorrt_library.LibraryMissing as error:
        return Library(problem=str(error))


def _cuda_of(package: str) -> int:
    """Returns the CUDA version in the names of a package and its requirements, such as `tensorrt_cu13`, or 0."""
    try:
        names = [package, *(importlib.metadata.requires(package) or [])]
    except importlib.metadata.PackageNotFoundError:
        names = [package]
    return next((major for major in (13, 12) if any(f"cu{major}" in name for name in names)), 0)


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdecimal() else 0


def main() -> None:
    """Writes the result to standard output; output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with answers:
        answers.write(msgspec.json.encode(examine()))


if __name__ == "__main__":
    main()
