"""Chooses the engine that runs the models: the order in which `--engine auto` tries them, and why it rejects one.

An engine is chosen if it can run on this machine and every model has an artifact for it. With a named engine, the
server runs it or does not start. `auto` tries the next one, and ends with ONNX Runtime on the CPU. A server on a CPU is
degraded if the machine has, or should have, a GPU.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bertserve.serving import host
from bertserve.serving.engine.gpu import discovery
from bertserve.serving.engine.kinds import AUTO, ENGINES
from bertserve.serving.engine.specs import EngineChoice, RejectedEngine
from bertserve.serving.errors import BundleError, StartupError
from bertserve.serving.inference.served_models import Repository
from bertserve.serving.logs import log_fields, members
from bertserve.serving.models.artifact_selection import (
    log_agreement,
    runs_on_a_gpu,
    select_artifact,
    verify_bundles,
    without_second,
)
from bertserve.serving.models.bundle import read_bundle, warn_of_schema
from bertserve.serving.models.node_cache import with_proofs
from bertserve.serving.rollout.processor_check import ProcessorCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from bertserve.serving.engine.gpu.discovery import Machine
    from bertserve.serving.engine.kinds.kind import EngineKind
    from bertserve.serving.engine.specs import Gpu
    from bertserve.serving.inference.served_models import ServedModel
    from bertserve.serving.models.artifact_selection import ServableArtifact
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.settings import Settings

log = logging.getLogger("bertserve")

_MIB = 1 << 20
_WORKING_FACTOR, _WORKING_MIB = 1.3, 500
"""GPU memory needed: a multiple of the models' size for buffers, and a fixed amount for CUDA and the libraries."""

_NOT_LOOKED_AT = discovery.Machine(problem="GPU discovery was skipped")


@dataclass(slots=True, frozen=True)
class Choice:
    """The engine that runs the models.

    Attributes:
        repository: The models, each with the artifact that the engine runs.
        gpus: GPUs in use; none on a CPU.
        rejected: Engines tried before, the best first.
        left_out: Why GPUs of the same kind are not used.
        by_default: Whether no precision was requested.
    """

    engine: str
    repository: Repository
    gpus: tuple[Gpu, ...] = ()
    rejected: tuple[RejectedEngine, ...] = ()
    degraded: bool = False
    left_out: tuple[str, ...] = ()
    by_default: bool = True

    def summary(self) -> EngineChoice:
        return EngineChoice(self.engine, self.degraded, self.gpus, self.rejected, self.left_out)

    def log(self, failed: str = "") -> None:
        """Logs which engine runs and why no better one does; `failed` is the engine that it replaces."""
        told_before = bool(failed) and not ENGINES[failed].on_gpu  # the log already says why no GPU engine runs
        where = f" on {len(self.gpus)} x {self.gpus[0].name}" if self.gpus else ""
        log.info("engine: %s%s", self.engine, where, extra=members(engine=self.engine, gpus=len(self.gpus)))
        for rejected in self.rejected:
            for_gpus = ENGINES[rejected.engine].on_gpu
            if not for_gpus or ((self.degraded or self.gpus) and not told_before):
                # OpenVINO is optional on a CPU
                say = log.warning if for_gpus or rejected.engine == failed else log.info
                log_fields(say, "engine %s not used: %s", engine=rejected.engine, reason=rejected.reason)
        for reason in self.left_out:
            log.warning("a GPU is not used: %s", reason)
        for reason in without_second(self.repository.models, ENGINES[self.engine], by_default=self.by_default):
            log.info("%s", reason)
        if self.by_default:
            for model in self.repository.models:
                log_agreement(model)


