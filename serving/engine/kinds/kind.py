"""What an engine says of itself before it runs: everything that the rest of the server asks beside running batches."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from serving.engine.base import lanes_for
from serving.errors import BundleError
from serving.host import installing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from serving.engine.base import Backend, EngineLoad
    from serving.engine.gpu.cuda import Device
    from serving.engine.gpu.discovery import Machine
    from serving.engine.gpu.model import BackendModel
    from serving.engine.specs import Gpu, ModelSpec

    LoadSplit: TypeAlias = Callable[[ModelSpec], BackendModel]


class EngineSetting(NamedTuple):
    """A setting of one engine.

    Attributes:
        most: The largest number that it takes; the least is 0.
        pattern: What a text must match.
        example: Of such a text, for the error.
    """

    default: float | str
    help: str
    most: float = 0.0
    pattern: str = ""
    example: str = ""


class EngineKind:
    """An engine that `--engine` can name.

    Its module is imported wherever the settings are, so it imports its library only in `open`.
    """

    name: str
    title: str
    """What runs the models, in a sentence."""
    help = ""
    """A sentence for the help of `--engine`."""
    settings: Mapping[str, EngineSetting] = {}
    """Settings of its own, by name; `EngineLoad.options` has their values."""
    rank: int
    """Its place among the engines: the lowest goes first."""
    auto = False
    """Whether `--engine auto` tries it."""
    compute_type = "cpu"
    """TEI's word for what computes: `cpu` or `gpu`, and the library behind a plus."""

    on_gpu = False
    spares_cpu = False
    """Whether it leaves the cores idle while it computes."""
    library = ""
    """The name of what it imports."""
    module = ""
    """What it imports; empty where it needs nothing, or where the examination of the GPUs finds it."""
    packages: Sequence[str] = ()
    """Distributions that bring its library, any one of them."""
    extra = ""
    """The extra of bertserve that brings it."""
    parts: Sequence[str] = ()
    """The engines that it is made of."""

    made_for: Sequence[str] = ()
    """Targets of the artifacts that are made for it, and proven with it."""
    targets: Sequence[str] = ()
    """Of those that it runs, where they are others."""
    per_gpu = False
    """Whether an artifact runs on one kind of GPU alone."""
    runs_cpu_parts = False
    """Whether it also runs what is split by layers for CPUs in fp32: those graphs are the same for GPUs."""
    second = ""
    """Target of a further artifact of a model that it runs beside the first."""
    second_needs = ""
    """What a model needs for that, where it has no such artifact."""
    fastest: Sequence[str] = ("int8", "fp32", "fp16")
    """Precisions, the best first; a CPU has no arithmetic of its own for fp16."""
    forms: Sequence[str] | None = None
    """What `--model-id` exports for it in any precision; None for the precision that is asked for."""
    compiles = False
    """Whether it compiles kernels that are worth keeping for the next start."""
    keeps_costs = True
    """Whether what its batches cost is worth keeping."""

    def runs(self, target: str, gpu: str = "") -> bool:
        """Whether it runs artifacts of this target, on this kind of GPU where one is named."""
        return target == gpu if gpu and self.per_gpu else target in (self.targets or self.made_for)

    def exports(self, precision: str) -> Sequence[str]:
        """The forms that `--model-id` exports for it; none where that makes nothing that it runs."""
        if self.forms is not None:
            return self.forms
        second = [f"int8-{self.second}"] if self.second and precision in {"auto", "int8"} else []
        return [*(("fp32", "int8") if precision == "auto" else (precision,)), *second]

    @property
    def installed(self) -> bool:
        return not self.module or find_spec(self.module) is not None

    def obstacle(self, targets: Collection[str], *, asked: bool) -> str:  # noqa: ARG002  of some
        """Why it does not run here, as a sentence; empty where it may. Nothing is loaded or imported for that.

        Args:
            targets: Of all artifacts of the models.
            asked: Whether `--engine` names one.
        """
        return "" if self.installed else self.cannot(f"{self.library} is not installed; run `{installing(self.extra)}`")

    def unfit(self, models: Sequence[ModelSpec], machine: Machine, gpus: Sequence[Gpu]) -> Iterable[str]:  # noqa: ARG002
        """Why it does not run these models on these GPUs, in sentences, as far as can be said without trying."""
        return ()

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        """In the engine process: the engine with its models, and the version of its library.

        Raises:
            BundleError: A model cannot be served.
            ModuleNotFoundError: Its library is not installed.
        """
        raise NotImplementedError

    def cannot(self, problem: str) -> str:
        return f"the engine {self.name} cannot run here: {problem}"


class GpuKind(EngineKind):
    auto = True
    on_gpu = True
    spares_cpu = True
    extra = "gpu"
    fastest = ("fp16", "int8", "fp32")
    """INT8 is often no faster there and always less exact."""

    def open(self, load: EngineLoad, *, in_one_process: bool = False) -> tuple[Backend, str]:
        """As of every engine; in one process, tools prove models that are split."""
        from serving.engine.gpu import cuda_driver  # noqa: PLC0415  see `EngineKind`
        from serving.engine.gpu.cuda import Device  # noqa: PLC0415

        def load_split(model: ModelSpec) -> BackendModel:
            from serving.engine.parts import devices  # noqa: PLC0415  needs ONNX Runtime
            from serving.engine.parts.processes import Place  # noqa: PLC0415  likewise

            gpus = devices.gpus_of(model.stages, load.gpus or [device.gpu.ordinal])
            engine = cast("Literal['ort-cuda', 'tensorrt']", self.name)
            places = [Place(engine, gpu, load.max_batch_tokens) for gpu in gpus]
            if in_one_process:
                return devices.load_here(model, places[0], device)
            return devices.load(model, places, device, len(lanes_for(load.models, 1)))

        try:
            device = Device(cuda_driver.load(), load.gpus[0] if load.gpus else 0)
            return self.open_on(device, load, load_split)
        except cuda_driver.CudaError as error:
            raise BundleError(self.cannot(cuda_driver.explained(error))) from error

    def open_on(self, device: Device, load: EngineLoad, load_split: LoadSplit) -> tuple[Backend, str]:
        """As `open`; what it raises of CUDA refuses the models. A model split by layers is loaded by `load_split`."""
        raise NotImplementedError
