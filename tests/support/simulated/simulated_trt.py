"""TensorRT on a simulated GPU: an engine's file holds an ONNX graph, which the CPU computes when the stream says so.

The rules of the real classes are held: a context has its profile, its scratch memory, every address and shapes inside
the profile before it runs; an engine of another compute capability, or with leave to run host code, does not open.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_HEAD = struct.Struct("<4s12xQ3B")
_SCRATCH = 4096
VERSIONS = {"rtx": "1.7.1.116", "enterprise": "11.4.0.7"}
_FREE = {"batch": 32, "masks": 16}


def plan(graph: bytes, flavour: str, lengths: Sequence[int], capability: Sequence[int] = (7, 5)) -> bytes:
    """An engine's file, with the head that real ones have."""
    said = json.dumps({"lengths": list(lengths), "capability": list(capability)}).encode()
    version = [int(word) for word in VERSIONS[flavour].split(".")[:3]]
    size = _HEAD.size + 4 + len(said) + len(graph)
    return _HEAD.pack(b"\0trt", size, *version) + struct.pack("<I", len(said)) + said + graph


def builder(name: str, order: str) -> Any:
    """The real library, which builds a real engine; the simulated runtime is then given one that it can run."""
    here = Path(__file__).parent
    sys.path[:] = [place for place in sys.path if Path(place) != here]
    del sys.modules[name]
    real = importlib.import_module(name)
    said = json.loads(order)

    class Builder(real.Builder):  # type: ignore[misc]  # the class is known at run time
        def build_serialized_network(self, network: Any, config: Any) -> bytes | None:
            if super().build_serialized_network(network, config) is None:
                return None
            lengths = [profile["max"][1] for profile in said["profiles"]]
            capability = [int(digit) for digit in said["capability"].removeprefix("SM")]
            return plan(Path(said["graph"]).read_bytes(), "rtx", lengths, capability)

    real.Builder = Builder
    return real


