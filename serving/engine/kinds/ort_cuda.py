"""ONNX Runtime on a GPU; see `serving.engine.gpu.ort_cuda`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from serving.engine.kinds.kind import GpuKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from serving.engine.base import Backend, Load
    from serving.engine.gpu.cuda import Device
    from serving.engine.gpu.discovery import Machine
    from serving.records import Gpu, ModelSpec


class OrtCuda(GpuKind):
    name = "ort-cuda"
    title = "ONNX Runtime on a GPU"
    rank = 20
    compute_type = "gpu+onnxruntime"
    packages = ("onnxruntime-gpu", "onnxruntime")
    made_for = ("cuda",)
    over_gpus = True
    forms = ("fp16",)

    def unfit(self, models: Sequence[ModelSpec], machine: Machine, gpus: Sequence[Gpu]) -> Iterable[str]:
        yield from map(self.cannot, machine.obstacles("ONNX Runtime", "ort-cuda", gpus[0]))
        for model in models:
            if model.ranks > len(gpus):
                there_are = f"there are {len(gpus)} of one kind"
                yield self.cannot(f"{model.name} is split between {model.ranks} GPUs, and {there_are}")

    def open_on(self, device: Device, load: Load) -> tuple[Backend, str]:
        from serving.engine.gpu import ort_cuda  # noqa: PLC0415  see `EngineKind`
        from serving.engine.parts import cards  # noqa: PLC0415

        load_model = partial(cards.load, gpus=load.gpus)
        return ort_cuda.OrtCudaBackend(load.models, device, load.max_batch_tokens, load_model), ort_cuda.VERSION


ENGINE = OrtCuda()
