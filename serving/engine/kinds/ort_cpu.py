"""ONNX Runtime on the CPU; see `serving.engine.cpu.ort`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from serving.engine.kinds.kind import EngineKind

if TYPE_CHECKING:
    from serving.engine.base import Backend, EngineLoad


class OrtCpu(EngineKind):
    name = "ort-cpu"
    title = "ONNX Runtime on a CPU"
    rank = 50
    auto = True
    library = "ONNX Runtime"
    module = "onnxruntime"
    packages = ("onnxruntime", "onnxruntime-gpu")
    extra = "cpu"
    made_for = ("cpu",)

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        from serving.engine.cpu import ort  # noqa: PLC0415  see `EngineKind`
        from serving.engine.parts import pipeline  # noqa: PLC0415

        return ort.OrtCpuBackend(load.models, load.threads, partial(pipeline.load, nice=load.nice)), ort.VERSION


ENGINE = OrtCpu()
