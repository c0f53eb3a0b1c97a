"""An engine in one file: onnx's reference evaluator. A test puts this file among the server's engines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bertserve.serving.engine.batches import Padder
from bertserve.serving.engine.cpu.backend import CpuBackend
from bertserve.serving.engine.kinds.kind import EngineKind, EngineSetting

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onnx.reference import ReferenceEvaluator

    from bertserve.serving.engine.base import Backend, Batch, EngineLoad
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array


class Reference(EngineKind):
    name = "reference"
    title = "onnx's reference evaluator"
    rank = 25
    auto = True
    help = "`reference` is slow."
    settings: Mapping[str, EngineSetting] = {"reference_ms": EngineSetting(0.0, "Least time of a batch.", most=1000)}
    compute_type = "cpu+reference"
    module = "onnx"
    packages = ("onnx",)
    extra = "export"
    targets = ("cpu",)
    fastest = ("fp32",)

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        import onnx  # noqa: PLC0415  see `EngineKind`
        from onnx.reference import ReferenceEvaluator  # noqa: PLC0415

        least_s = float(load.options["reference_ms"]) / 1e3

        def models(spec: ModelSpec, threads: Sequence[int]) -> list[_Model]:
            return [_Model(ReferenceEvaluator(spec.path), Padder(spec), least_s) for _ in threads]

        return CpuBackend(load.models, load.threads, models), onnx.__version__


class _Model:
    def __init__(self, evaluator: ReferenceEvaluator, padder: Padder, least_s: float) -> None:
        self._evaluator = evaluator
        self._padder = padder
        self._least_s = least_s

    def run(self, batch: Batch) -> Sequence[Array]:
        time.sleep(self._least_s)
        arrays: Sequence[Array] = self._evaluator.run(None, self._padder.tensors(batch))
        return arrays

    def trim(self) -> None:
        pass


ENGINE = Reference()
