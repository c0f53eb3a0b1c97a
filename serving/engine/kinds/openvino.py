"""OpenVINO on the CPU; see `serving.engine.cpu.openvino`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.engine.kinds.kind import EngineKind

if TYPE_CHECKING:
    from bertserve.serving.engine.base import Backend, EngineLoad


class OpenVino(EngineKind):
    name = "openvino"
    title = "OpenVINO on a CPU"
    rank = 40
    compute_type = "cpu+openvino"
    library = "OpenVINO"
    module = "openvino"
    packages = ("openvino",)
    extra = "openvino"
    made_for = ("openvino",)
    """ONNX Runtime's own graphs have fused operators that OpenVINO lacks."""
    forms = ("int8-openvino",)

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        from bertserve.serving.engine.cpu.openvino import VERSION, OpenVinoBackend  # noqa: PLC0415  see `EngineKind`

        return OpenVinoBackend(load.models, load.threads), VERSION


ENGINE = OpenVino()
