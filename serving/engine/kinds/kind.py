"""The description of an engine: everything that the server needs to know besides running batches."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from bertserve.serving.errors import BundleError
from bertserve.serving.host import installing

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from bertserve.serving.engine.base import Backend, EngineLoad
    from bertserve.serving.engine.gpu.cuda import Device
    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.engine.specs import Gpu, ModelSpec


class EngineSetting(NamedTuple):
    """A setting of one engine.

    Attributes:
        most: Maximum of a number; the minimum is 0.
        pattern: Regular expression that a text must match.
        example: A valid text, for the error.
    """

    default: float | str
    help: str
    most: float = 0.0
    pattern: str = ""
    example: str = ""


class EngineKind:
    """An engine that `--engine` can name.

    Its module is imported along with the settings, so it imports its library only in `open`.
    """

    name: str
    title: str
    """Phrase that names the runtime, for use in a sentence."""
    help = ""
    """Sentence for the help of `--engine`."""
    settings: Mapping[str, EngineSetting] = {}
    """The engine's own settings, by name; `EngineLoad.options` has their values."""
    rank: int
    """Sort key among the engines; the lowest comes first."""
    auto = False
    """Whether `--engine auto` tries it."""
    compute_type = "cpu"
    """Compute type in TEI's notation: `cpu` or `gpu`, and the library after a plus."""

    on_gpu = False
    spares_cpu = False
    """Whether the CPU cores are idle while it computes."""
    library = ""
    """Name of its library."""
    module = ""
    """Module of its library; empty if it needs none, or if GPU discovery finds it."""
    packages: Sequence[str] = ()
    """Distributions that provide its library; any one is enough."""
    extra = ""
    """The extra of bertserve that installs it."""
    parts: Sequence[str] = ()
    """Engines that it combines."""

    made_for: Sequence[str] = ()
    """Targets of the artifacts that are made for it and proven with it."""
    targets: Sequence[str] = ()
    """Targets that it runs, if not those of `made_for`."""
    per_gpu = False
    """Whether an artifact runs on one kind of GPU only."""
    second = ""
    """Target of a second artifact of a model, which it runs alongside the first."""
    second_needs = ""
    """What a model needs for `second` if it has no such artifact."""
    fastest: Sequence[str] = ("int8", "fp32", "fp16")
    """Precisions in order of preference. A CPU has no native fp16 arithmetic."""
    forms: Sequence[str] | None = None
    """Forms that `--model-id` exports for it in any precision; None for those of the requested precision."""
    compiles = False
    """Whether it compiles kernels worth caching for the next start."""
    keeps_costs = True
    """Whether its measured costs are worth caching."""

    def runs(self, target: str, gpu: str = "") -> bool:
        """Whether it runs artifacts of this target, on this kind of GPU if one is given."""
        return target == gpu if gpu and self.per_gpu else target in (self.targets or self.made_for)

    def exports(self, precision: str) -> Sequence[str]:
        """Returns the forms that `--model-id` exports for it; empty if the export makes none that it runs."""
        if self.forms is not None:
            return self.forms
        second = [f"int8-{self.second}"] if self.second and precision in {"auto", "int8"} else []
        return [*(("fp32", "int8") if precision == "auto" else (precision,)), *second]

    @property
    def installed(self) -> bool:
        return not self.module or find_spec(self.module) is not None

    def obstacle(self, targets: Collection[str], *, asked: bool) -> str:  # noqa: ARG002  some engines read it
        """Returns why it cannot run here, as a sentence; empty if it may. Loads and imports nothing.

        Args:
            targets: Targets of all artifacts of the models.
            asked: Whether `--engine` names one.
        """
        return "" if self.installed else self.cannot(f"{self.library} is not installed; run `{installing(self.extra)}`")

    def unfit(self, models: Sequence[ModelSpec], machine: Machine, gpus: Sequence[Gpu]) -> Iterable[str]:  # noqa: ARG002
        """Yields sentences on why it cannot run these models on these GPUs, as far as known without trying."""
        return ()

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        """Opens the engine in the engine process; returns it with its models, and its library's version.

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
    """INT8 is often no faster on GPUs, and always less accurate."""

    def open(self, load: EngineLoad) -> tuple[Backend, str]:
        from bertserve.serving.engine.gpu import cuda_driver  # noqa: PLC0415  see `EngineKind`
        from bertserve.serving.engine.gpu.cuda import Device  # noqa: PLC0415

        try:
            device = Device(cuda_driver.load(), load.gpus[0] if load.gpus else 0)
            return self.open_on(device, load)
        except cuda_driver.CudaError as error:
            raise BundleError(self.cannot(cuda_driver.explained(error))) from error

    def open_on(self, device: Device, load: EngineLoad) -> tuple[Backend, str]:
        """Opens the engine on a device; a CudaError refuses the models."""
        raise NotImplementedError
