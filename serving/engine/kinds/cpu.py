"""ONNX Runtime and OpenVINO combined; see `serving.engine.cpu.hybrid`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving import host
from bertserve.serving.engine.kinds.kind import EngineKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from bertserve.serving.engine.base import Backend, EngineLoad


class Cpu(EngineKind):
    name = "cpu"
    title = "`cpu`"
    rank = 30
    auto = True
    help = (
        "`cpu` combines ONNX Runtime and OpenVINO, and uses the faster one for each input length. `auto` takes it if "
        "OpenVINO is installed and a model has proven artifacts of one precision for both; other models run on ONNX "
        "Runtime."
    )
    parts = ("ort-cpu", "openvino")
    library = "OpenVINO"
    module = "openvino"
    extra = "openvino"
    targets = ("cpu",)
    second = "openvino"
    second_needs = "an artifact of its own; export again with --precision int8 --precision int8-openvino"
    compiles = True

    def obstacle(self, targets: Collection[str], *, asked: bool) -> str:
        if self.installed and not asked and host.saturates() and self.second in targets:
            reason = "OpenVINO would compute INT8 in fp32, and ONNX Runtime is faster"
            return f"the engine cpu has no advantage here: this processor has no VNNI, so {reason}"
        return super().obstacle(targets, asked=asked)

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        from bertserve.serving.engine.cpu import hybrid  # noqa: PLC0415  see `EngineKind`

        backend = hybrid.HybridCpuBackend(load.models, load.threads, load.costs, load.kernels)
        return backend, hybrid.VERSION


ENGINE = Cpu()
