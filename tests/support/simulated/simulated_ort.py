"""ONNX Runtime's CUDA provider on a simulated GPU: the CPU provider does the work when the stream comes to it.

Everything of ONNX Runtime is the real thing but for the provider's name: sessions, bindings to addresses and run
options. A graph is written down by its annotation, so that an annotation that is used for two shapes shows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def simulate(ort: Any, driver: Any, *, falls_back: bool = False) -> SimpleNamespace:
    """What `ort_cuda` uses of the module `onnxruntime`.

    Args:
        ort: The real module.
        driver: The simulated driver.
        falls_back: Do as ONNX Runtime does where CUDA's libraries are missing: run on the CPU and say so when asked.
    """

    class Binding:
        """An IOBinding: what is said to be on the GPU is in this machine's memory."""

        def __init__(self, session: Any, device_id: str) -> None:
            self.real = session.io_binding()
            self.device_id = int(device_id)
            self.shapes: list[tuple[int, ...]] = []

        def bind_input(self, name: str, device: str, ordinal: int, kind: Any, shape: Any, address: int) -> None:
            assert (device, ordinal) == ("cuda", self.device_id)
            assert address in driver.MACHINE.memory
            self.shapes.append(tuple(shape))
            self.real.bind_input(name, "cpu", 0, kind, shape, address)

        def bind_output(self, name: str, device: str, ordinal: int, kind: Any, shape: Any, address: int) -> None:
            assert (device, ordinal) == ("cuda", self.device_id)
            assert address in driver.MACHINE.memory
            self.real.bind_output(name, "cpu", 0, kind, shape, address)

    class Session:
        """A session of the CUDA provider, which must be given stream and graphs."""

        runs: list[str] = []  # noqa: RUF012  shared on purpose: a test looks at all runs

        def __init__(self, data: bytes, options: Any, providers: Any) -> None:
            ((name, said),) = providers
            assert name == CUDA
            assert said["use_tf32"] == "0"
            assert said["enable_cuda_graph"] == "1"
            self.device_id = said["device_id"]
            self.stream = int(said["user_compute_stream"])
            self.real = ort.InferenceSession(data, options, providers=[CPU])
            self.graphs: dict[str, Any] = {}

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def get_providers(self) -> list[str]:
            return [CPU] if falls_back else [CUDA, CPU]

        def io_binding(self) -> Binding:
            return Binding(self.real, self.device_id)

        def run_with_iobinding(self, binding: Binding, options: Any) -> None:
            graph = options.get_run_config_entry("gpu_graph_id")
            assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
            if graph != "-1":
                assert self.graphs.setdefault(graph, binding.shapes) == binding.shapes
            self.runs.append(graph)
            driver.give(self.stream, lambda: self.real.run_with_iobinding(binding.real))

    return SimpleNamespace(
        InferenceSession=Session,
        SessionOptions=ort.SessionOptions,
        RunOptions=ort.RunOptions,
        IOBinding=Binding,
        get_available_providers=lambda: [CUDA, CPU],
        preload_dlls=lambda: None,
        set_default_logger_severity=ort.set_default_logger_severity,
    )