class Chooser:
    """Chooses an engine, and another one if that fails.

    Args:
        look: Finds the GPUs. Called for the first choice that needs them, and by `free_bytes`.
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
            StartupError: The models must not be served, or no engine can run them.
        """
        asked = self._settings.engine
        bundles = verify_bundles(self._settings.models, self._settings.cache_dir)
        for bundle in bundles:
            warn_of_schema(bundle)
        return self._best(AUTO if asked == "auto" else [ENGINES[asked]], bundles)

    def fallback(self, engine: str, reason: str, served: Sequence[ServedModel], *, crashed: bool) -> Choice | None:
        """The choice after an engine that did not start or, with `crashed`, died too often; None if there is none.

        In place of an engine that crashed, the choice is degraded.
        """
        self.reject(engine, reason)
        kind = ENGINES[engine]
        left = AUTO[AUTO.index(kind) + 1 :] if kind in AUTO else []
        if crashed:
            left = [each for each in left if not each.on_gpu]
        if not kind.on_gpu:
            may = engine != self._settings.engine
        else:
            may = self._settings.cpu_fallback if crashed else self._settings.engine == "auto"
        if not left or not may:
            return None
        try:
            choice = self._best(left, self._bundles(served))
        except StartupError as error:
            log.warning("no fallback for the engine %s: %s", engine, error)
            return None
        choice = replace(choice, degraded=choice.degraded or crashed)
        choice.log(failed=engine)
        return choice

    def select_artifact(self, path: Path, engine: EngineChoice) -> ServableArtifact:
        """A version of a model, not verified yet, with the artifact that an engine can run."""
        bundle, cache = read_bundle(path), self._settings.cache_dir
        if cache is not None:
            bundle = with_proofs(cache, bundle)
        servable = self._select(bundle, ENGINES[engine.engine], engine.gpus[0].target if engine.gpus else "")
        if self._settings.precision == "auto":
            log_agreement(servable)
        return servable

    def _select(self, bundle: Bundle, engine: EngineKind, target: str) -> ServableArtifact:
        """The best artifact that answers on this processor as it was proven to."""
        settings = self._settings
        servable = select_artifact(
            bundle, settings.precision, engine.name, unproven=settings.allow_unproven, target=target
        )
        refused = {} if engine.spares_cpu else self._check.refused(servable)
        if not refused:
            return servable
        return self._select(replace(bundle, refused={**bundle.refused, **refused}), engine, target)

    def free_bytes(self) -> Sequence[tuple[Gpu, int]]:
        """The free memory of each GPU now; nothing if the driver does not respond."""
        machine = self._look()
        return list(zip(machine.gpus, machine.free_bytes, strict=True))

    def reject(self, engine: str, reason: str) -> None:
        """Records why an engine is rejected. Clients see the reason, without this machine's paths."""
        for path in filter(None, (self._settings.models, self._settings.cache_dir)):
            reason = reason.replace(f"{os.path.abspath(path)}/", f"{path.name}/")  # noqa: PTH100  as it is named
        self._rejected[engine] = reason

    def rejected(self, engine: str) -> tuple[RejectedEngine, ...]:
        """The rejected engines that `auto` tries before this one, the best first."""
        kind = ENGINES[engine]
        before = [each.name for each in AUTO[: AUTO.index(kind)]] if kind in AUTO else []
        return tuple(RejectedEngine(name, self._rejected[name]) for name in before if name in self._rejected)

    def _bundles(self, served: Sequence[ServedModel]) -> list[Bundle]:
        """The models' bundles, with what this node has proven or built since."""
        cache, bundles = self._settings.cache_dir, [replace(model.bundle, made_here=()) for model in served]
        return bundles if cache is None else [with_proofs(cache, bundle) for bundle in bundles]

    def _best(self, engines: Sequence[EngineKind], bundles: Sequence[Bundle]) -> Choice:
        *better, last = engines
        for engine in better:
            try:
                return self._opened(engine, bundles)
            except StartupError as error:
                self.reject(engine.name, str(error))
        return self._opened(last, bundles)

    def _opened(self, engine: EngineKind, bundles: Sequence[Bundle]) -> Choice:
        gpus = self._gpus(engine, bundles) if engine.on_gpu else ()
        targets = {artifact.target for bundle in bundles for artifact in bundle.artifacts}
        if problem := engine.obstacle(targets, asked=self._settings.engine != "auto"):
            raise StartupError(problem)
        if not engine.spares_cpu:
            bundles = self._on_this_processor(engine, bundles)
        repository = Repository.of(
            bundles,
            self._settings.precision,
            engine=engine.name,
            target=gpus[0].target if gpus else "",
            allow_unproven=self._settings.allow_unproven,
            defaults=self._settings.defaults(),
        )
        if engine.second and not any(model.second for model in repository.models):
            reasons = "; ".join(without_second(repository.models, engine))
            raise StartupError(f"the engine {engine.name} has only one library to choose: {reasons}")
        for problem in engine.unfit([model.spec() for model in repository.models], self._machine, gpus):
            raise StartupError(problem)
        size = sum(model.artifact.total_bytes for model in repository.models)
        free_bytes = self._machine.free_bytes
        full = {gpu.ordinal: problem for gpu in gpus if (problem := too_full(gpu, free_bytes[gpu.ordinal], size))}
        if full and len(full) == len(gpus):
            raise StartupError(engine.cannot(next(iter(full.values()))))
        gpus, left_out = tuple(gpu for gpu in gpus if gpu.ordinal not in full), tuple(full.values())
        rejected = self.rejected(engine.name)
        has_gpu = bool(self._machine.gpus) or self._machine.broken
        wanted = has_gpu and any(ENGINES[each.engine].on_gpu for each in rejected)
        degraded = (not engine.on_gpu and wanted) or bool(left_out)
        by_default = self._settings.precision == "auto"
        return Choice(engine.name, repository, gpus, rejected, degraded, left_out, by_default)

    def _on_this_processor(self, engine: EngineKind, bundles: Sequence[Bundle]) -> list[Bundle]:
        """The bundles without artifacts that answer differently here; raises StartupError if one has none left."""
        try:
            return [self._select(bundle, engine, "").bundle for bundle in bundles]
        except BundleError as error:
            raise StartupError(str(error)) from error

    def _gpus(self, engine: EngineKind, bundles: Sequence[Bundle]) -> tuple[Gpu, ...]:
        """The GPUs that an engine can use. All are of the first one's kind, so one bundle's engine fits them all."""
        if not runs_on_a_gpu(bundles):
            raise StartupError("no bundle has a GPU artifact; export with --precision fp16 or --tensorrt")
        if self._machine is _NOT_LOOKED_AT:
            self._machine = self._look()
        machine = self._machine
        if machine.problem:
            raise StartupError(engine.cannot(machine.problem))
        return tuple(gpu for gpu in machine.gpus if gpu.target == machine.gpus[0].target)


def too_full(gpu: Gpu, free_bytes: int, model_bytes: int) -> str:
    """Why a GPU has too little free memory for models; empty if it has enough."""
    wanted = model_bytes * _WORKING_FACTOR / _MIB + _WORKING_MIB
    free, total = free_bytes // _MIB, gpu.memory_bytes // _MIB
    if free >= wanted:
        return ""
    has = f"{free:,} MiB of {total:,} free"
    return f"GPU {gpu.ordinal} ({gpu.name}) has {has}, but the models need about {wanted:,.0f} MiB"
