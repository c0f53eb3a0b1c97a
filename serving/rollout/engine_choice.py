"""Which engine runs the models: what `--engine auto` tries, in which order, and why an engine was rejected.

An engine is taken if the machine can run it and every model has a form for it; of the engine `cpu` OpenVINO runs the
models that have a second form, and ONNX Runtime the others. A named engine runs or the server
does not start; `auto` goes on to the next and ends with ONNX Runtime on the CPU. A server on a CPU that has or should
have a GPU is degraded.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from serving import host
from serving.engine.gpu import discovery
from serving.errors import BundleError, StartupError
from serving.inference.served_models import Repository
from serving.logs import members, tell
from serving.models.bundle import read_bundle, warn_of_schema
from serving.models.forms import form_of, log_agreement, runs_on_a_gpu, verified
from serving.models.manifest import ENGINE_GRAPHS
from serving.models.node_cache import libraries_of, with_proofs
from serving.records import OFF_THE_CPU, ON_A_GPU, EngineChoice, RejectedEngine
from serving.rollout.processor_check import ProcessorCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from serving.engine.gpu.discovery import Library, Machine
    from serving.inference.served_models import ServedModel
    from serving.models.bundle import Bundle
    from serving.models.forms import ModelForm
    from serving.records import EngineBuild, Gpu
    from serving.settings import EngineName, Settings

log = logging.getLogger("bertserve")

AUTO: tuple[EngineName, ...] = ("tensorrt", "ort-cuda", "cpu", "ort-cpu")

BUILT: EngineName = "tensorrt"
"""The engine that a node builds for itself."""

_FOR_BOTH = (
    "proven artifacts of the precision that is served for both libraries; `bertserve export` makes INT8 for both where"
    " OpenVINO is installed"
)

_WITHOUT_VNNI = "this processor has no VNNI, so OpenVINO would multiply INT8 in fp32, and ONNX Runtime is faster"

_LEAST_CAPABILITY = {13: (7, 5), 12: (5, 0)}
"""The lowest compute capability for which libraries have kernels, by the major version of their CUDA."""

_MIB = 1 << 20
_WORKING_FACTOR, _WORKING_MIB = 1.3, 500
"""Memory on a GPU: a multiple of the models' size for buffers, and a fixed amount for CUDA and the libraries."""

_NOT_LOOKED_AT = discovery.Machine(problem="no GPU was looked for")


@dataclass(slots=True, frozen=True)
class Choice:
    """What runs the models.

    Attributes:
        repository: The models, each in the form that the engine runs.
        gpus: The GPUs in use; none on a CPU.
        rejected: What was tried before, the best first.
        degraded: Whether it is less than was meant.
        left_out: Why GPUs of the same kind do not take part.
        by_default: Whether nobody asked for a precision.
    """

    engine: EngineName
    repository: Repository
    gpus: tuple[Gpu, ...] = ()
    rejected: tuple[RejectedEngine, ...] = ()
    degraded: bool = False
    left_out: tuple[str, ...] = ()
    by_default: bool = True

    def summary(self) -> EngineChoice:
        return EngineChoice(self.engine, self.degraded, self.gpus, self.rejected, self.left_out)

    def log(self) -> None:
        where = f" on {len(self.gpus)} x {self.gpus[0].name}" if self.gpus else ""
        log.info("engine: %s%s", self.engine, where, extra=members(engine=self.engine, gpus=len(self.gpus)))
        for rejected in self.rejected:
            for_gpus = rejected.engine in ON_A_GPU
            if not for_gpus or self.degraded or self.gpus:
                say = log.warning if for_gpus else log.info  # a CPU without OpenVINO lacks nothing
                tell(say, "not the engine %s: %s", engine=rejected.engine, reason=rejected.reason)
        for reason in self.left_out:
            log.warning("a GPU is left out: %s", reason)
        single = [model.name for model in self.repository.models if self.engine == "cpu" and not model.second]
        if single:
            log.info("ONNX Runtime alone runs %s: OpenVINO needs %s", ", ".join(single), _FOR_BOTH)
        if self.by_default:
            for model in self.repository.models:
                log_agreement(model)


