"""TensorRT and TensorRT for RTX; see `serving.engine.gpu.tensorrt`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from bertserve.serving.engine.kinds.kind import GpuKind
from bertserve.serving.host import command

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bertserve.serving.engine.base import Backend, EngineLoad
    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.engine.specs import EngineBuild, Gpu, ModelSpec

GpuTarget = Literal["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"]
"""Targets (compute capabilities) that engines are built for."""


class TensorRt(GpuKind):
    name = "tensorrt"
    title = "TensorRT"
    rank = 10
    compute_type = "gpu+tensorrt"
    packages = ("tensorrt-rtx-cu13", "tensorrt")
    made_for: tuple[GpuTarget, ...] = get_args(GpuTarget)
    per_gpu = True
    forms = ()
    compiles = True

    def unfit(self, models: Sequence[ModelSpec], machine: Machine, gpus: Sequence[Gpu]) -> Iterable[str]:
        for model in models:
            if model.build is not None:
                yield from map(self.cannot, misfits(Path(model.path).name, model.build, machine, gpus[0]))

    def open_on(self, device: Device, load: EngineLoad) -> tuple[Backend, str]:
        from bertserve.serving.engine.gpu.tensorrt import TensorRtBackend  # noqa: PLC0415  see `EngineKind`

        backend = TensorRtBackend(load.models, device, load.max_batch_tokens, load.kernels)
        return backend, backend.version


def misfits(file: str, build: EngineBuild, machine: Machine, gpu: Gpu) -> Iterable[str]:
    """Yields the reasons why a built engine cannot run with the installed TensorRT."""
    yield from machine.obstacles("TensorRT", build.flavour, gpu)
    library = machine.libraries.get(build.flavour)
    # The build number does not matter.
    if library is not None and library.version.split(".")[:3] != build.version.split(".")[:3]:
        yield (
            f"{file} was built with TensorRT {build.version}, but {library.version} is installed; install that"
            f" version, or build an engine here with `{command('build')}`"
        )


ENGINE = TensorRt()
