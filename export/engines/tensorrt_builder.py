"""The process that runs TensorRT's builder: `python -m bertserve.export.engines.tensorrt_builder REQUEST`.

The builder is native code that takes gigabytes and may crash. In a separate process its memory is released, its crash
is one sentence, and an interrupt stops it at once. It prints one JSON object per line.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from bertserve.serving.engine.gpu import tensorrt_library
from bertserve.serving.engine.specs import EngineBuild, ShapeProfile

if TYPE_CHECKING:
    from collections.abc import Callable

    from bertserve.serving.engine.gpu.tensorrt_library import Native

Shape = tuple[int, int]

MAX_MASKS = 16
"""Maximum masks of a text in a fill-mask engine: each costs the logits of a whole vocabulary."""

_DRIVER = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
"""Numbers of the CUDA driver's device attributes."""
_MIN_CAPABILITY = (7, 5)


def shapes_of(profile: ShapeProfile, dimensions: list[str]) -> tuple[Shape, Shape, Shape] | None:
    """The three shapes of an input with these free dimensions; None if it can have none."""
    if dimensions == ["batch", "sequence"]:
        return profile.min, profile.opt, profile.max
    if dimensions == ["batch", "masks"]:
        most = min(MAX_MASKS, profile.max[1])
        return (profile.min[0], 1), (profile.opt[0], 1), (profile.max[0], most)
    return None


class Build(msgspec.Struct, frozen=True):
    """The order to build an engine.

    Attributes:
        graph: The fp16 ONNX file.
        capability: `SM75` and so on, for another GPU; None for the local one.
        profiles: In the order of the sequence buckets.
        timing_cache: Measurements of earlier builds on this GPU, read and written; None for no such file.
    """

    flavour: Literal["rtx", "enterprise"]
    graph: str
    engine: str
    capability: str | None
    profiles: tuple[ShapeProfile, ...]
    workspace_bytes: int
    threads: int
    timing_cache: str | None