class Chooser:
    """Chooses an engine, and another one where that fails.

    Args:
        look: Finds the GPUs; called at most once, and only if it matters.
    """

    def __init__(self, settings: Settings, look: Callable[[], Machine] = discovery.look) -> None:
        self._settings = settings
        self._look = look
        self._machine = _NOT_LOOKED_AT
        self._rejected: dict[str, str] = {}
        self._check = ProcessorCheck(settings.cache_dir, settings.threads or host.available_cpus())

    def first(self) -> Choice:
        """The best engine for the verified models.

        Raises:
            StartupError: The models must not be served, or nothing can run them.
        """
        engine = self._settings.engine
        bundles = verified(self._settings.models, self._settings.cache_dir)
        for bundle in bundles:
            warn_of_schema(bundle)
        return self._best(AUTO if engine == "auto" else (engine,), bundles)

    def instead(self, engine: str, reason: str, served: Sequence[ServedModel], *, crashed: bool) -> Choice | None:
        """The choice after an engine that did not start, or that `crashed` too often; None if there is none."""
        self.reject(engine, reason)
        left = AUTO[AUTO.index(engine) + 1 :] if engine in AUTO else ()
        if crashed:
            left = tuple(name for name in left if name not in ON_A_GPU)
        if engine not in ON_A_GPU:
            may = engine != self._settings.engine
        else:
            may = self._settings.cpu_fallback if crashed else self._settings.engine == "auto"
        if not left or not may:
            return None
        try:
            choice = self._best(left, self._bundles(served))
        except StartupError as error:
            log.warning("nothing can take the place of the engine %s: %s", engine, error)
            return None
        choice.log()
        return choice

    def must_build(self, path: Path) -> bool:
        """Whether a bundle has no TensorRT engine that runs here, but an engine graph to build one from."""
        bundle = self._read(path)
        try:
            gpu = self._gpus(BUILT, [bundle])[0]
            form = self._form(bundle, BUILT, gpu.target).artifact
        except (StartupError, BundleError):
            return self._can_build(bundle)
        fits = form.engine is None or not any(self._unfit(form.file, form.engine, gpu))
        return self._can_build(bundle) and not fits

    def _can_build(self, bundle: Bundle) -> bool:
        precision = self._settings.precision
        return bool(bundle.engine_graphs) if precision == "auto" else precision in bundle.engine_graphs

    def form_of(self, path: Path, engine: EngineChoice) -> ModelForm:
        """A version of a model, not verified yet, in the form that an engine can run."""
        form = self._form(self._read(path), engine.engine, engine.gpus[0].target if engine.gpus else "")
        if self._settings.precision == "auto":
            log_agreement(form)
        return form

    def _read(self, path: Path) -> Bundle:
        bundle, cache = read_bundle(path), self._settings.cache_dir
        return bundle if cache is None else with_proofs(cache, bundle)

    def _form(self, bundle: Bundle, engine: str, target: str) -> ModelForm:
        """The best form that answers on this processor as it was proven to."""
        settings = self._settings
        form = form_of(bundle, settings.precision, engine, unproven=settings.allow_unproven, target=target)
        refused = self._check.refused(form) if engine not in OFF_THE_CPU else {}
        if not refused:
            return form
        return self._form(replace(bundle, refused={**bundle.refused, **refused}), engine, target)

    def build_obstacle(self) -> str:
        """Why no engine can be built here; empty where one can."""
        machine = self._machine
        if machine.problem:
            return machine.problem
        if self._settings.precision not in {"auto", *ENGINE_GRAPHS}:
            return f"it would be {' or '.join(ENGINE_GRAPHS)}, and --precision {self._settings.precision} is asked for"
        flavours = [machine.libraries.get(flavour) for flavour in ("enterprise", "rtx")]
        problems = [" and ".join(_library_problems(machine, "TensorRT", each, machine.gpus[0])) for each in flavours]
        return problems[-1] if all(problems) else ""

    def built(self, served: Sequence[ServedModel]) -> Choice:
        """The built engine, for the models that are served now."""
        return self._opened(BUILT, self._bundles(served))

    @property
    def gpus(self) -> Sequence[Gpu]:
        return self._machine.gpus

    def reject(self, engine: str, reason: str) -> None:
        """Records why an engine is not taken. Clients see the reason, without this machine's paths."""
        for path in filter(None, (self._settings.models, self._settings.cache_dir)):
            reason = reason.replace(f"{os.path.abspath(path)}/", f"{path.name}/")  # noqa: PTH100  as it is named
        self._rejected[engine] = reason

    def rejected(self, engine: str) -> tuple[RejectedEngine, ...]:
        """The rejected engines that `auto` tries before this one, the best first."""
        before = AUTO[: AUTO.index(engine)] if engine in AUTO else ()
        return tuple(RejectedEngine(name, self._rejected[name]) for name in before if name in self._rejected)

    def _bundles(self, served: Sequence[ServedModel]) -> list[Bundle]:
        """The models' bundles, with what this node has proven or built since."""
        cache, bundles = self._settings.cache_dir, [replace(model.bundle, made_here=()) for model in served]
        return bundles if cache is None else [with_proofs(cache, bundle) for bundle in bundles]

    def _best(self, engines: Sequence[EngineName], bundles: Sequence[Bundle]) -> Choice:
        *better, last = engines
        for engine in better:
            try:
                return self._opened(engine, bundles)
            except StartupError as error:
                self.reject(engine, str(error))
        return self._opened(last, bundles)

    def _opened(self, engine: EngineName, bundles: Sequence[Bundle]) -> Choice:
        gpus = self._gpus(engine, bundles) if engine in ON_A_GPU else ()
        if engine == "cpu" and not libraries_of("openvino"):
            raise StartupError(f"the engine cpu cannot run here: it needs {host.installing('openvino')}")
        if engine == "cpu" and self._settings.engine == "auto" and host.saturates() and _has_openvino(bundles):
            raise StartupError(f"the engine cpu gains nothing here: {_WITHOUT_VNNI}")
        if engine not in OFF_THE_CPU:
            bundles = self._on_this_processor(engine, bundles)
        repository = Repository.of(
            bundles,
            self._settings.precision,
            engine=engine,
            target=gpus[0].target if gpus else "",
            allow_unproven=self._settings.allow_unproven,
            defaults=self._settings.defaults(),
        )
        if engine == "cpu" and not any(model.second for model in repository.models):
            raise StartupError(f"the engine cpu has nothing to choose from: no model has {_FOR_BOTH}")
        if gpus:
            for problem in self._problems(engine, repository, gpus):
                raise StartupError(f"the engine {engine} cannot run here: {problem}")
        stages = max(len(model.artifact.processes) for model in repository.models)
        if stages > 1:  # the GPUs are one device
            gpus = gpus[:stages]
        size = sum(
            model.artifact.total_bytes // max(1, min(len(model.artifact.processes), len(gpus)))
            for model in repository.models
        )
        free_bytes = self._machine.free_bytes
        full = {gpu.ordinal: problem for gpu in gpus if (problem := too_full(gpu, free_bytes[gpu.ordinal], size))}
        if full and (stages > 1 or len(full) == len(gpus)):
            raise StartupError(f"the engine {engine} cannot run here: {next(iter(full.values()))}")
        gpus, left_out = tuple(gpu for gpu in gpus if gpu.ordinal not in full), tuple(full.values())
        rejected = self.rejected(engine)
        has_gpu = bool(self._machine.gpus) or self._machine.broken
        wanted = has_gpu and any(each.engine in ON_A_GPU for each in rejected)
        degraded = (engine not in ON_A_GPU and wanted) or bool(left_out)
        by_default = self._settings.precision == "auto"
        return Choice(engine, repository, gpus, rejected, degraded, left_out, by_default)

    def _on_this_processor(self, engine: EngineName, bundles: Sequence[Bundle]) -> list[Bundle]:
        """The bundles without what answers otherwise here; raises StartupError where nothing is left of one."""
        try:
            return [self._form(bundle, engine, "").bundle for bundle in bundles]
        except BundleError as error:
            raise StartupError(str(error)) from error

    def _gpus(self, engine: EngineName, bundles: Sequence[Bundle]) -> tuple[Gpu, ...]:
        """The GPUs that an engine can use. All are of the first one's kind, so one bundle's engine fits them all."""
        # What was split for CPUs runs on GPUs where these are asked for.
        split = engine == self._settings.engine == "ort-cuda"
        if not runs_on_a_gpu(bundles, built=self._settings.build_engine, split=split):
            raise StartupError("the bundles hold nothing for a GPU; export with --precision fp16 or --tensorrt")
        if self._machine is _NOT_LOOKED_AT:
            self._machine = self._look()
        machine = self._machine
        if machine.problem:
            raise StartupError(f"the engine {engine} cannot run here: {machine.problem}")
        return tuple(gpu for gpu in machine.gpus if gpu.target == machine.gpus[0].target)

    def _problems(self, engine: EngineName, repository: Repository, gpus: Sequence[Gpu]) -> Iterator[str]:
        """Why an engine cannot run these models on these GPUs, as far as can be said without trying."""
        if engine == "ort-cuda":
            library = self._machine.libraries.get("ort-cuda")
            yield from _library_problems(self._machine, "ONNX Runtime", library, gpus[0])
        for model in repository.models if engine == "tensorrt" else ():
            if (build := model.artifact.engine) is not None:
                yield from self._unfit(model.artifact.file, build, gpus[0])

    def _unfit(self, file: str, build: EngineBuild, gpu: Gpu) -> Iterator[str]:
        """Why a built engine cannot run with the installed TensorRT."""
        library = self._machine.libraries.get(build.flavour)
        yield from _library_problems(self._machine, "TensorRT", library, gpu)
        # Without the build number.
        if library is not None and library.version.split(".")[:3] != build.version.split(".")[:3]:
            yield (
                f"{file} was built by TensorRT {build.version}, here is {library.version}; install that version, or"
                " build one here with `bertserve build`"
            )


