"""TensorRT: an engine's contexts on the device's stream, with fixed buffers and one scratch memory.

Each optimization profile, which is a sequence bucket, has a context of its own that never changes its profile. The
enterprise library's work is captured into graphs here. TensorRT for RTX compiles its kernels when it loads an engine.
By default it compiles a better one in the background later, while an existing graph keeps the old one. So it is set to
compile at once, for the exact shapes, and it keeps whole graphs itself. Compiled kernels are cached for the next start.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.serving.engine.base import check_interface, read_artifact, write_kernels
from bertserve.serving.engine.gpu import tensorrt_library
from bertserve.serving.engine.gpu.model import MASK_SIZES, GpuBackend, GpuModel, ModelBuffers, ProgramError, shapes_for
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.errors import BundleError
from bertserve.serving.host import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.gpu.model import Shape
    from bertserve.serving.engine.gpu.tensorrt_library import Native
    from bertserve.serving.engine.specs import EngineBuild, ModelSpec, ShapeProfile

log = logging.getLogger("bertserve.engine")

_VERSION_PARTS = 3


class TensorRtBackend(GpuBackend):
    """Engines of either flavor, from verified bytes; `version` is that of the libraries in use."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        device: Device,
        max_batch_tokens: int,
        kernels: Sequence[KernelFiles] = (),
    ) -> None:
        """Opens every engine and captures its graphs.

        Args:
            models: Models to load.
            device: The GPU.
            max_batch_tokens: Padded tokens of the largest batch.
            kernels: Files of each model's kernels that TensorRT for RTX compiles; empty for none.

        Raises:
            BundleError: An engine cannot be served here.
            CudaError: The GPU is out of memory, or failed.
        """
        flavours = {_build(spec).flavour for spec in models}
        try:
            libraries = {flavour: _Library(flavour) for flavour in sorted(flavours)}
        except tensorrt_library.LibraryMissing as error:
            raise BundleError(str(error)) from error
        self.version = ", ".join(library.version for library in libraries.values())
        opened = [
            _Opened(libraries[_build(spec).flavour], spec, device, files)
            for spec, files in zip(models, kernels or [KernelFiles()] * len(models), strict=True)
        ]
        # All contexts run in one stream, so they can share their temporary memory.
        scratch_size = max(engine.scratch_size for engine in opened)
        scratch = device.scratch(scratch_size)
        super().__init__(device, [engine.model(scratch, scratch_size, max_batch_tokens) for engine in opened])
        for engine in opened:
            engine.keep_kernels()


class _Library:
    def __init__(self, flavour: tensorrt_library.Flavour) -> None:
        self.flavour = flavour
        self.module = tensorrt_library.load(flavour)
        self.log = tensorrt_library.logger(self.module)
        self.runtime = tensorrt_library.runtime(self.module, self.log)
        self.version = f"{tensorrt_library.PACKAGES[flavour]} {self.module.__version__}"

    def reason(self) -> str:
        messages = list(self.log.errors)
        self.log.errors.clear()
        return tensorrt_library.reason(messages)