class Step(msgspec.Struct, frozen=True, tag=True):
    """The progress of the build."""

    percent: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why there is no engine."""

    reason: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """The engine is built.

    Attributes:
        engine: What it depends on.
    """

    engine: EngineBuild
    peak_memory_bytes: int


Answer = Step | Failed | Done


class BuilderError(Exception):
    """There is no engine; the message says why, worded to follow a colon."""


def run(order: Build, report: Callable[[Answer], None]) -> Done:
    """Builds an engine.

    Raises:
        BuilderError: It cannot be built.
    """
    # Checked before TensorRT, whose message about a missing GPU is less clear.
    target = order.capability
    capability = f"{target[2:-1]}.{target[-1]}" if target else _own_capability()
    try:
        library = tensorrt_library.load(order.flavour)
    except tensorrt_library.LibraryMissing as error:
        raise BuilderError(str(error)) from error
    logger = tensorrt_library.logger(library)
    try:
        _Builder(library, logger).build(order, report)
    except (TypeError, RuntimeError, MemoryError) as error:
        # If a native constructor returns null, pybind11 raises TypeError.
        raise BuilderError(tensorrt_library.reason([*logger.errors, str(error)])) from error
    return Done(EngineBuild(order.flavour, library.__version__, capability, order.profiles), _peak_memory_bytes())


class _Builder:
    """The builder of one flavor; its objects end with the process."""

    def __init__(self, library: Native, logger: Native) -> None:
        self._library = library
        self._logger = logger
        self._builder = library.Builder(logger)

    def build(self, order: Build, report: Callable[[Answer], None]) -> None:
        """Parses the graph, builds, and writes the engine and the timing cache."""
        self._builder.max_threads = order.threads
        network = self._parse(order.graph)
        config = self._builder.create_builder_config()
        config.set_memory_pool_limit(self._library.MemoryPoolType.WORKSPACE, order.workspace_bytes)
        monitor = _monitor(self._library, report)
        config.progress_monitor = monitor
        if order.capability:
            self._aim(config, order.capability)
        if order.timing_cache:
            self._read_timings(config, Path(order.timing_cache))
        for profile in order.profiles:
            self._add(profile, network, config)
        plan = self._builder.build_serialized_network(network, config)
        if plan is None:
            raise BuilderError(tensorrt_library.reason(self._logger.errors))
        with Path(order.engine).open("wb") as file:
            file.write(plan)
        if order.timing_cache:
            _replace(Path(order.timing_cache), config.get_timing_cache().serialize())

    def _parse(self, graph: str) -> Native:
        typed = 1 << int(self._library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = self._builder.create_network(typed)
        parser = self._library.OnnxParser(network, self._logger)
        if not parser.parse_from_file(graph):
            raise BuilderError(
                tensorrt_library.reason([parser.get_error(at).desc() for at in range(parser.num_errors)])
            )
        layers = (network.get_layer(at) for at in range(network.num_layers))
        products = [layer for layer in layers if layer.type == self._library.LayerType.MATRIX_MULTIPLY]
        if any(layer.get_input(0).dtype == self._library.float32 for layer in products):
            raise BuilderError(tensorrt_library.reason(["FP32 GEMM"]))
        return network

    def _aim(self, config: Native, capability: str) -> None:
        """Sets the target GPU: only TensorRT for RTX has these calls."""
        known = self._library.ComputeCapability.__members__
        if capability not in known:
            raise BuilderError(f"TensorRT for RTX {self._library.__version__} does not support {capability.lower()}")
        config.num_compute_capabilities = 1
        if not config.set_compute_capability(known[capability], 0):
            raise BuilderError(tensorrt_library.reason(self._logger.errors))

    def _read_timings(self, config: Native, file: Path) -> None:
        """A cache of another GPU or version is no error: TensorRT measures again, and the file is rewritten."""
        known = file.read_bytes() if file.exists() else b""
        if not known or not config.set_timing_cache(config.create_timing_cache(known), False):
            config.set_timing_cache(config.create_timing_cache(b""), False)

    def _add(self, profile: ShapeProfile, network: Native, config: Native) -> None:
        shapes = self._builder.create_optimization_profile()
        for at in range(network.num_inputs):
            tensor = network.get_input(at)
            free = [tensor.get_dimension_name(axis) for axis, size in enumerate(tensor.shape) if size < 0]
            triple = shapes_of(profile, free)
            if triple is None:
                raise BuilderError(f"the input {tensor.name} must be [batch, sequence], not {free or tensor.shape}")
            shapes.set_shape(tensor.name, *triple)
        if config.add_optimization_profile(shapes) < 0:
            raise BuilderError(tensorrt_library.reason(self._logger.errors))


def _monitor(library: Native, report: Callable[[Answer], None]) -> Native:
    """A progress monitor of the library's own class, which reports whole percents.

    Phases nest: a step of a phase is as far as the phase inside it. Called from the builder's threads.
    """

    class Percents(library.IProgressMonitor):  # type: ignore[misc]  # the class is known at run time
        def __init__(self) -> None:
            super().__init__()
            self._lock = threading.Lock()
            self._phases: dict[str, list[int]] = {}
            self._percent = -1

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:  # noqa: ARG002  the order tells
            with self._lock:
                self._phases[name] = [0, steps]

        def phase_finish(self, name: str) -> None:
            with self._lock:
                self._phases.pop(name, None)

        def step_complete(self, name: str, step: int) -> bool:
            with self._lock:
                if name in self._phases:
                    self._phases[name][0] = step + 1
                return self._report_percent()

        def _report_percent(self) -> bool:
            done, part = 0.0, 1.0
            for step, steps in self._phases.values():
                done, part = done + part * step / steps, part / steps
            if int(100 * done) <= self._percent:
                return True
            self._percent = int(100 * done)
            try:
                report(Step(self._percent))
            except OSError:  # nobody listens any more
                return False
            return True

    return Percents()


def _own_capability() -> str:
    """The compute capability of the first GPU, from the driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        raise BuilderError(tensorrt_library.NO_DRIVER) from None
    code = driver.cuInit(0)
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    code = code or driver.cuDeviceGet(ctypes.byref(device), 0)
    code = code or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
    code = code or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    if code:
        raise BuilderError(f"the NVIDIA driver reports no GPU (CUDA error {code}); does the container have access?")
    if (major.value, minor.value) < _MIN_CAPABILITY:
        raise BuilderError(
            f"this GPU has compute capability {major.value}.{minor.value}; TensorRT needs 7.5 (T4) or newer"
        )
    return f"{major.value}.{minor.value}"


def _peak_memory_bytes() -> int:
    """Linux's own count for this program; `getrusage` would include what ran before it in the process."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return int(match[1]) * 1024 if match else 0


def _replace(file: Path, content: bytes) -> None:
    partial = file.with_name(f"{file.name}.partial")
    partial.write_bytes(content)
    partial.replace(file)


def main(argv: list[str]) -> None:
    """Carries out one order, given as JSON, and answers in lines of JSON."""
    # An interrupt is for the export, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def report(answer: Answer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    try:
        report(run(msgspec.json.decode(argv[0], type=Build), report))
    except BuilderError as error:
        report(Failed(str(error)))
    except OSError as error:
        report(Failed(f"{error.filename or 'the engine'}: {error.strerror or error}"))


if __name__ == "__main__":
    main(sys.argv[1:])
