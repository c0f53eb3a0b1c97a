"""ONNX Runtime on the CPU; see `serving.engine.cpu.ort`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.engine.kinds.kind import EngineKind

if TYPE_CHECKING:
    from bertserve.serving.engine.base import Backend, EngineLoad


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
        from bertserve.serving.engine.cpu import ort  # noqa: PLC0415  see `EngineKind`

        return ort.OrtCpuBackend(load.models, load.threads), ort.VERSION


ENGINE = OrtCpu()