class _Opened:
    """One model's engine and its contexts, by the length of their profiles."""

    def __init__(self, library: _Library, spec: ModelSpec, device: Device, kernels: KernelFiles) -> None:
        self.spec = spec
        self._library = library
        self._device = device
        self._kernels = kernels
        self._cache: Native = None
        self._check_fits(_build(spec))
        data = read_artifact(Path(spec.path), spec.sha256)
        self._engine = library.runtime.deserialize_cuda_engine(data)
        if self._engine is None:
            raise BundleError(f"{spec.path}: {library.reason()}")
        self._check_tensors()
        self._contexts = {profile.max[1]: self._context(index) for index, profile in enumerate(_build(spec).profiles)}
        device.wait()

    @property
    def scratch_size(self) -> int:
        return int(self._engine.device_memory_size_v2)

    def model(self, scratch: int, scratch_size: int, max_batch_tokens: int) -> GpuModel:
        profiles = {profile.max[1]: profile for profile in _build(self.spec).profiles}
        shapes = [
            shape
            for shape in shapes_for(self.spec, sorted(profiles), max_batch_tokens)
            if _holds(profiles[shape.length], shape)
        ]
        buffers = ModelBuffers(self._device, self.spec, shapes)
        for context in self._contexts.values():
            context.set_device_memory(scratch, scratch_size)
            for name, buffer in (buffers.inputs | buffers.outputs).items():
                if not context.set_tensor_address(name, buffer.address):
                    raise BundleError(f"{self.spec.path}: {self._library.reason()}")
        program = _TrtProgram(self._library, self.spec, self._device, self._contexts)
        return GpuModel(self._device, self.spec, buffers, program, shapes)

    def _check_tensors(self) -> None:
        """Compares the engine's tensors with the manifest, whose order of outputs an engine need not keep."""
        engine, module = self._engine, self._library.module
        types = {module.int32: "int32", module.float32: "float32"}
        order = {output.name: at for at, output in enumerate(self.spec.outputs)}
        inputs: list[tuple[str, str | None]] = []
        outputs: list[tuple[str, str | None, tuple[int, ...]]] = []
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            dtype, shape = types.get(engine.get_tensor_dtype(name)), tuple(engine.get_tensor_shape(name))
            if engine.get_tensor_mode(name) == module.TensorIOMode.INPUT:
                inputs.append((name, dtype if shape == (-1, -1) else None))
            else:
                outputs.append((name, dtype, shape))
        check_interface(self.spec, inputs, sorted(outputs, key=lambda output: order.get(output[0], -1)), "engine")

    def keep_kernels(self) -> None:
        """Writes the compiled kernels for the server to collect; a start without them is only slower."""
        if self._cache is None or not self._kernels.write:
            return
        try:
            write_kernels(self._kernels.write, bytes(self._cache.serialize()))
        except OSError as error:
            log.warning("cannot cache the kernels of %s: %s", self.spec.name, error)

    def _check_fits(self, build: EngineBuild) -> None:
        """Refuses an engine for another GPU or version before the library does, whose message is less clear."""
        path = self.spec.path
        gpu = self._device.gpu
        if gpu.compute_capability != build.compute_capability:
            raise BundleError(
                f"{path}: the engine is for compute capability {build.compute_capability}, but this {gpu.name} has"
                f" {gpu.compute_capability}; build one here with `{command('export --tensorrt native')}`"
            )
        version = str(self._library.module.__version__)
        if version.split(".")[:_VERSION_PARTS] != build.version.split(".")[:_VERSION_PARTS]:
            raise BundleError(
                f"{path}: the engine was built with TensorRT {build.version}, but {version} is installed; install"
                " that version, or export again"
            )

    def _context(self, profile: int) -> Native:
        strategy = self._library.module.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._library.flavour == "rtx":
            context = self._engine.create_execution_context(self._config(strategy))
        else:
            context = self._engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, self._device.stream):
            raise BundleError(f"{self.spec.path}: {self._library.reason()}")
        return context

    def _config(self, strategy: Native) -> Native:
        module = self._library.module
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(strategy)
        config.cuda_graph_strategy = module.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        config.dynamic_shapes_kernel_specialization_strategy = module.DynamicShapesKernelSpecializationStrategy.EAGER
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._recall(self._cache)
        config.set_runtime_cache(self._cache)
        return config

    def _recall(self, cache: Native) -> None:
        """Reads the kernels of an earlier start; the library refuses those of another driver or GPU."""
        if not self._kernels.read:
            return
        try:
            kernels = read_artifact(Path(self._kernels.read), self._kernels.sha256)
        except (OSError, BundleError) as error:
            log.warning("the cached kernels of %s cannot be read: %s", self.spec.name, error)
            return
        if not cache.deserialize(kernels):
            log.info("the cached kernels of %s are for another driver or GPU: recompiling", self.spec.name)


class _TrtProgram:
    def __init__(self, library: _Library, spec: ModelSpec, device: Device, contexts: Mapping[int, Native]) -> None:
        self.records_itself = library.flavour == "rtx"
        self._library = library
        self._inputs = spec.inputs
        self._stream = device.stream
        self._contexts = contexts
        self._set: dict[int, Shape] = {}

    def prepare(self, shape: Shape, *, graph: bool) -> None:
        """Does nothing: a context learns a shape when it is first queued."""

    def enqueue(self, shape: Shape) -> None:
        context = self._contexts[shape.length]
        if self._set.get(shape.length) != shape:
            self._set.pop(shape.length, None)  # after a failure below, the context has no valid shape
            for name in self._inputs:
                if not context.set_input_shape(name, shape.input(name)):
                    raise ProgramError(f"TensorRT: {self._library.reason()}")
            self._set[shape.length] = shape
        if not context.execute_async_v3(self._stream):
            raise ProgramError(f"TensorRT: {self._library.reason()}")


def _build(spec: ModelSpec) -> EngineBuild:
    if spec.build is None:
        raise BundleError(f"{spec.path}: not a TensorRT engine")
    return spec.build


def _holds(profile: ShapeProfile, shape: Shape) -> bool:
    return profile.min[0] <= shape.rows <= profile.max[0] and shape.masks <= min(MASK_SIZES[-1], shape.length)
