"""TensorRT: an engine's contexts on the device's stream, with fixed buffers and one scratch memory.

Each optimization profile, which is a sequence bucket, has a context of its own that never changes its profile. The
enterprise library's work is captured into graphs here. TensorRT for RTX compiles its kernels when it loads an engine.
By default it compiles a better one in the background later, while an existing graph keeps the old one. So it is set to
compile at once, for the exact shapes, and it keeps whole graphs itself. Compiled kernels are cached for the next start.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from serving.engine.base import check_interface, read_artifact, write_kernels
from serving.engine.gpu import tensorrt_library
from serving.engine.gpu.cuda import Buffer
from serving.engine.gpu.model import (
    MASK_SIZES,
    GpuBackend,
    GpuModel,
    ModelBuffers,
    ProgramError,
    Shape,
    not_split,
    shapes_for,
)
from serving.engine.specs import KernelFiles
from serving.errors import BundleError
from serving.host import command
from serving.records import POSITIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from serving.engine.gpu.cuda import Device
    from serving.engine.gpu.model import BackendModel
    from serving.engine.gpu.tensorrt_library import Native
    from serving.engine.specs import EngineBuild, ModelSpec, ShapeProfile

log = logging.getLogger("bertserve.engine")

_VERSION_PARTS = 3

_Dtype = Literal["int32", "float32", "float16"]

_WORDS = {"int32": "tensor(int32)", "float32": "tensor(float)", "float16": "tensor(float16)"}
"""ONNX Runtime's names of types, which parts are compared by."""

_Tensor = tuple[str, _Dtype, tuple[int, ...]]
"""Name, type and size; -1 is a dynamic dimension."""

_Extent = Callable[[Shape], tuple[int, ...]]
"""Returns a tensor's size in a shape."""


class TensorRtBackend(GpuBackend):
    """Engines of either flavor, from verified bytes; `version` is that of the libraries in use."""

    def __init__(
        self,
        models: Sequence[ModelSpec],
        device: Device,
        max_batch_tokens: int,
        kernels: Sequence[KernelFiles] = (),
        load_split: Callable[[ModelSpec], BackendModel] = not_split,
    ) -> None:
        """Opens every engine and captures its graphs.

        Args:
            models: Models to load.
            device: The GPU.
            max_batch_tokens: Padded tokens of the largest batch.
            kernels: Files of each model's kernels that TensorRT for RTX compiles; empty for none.
            load_split: Loads a model that is split by layers; its parts compile at each start.

        Raises:
            BundleError: An engine cannot be served here.
            CudaError: The GPU is out of memory, or failed.
        """
        libraries = {flavour: _library(flavour) for flavour in sorted({_build(spec).flavour for spec in models})}
        self.version = ", ".join(library.version for library in libraries.values())
        opened = {
            at: _Opened(libraries[_build(spec).flavour], spec, device, files)
            for at, (spec, files) in enumerate(zip(models, kernels or [KernelFiles()] * len(models), strict=True))
            if spec.stages == 1
        }
        for engine in opened.values():
            engine.check()
        # All contexts run in one stream, so they can share their temporary memory.
        scratch_size = max((engine.scratch_size for engine in opened.values()), default=0)
        scratch = device.scratch(scratch_size)
        super().__init__(
            device,
            [
                opened[at].model(scratch, scratch_size, max_batch_tokens) if at in opened else load_split(spec)
                for at, spec in enumerate(models)
            ],
        )
        for engine in opened.values():
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
        self._contexts = {profile.max[1]: self._context(index) for index, profile in enumerate(_build(spec).profiles)}
        device.wait()

    @property
    def scratch_size(self) -> int:
        return int(self._engine.device_memory_size_v2)

    def model(self, scratch: int, scratch_size: int, max_batch_tokens: int) -> GpuModel:
        shapes = shapes_of(self.spec, max_batch_tokens)
        buffers = ModelBuffers(self._device, self.spec, shapes)
        self._place(scratch, scratch_size, buffers.inputs | buffers.outputs)
        program = self._program({name: partial(Shape.input, name=name) for name in self.spec.inputs})
        return GpuModel(self._device, self.spec, buffers, program, shapes)

    def part(self, max_batch_tokens: int) -> EnginePart:
        """Returns the engine as one part of a split model, with scratch memory of its own."""
        tensors = {name: _extent(self.spec, name, size) for name, _, size in self.tensors(inputs=True)}
        outputs = {name: _extent(self.spec, name, size) for name, _, size in self.tensors(inputs=False)}
        shapes = shapes_of(self.spec, max_batch_tokens)
        buffers = {
            name: Buffer(self._device, dtype, max(math.prod(extents[name](shape)) for shape in shapes))
            for extents, inputs in ((tensors, True), (outputs, False))
            for name, dtype, _ in self.tensors(inputs=inputs)
        }
        self._place(self._device.allocate(self.scratch_size), self.scratch_size, buffers)
        return EnginePart(self._device, self, self._program(tensors), buffers, outputs)

    def tensors(self, *, inputs: bool) -> list[_Tensor]:
        """Returns the engine's inputs, or its outputs in the manifest's order, which an engine need not keep.

        Raises:
            BundleError: A tensor has an unsupported type.
        """
        engine, module = self._engine, self._library.module
        types: dict[Native, _Dtype] = {module.int32: "int32", module.float32: "float32", module.float16: "float16"}
        mode = module.TensorIOMode.INPUT if inputs else module.TensorIOMode.OUTPUT
        found = []
        for name in map(engine.get_tensor_name, range(engine.num_io_tensors)):
            if engine.get_tensor_mode(name) != mode:
                continue
            if (dtype := types.get(engine.get_tensor_dtype(name))) is None:
                raise BundleError(f"{self.spec.path}: the engine's tensor {name} has an unsupported data type")
            found.append((name, dtype, tuple(engine.get_tensor_shape(name))))
        order = {output.name: at for at, output in enumerate(self.spec.outputs)}
        return sorted(found, key=lambda tensor: order.get(tensor[0], -1))

    def check(self) -> None:
        """Compares the engine with the manifest; raises BundleError if they differ."""
        inputs = [(name, dtype if shape == (-1, -1) else None) for name, dtype, shape in self.tensors(inputs=True)]
        check_interface(self.spec, inputs, self.tensors(inputs=False), "engine")

    def _place(self, scratch: int, scratch_size: int, buffers: Mapping[str, Buffer]) -> None:
        for context in self._contexts.values():
            context.set_device_memory(scratch, scratch_size)
            for name, buffer in buffers.items():
                if not context.set_tensor_address(name, buffer.address):
                    raise BundleError(f"{self.spec.path}: {self._library.reason()}")

    def _program(self, inputs: Mapping[str, _Extent]) -> _TrtProgram:
        return _TrtProgram(self._library, inputs, self._device, self._contexts)

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
    def __init__(
        self, library: _Library, inputs: Mapping[str, _Extent], device: Device, contexts: Mapping[int, Native]
    ) -> None:
        self.records_itself = library.flavour == "rtx"
        self._library = library
        self._inputs = inputs
        self._stream = device.stream
        self._contexts = contexts
        self._set: dict[int, Shape] = {}

    def prepare(self, shape: Shape, *, graph: bool) -> None:
        """Does nothing: a context learns a shape when it is first queued."""

    def enqueue(self, shape: Shape) -> None:
        context = self._contexts[shape.length]
        if self._set.get(shape.length) != shape:
            self._set.pop(shape.length, None)  # after a failure below, the context has no valid shape
            for name, extent in self._inputs.items():
                if not context.set_input_shape(name, extent(shape)):
                    raise ProgramError(f"TensorRT: {self._library.reason()}")
            self._set[shape.length] = shape
        if not context.execute_async_v3(self._stream):
            raise ProgramError(f"TensorRT: {self._library.reason()}")