def simulate(flavour: str, ort: Any, driver: Any) -> Any:
    """A module of TensorRT, of the flavour `rtx` or `enterprise`."""

    class ILogger:
        Severity = SimpleNamespace(INTERNAL_ERROR=0, ERROR=1)

    class Runtime:
        def __init__(self, log: Any) -> None:
            self.log = log
            self.engine_host_code_allowed = True

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            assert not self.engine_host_code_allowed
            said_size = struct.unpack_from("<I", data, _HEAD.size)[0]
            at = _HEAD.size + 4
            said = json.loads(data[at : at + said_size])
            if said["capability"] != list(driver.MACHINE.gpus[0]["capability"]):
                self.log.log(1, "The engine plan file is generated on an incompatible device")
                return None
            return Engine(self.log, said["lengths"], ort.InferenceSession(data[at + said_size :]))

    class Config:
        def __init__(self) -> None:
            self.strategy = self.cuda_graph_strategy = self.cache = ""
            self.dynamic_shapes_kernel_specialization_strategy = ""

        def set_execution_context_allocation_strategy(self, strategy: str) -> None:
            self.strategy = strategy

        def create_runtime_cache(self) -> Cache:
            return Cache()

        def set_runtime_cache(self, cache: Cache) -> bool:
            self.cache = cache
            return True

    class Cache:
        def __init__(self) -> None:
            self.known = b""

        def deserialize(self, blob: bytes) -> bool:
            self.known = bytes(blob) if blob == self.serialize() else b""
            return bool(self.known)

        def serialize(self) -> bytes:
            return f"kernels for driver {driver.MACHINE.driver}".encode()

    class Engine:
        opened: list[Engine] = []  # noqa: RUF012  shared on purpose: a test looks at all

        def __init__(self, log: Any, lengths: list[int], session: Any) -> None:
            self.log, self.lengths, self.session = log, lengths, session
            self.tensors = {
                **{tensor.name: ("in", tensor) for tensor in session.get_inputs()},
                **{tensor.name: ("out", tensor) for tensor in session.get_outputs()},
            }
            self.num_io_tensors = len(self.tensors)
            self.device_memory_size_v2 = _SCRATCH
            self.contexts: list[Context] = []
            self.configs: list[Config] = []
            Engine.opened.append(self)

        def get_tensor_name(self, place: int) -> str:
            return list(self.tensors)[place]

        def get_tensor_mode(self, name: str) -> str:
            return self.tensors[name][0]

        def get_tensor_dtype(self, name: str) -> str:
            return {"tensor(int32)": "i32", "tensor(float)": "f32"}[self.tensors[name][1].type]

        def get_tensor_shape(self, name: str) -> tuple[int, ...]:
            return tuple(size if isinstance(size, int) else -1 for size in self.tensors[name][1].shape)

        def create_runtime_config(self) -> Config:
            return Config()

        def create_execution_context(self, how: Any) -> Context:
            if flavour == "rtx":
                self.configs.append(how)
                how = how.strategy
            assert how == "user managed"
            self.contexts.append(Context(self))
            return self.contexts[-1]

    class Context:
        def __init__(self, engine: Engine) -> None:
            self.engine = engine
            self.length = 0
            self.scratch: tuple[int, int] = (0, 0)
            self.addresses: dict[str, int] = {}
            self.shapes: dict[str, tuple[int, ...]] = {}
            self.fails = False

        def set_optimization_profile_async(self, place: int, stream: int) -> bool:
            assert int(stream) in driver.MACHINE.streams
            self.length = self.engine.lengths[place]
            return True

        def set_device_memory(self, address: int, size: int) -> None:
            assert address in driver.MACHINE.memory
            self.scratch = (address, size)

        def set_tensor_address(self, name: str, address: int) -> bool:
            self.addresses[name] = address
            return address in driver.MACHINE.memory

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            axes = self.engine.tensors[name][1].shape
            most = [_FREE.get(axis, self.length) for axis in axes]
            fits = all(0 < size <= limit for size, limit in zip(shape, most, strict=True))
            fits &= "sequence" not in axes or shape[1] == self.length
            if not fits:
                self.engine.log.log(1, "Static dimension mismatch")
            self.shapes[name] = tuple(shape)
            return fits

        def execute_async_v3(self, stream: int) -> bool:
            inputs = [name for name, (mode, _) in self.engine.tensors.items() if mode == "in"]
            ready = self.scratch[1] >= _SCRATCH and set(self.addresses) == set(self.engine.tensors)
            if self.fails or not ready or set(self.shapes) != set(inputs):
                self.engine.log.log(1, "IExecutionContext::enqueueV3: Error Code 3: API Usage Error")
                return False
            shapes = dict(self.shapes)
            driver.give(stream, lambda: self._compute(shapes))
            return True

        def _compute(self, shapes: dict[str, tuple[int, ...]]) -> None:
            binding = self.engine.session.io_binding()
            for name, shape in shapes.items():
                binding.bind_input(name, "cpu", 0, np.int32, shape, self.addresses[name])
            outputs = [name for name, (mode, _) in self.engine.tensors.items() if mode == "out"]
            for name in outputs:
                binding.bind_output(name, "cpu")
            self.engine.session.run_with_iobinding(binding)
            for name, value in zip(outputs, binding.copy_outputs_to_cpu(), strict=True):
                data = np.ascontiguousarray(value)
                driver.ctypes.memmove(self.addresses[name], data.ctypes.data, data.nbytes)

    return SimpleNamespace(
        __version__=VERSIONS[flavour],
        ILogger=ILogger,
        Runtime=Runtime,
        Engine=Engine,
        classes={
            "Runtime": ["engine_host_code_allowed", *_public(Runtime)],
            "Engine": ["num_io_tensors", "device_memory_size_v2", *_public(Engine)],
            "Config": [
                *("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy"),
                *_public(Config),
            ],
            "Cache": _public(Cache),
            "Context": _public(Context),
        },
        TensorIOMode=SimpleNamespace(INPUT="in", OUTPUT="out"),
        int32="i32",
        float32="f32",
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
        CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE="whole graph"),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
    )


def _public(kind: type) -> list[str]:
    own = {"opened"}
    return [name for name in vars(kind) if not name.startswith("_") and name not in own]