def _has_openvino(bundles: Sequence[Bundle]) -> bool:
    return any(artifact.target == "openvino" for bundle in bundles for artifact in bundle.artifacts)


def too_full(gpu: Gpu, free_bytes: int, model_bytes: int) -> str:
    """Why a GPU has too little free memory for models; empty where it has enough."""
    wanted = model_bytes * _WORKING_FACTOR / _MIB + _WORKING_MIB
    free, total = free_bytes // _MIB, gpu.memory_bytes // _MIB
    if free >= wanted:
        return ""
    has = f"{free:,} MiB of {total:,} free"
    return f"{gpu.name} number {gpu.ordinal} has {has}, about {wanted:,.0f} are needed"


def _library_problems(machine: Machine, name: str, library: Library | None, gpu: Gpu) -> Iterator[str]:
    if library is None or library.problem:
        yield library.problem if library else f"{name} was not looked for"
        return
    if library.cuda > machine.cuda[0]:
        newest = "{}.{}".format(*machine.cuda)
        yield (
            f"the NVIDIA driver is too old: it runs CUDA up to {newest}, {name} {library.version} needs"
            f" {library.cuda}.0; install a newer driver, or {name} for CUDA {machine.cuda[0]}"
        )
    least = _LEAST_CAPABILITY.get(library.cuda, (0, 0))
    if tuple(map(int, gpu.compute_capability.split("."))) < least:
        yield (
            f"{gpu.name} has compute capability {gpu.compute_capability}, {name} for CUDA"
            f" {library.cuda} needs {'{}.{}'.format(*least)}"
        )