class EnginePart:
    """An engine of a split model.

    Attributes:
        inputs: Name and type of each input, in ONNX Runtime's terms.
        outputs: Name, type and shape of each output.
    """

    def __init__(
        self,
        device: Device,
        engine: _Opened,
        program: _TrtProgram,
        buffers: Mapping[str, Buffer],
        extents: Mapping[str, _Extent],
    ) -> None:
        self.inputs = [(name, _WORDS[dtype]) for name, dtype, _ in engine.tensors(inputs=True)]
        self.outputs = [(name, _WORDS[dtype], shape) for name, dtype, shape in engine.tensors(inputs=False)]
        self._device, self._program, self._buffers, self._extents = device, program, buffers, extents

    def run(self, tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Returns the outputs for its own inputs among these tensors; raises CudaError or ProgramError."""
        given = {name: tensors[name] for name, _ in self.inputs}
        rows, length = next(values.shape[:2] for name, values in given.items() if values.ndim > 1 and name != POSITIONS)
        shape = Shape(rows, length, given[POSITIONS].shape[1] if POSITIONS in given else 0)
        for name, values in given.items():
            self._buffers[name].view(values.shape)[...] = values
            self._buffers[name].send(values.shape)
        self._program.enqueue(shape)
        found = {name: (self._buffers[name], extent(shape)) for name, extent in self._extents.items()}
        for buffer, size in found.values():
            buffer.fetch(size)
        self._device.wait()
        return {name: buffer.view(size).copy() for name, (buffer, size) in found.items()}


def open_part(spec: ModelSpec, device: Device, max_batch_tokens: int) -> EnginePart:
    """Opens the engine of a part; raises BundleError or CudaError."""
    return _Opened(_library(_build(spec).flavour), spec, device, KernelFiles()).part(max_batch_tokens)


def shapes_of(spec: ModelSpec, max_batch_tokens: int) -> list[Shape]:
    profiles = {profile.max[1]: profile for profile in _build(spec).profiles}
    shapes = shapes_for(spec, sorted(profiles), max_batch_tokens)
    return [shape for shape in shapes if _holds(profiles[shape.length], shape)]


def _library(flavour: tensorrt_library.Flavour) -> _Library:
    try:
        return _Library(flavour)
    except tensorrt_library.LibraryMissing as error:
        raise BundleError(str(error)) from error


def _extent(spec: ModelSpec, name: str, size: tuple[int, ...]) -> _Extent:
    """Returns a tensor's size in a shape; tensors between parts vary by rows and tokens."""
    if name in spec.inputs:
        return partial(Shape.input, name=name)
    for output in spec.outputs:
        if output.name == name:
            return partial(Shape.output, spec=output)
    return lambda shape: (shape.rows, *((shape.length if each < 0 else each) for each in size[1:]))


def _build(spec: ModelSpec) -> EngineBuild:
    if spec.build is None:
        raise BundleError(f"{spec.path}: not a TensorRT engine")
    return spec.build


def _holds(profile: ShapeProfile, shape: Shape) -> bool:
    return profile.min[0] <= shape.rows <= profile.max[0] and shape.masks <= min(MASK_SIZES[-1], shape.length)
