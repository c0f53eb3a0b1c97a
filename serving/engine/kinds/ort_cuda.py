"""ONNX Runtime on a GPU; see `serving.engine.gpu.ort_cuda`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.engine.kinds.kind import GpuKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bertserve.serving.engine.base import Backend, EngineLoad
    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.engine.specs import Gpu, ModelSpec


class OrtCuda(GpuKind):
    name = "ort-cuda"
    title = "ONNX Runtime on a GPU"
    rank = 20
    compute_type = "gpu+onnxruntime"
    packages = ("onnxruntime-gpu", "onnxruntime")
    made_for = ("cuda",)
    forms = ("fp16",)

    def unfit(self, models: Sequence[ModelSpec], machine: Machine, gpus: Sequence[Gpu]) -> Iterable[str]:  # noqa: ARG002
        yield from map(self.cannot, machine.obstacles("ONNX Runtime", "ort-cuda", gpus[0]))

    def open_on(self, device: Device, load: EngineLoad) -> tuple[Backend, str]:
        from bertserve.serving.engine.gpu import ort_cuda  # noqa: PLC0415  see `EngineKind`

        return ort_cuda.OrtCudaBackend(load.models, device, load.max_batch_tokens), ort_cuda.VERSION


ENGINE = OrtCuda()
