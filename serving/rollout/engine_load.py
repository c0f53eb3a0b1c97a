"""The load of an engine process, with the costs and kernels that this node has cached for it."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.engine.base import MAX_LANES, EngineLoad
from bertserve.serving.errors import EngineFailed
from bertserve.serving.host import available_cpus, memory_limit
from bertserve.serving.models.cost_cache import CostCache
from bertserve.serving.models.kernel_cache import KernelCache
from bertserve.serving.rollout.engine_choice import too_full

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bertserve.serving.engine.specs import Gpu, ModelSpec
    from bertserve.serving.inference.served_models import ServedModel
    from bertserve.serving.models.artifact_selection import ServableArtifact
    from bertserve.serving.rollout.engine_choice import Choice, Chooser
    from bertserve.serving.scheduling.cost import CostPoint
    from bertserve.serving.settings import Settings

log = logging.getLogger("bertserve")

_NICE = 10
"""Nice value added to the CPU threads that run batches: it keeps the front end responsive under overload. With 0 in
overload, a third of the requests stayed unanswered; with 10 none."""

_PROCESSES_BYTES = 200 << 20
"""Approximate memory of all processes without a model."""

_LANE_BYTES = 8 << 20
"""Approximate memory of a batch that a narrow lane computes."""

_OPENVINO_BYTES = 350 << 20
"""Approximate memory of OpenVINO and of the kernels that it compiles for each shape."""


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """A load, and the caches that its engine process adds to."""

    choice: Choice
    load: EngineLoad
    _costs: CostCache
    _kernels: KernelCache

    def cache(self, measured: Sequence[Sequence[CostPoint]]) -> None:
        """Caches the compiled kernels, and the costs measured by a warm-up that was not paused."""
        self._costs.write(self.choice.summary(), self.choice.repository.models, measured)
        self._kernels.keep()


class LoadBuilder:
    def __init__(self, settings: Settings, chooser: Chooser) -> None:
        self._settings = settings
        self._chooser = chooser

    def prepare(self, choice: Choice) -> PreparedLoad:
        settings, models = self._settings, choice.repository.models
        threads, kernels = settings.threads or available_cpus(), KernelCache(settings.cache_dir)
        specs, needed_mib = fitted(models, threads, choice.gpus)
        costs = CostCache(settings.cache_dir, threads=threads, max_batch_tokens=settings.max_batch_tokens)
        load = EngineLoad(
            engine=choice.engine,
            models=specs,
            threads=threads,
            nice=0 if choice.gpus else _NICE,
            costs=costs.read(choice.summary(), models, [spec.narrow and threads > 1 for spec in specs]),
            options=settings.of_engine(choice.engine),
            max_batch_tokens=settings.max_batch_tokens,
            log_format=settings.log_format,
            gpus=[gpu.ordinal for gpu in choice.gpus],
            kernels=kernels.files(choice.engine, models),
            needed_mib=needed_mib,
        )
        return PreparedLoad(choice, load, costs, kernels)

    def fallback(self, engine: str, failed: EngineFailed, served: Sequence[ServedModel]) -> PreparedLoad | None:
        """The load of another engine; None if there is none, as of `Chooser.fallback`."""
        choice = self._chooser.fallback(engine, str(failed), served, crashed=failed.crashed)
        return None if choice is None else self.prepare(choice)

    def check_room(self, load: EngineLoad) -> None:
        """Raises EngineFailed if a GPU lacks the memory for a second engine, which would end the first one too."""
        if not load.gpus:
            return
        size = sum(model.size_bytes for model in load.models)
        for gpu, free in self._chooser.free_bytes():
            if gpu.ordinal in load.gpus and (problem := too_full(gpu, free, size)):
                remedy = "free GPU memory, or restart the server to load only the new engine"
                raise EngineFailed(f"{problem} beside the serving engine; {remedy}", passing=True)


def fitted(models: Sequence[ServableArtifact], threads: int, gpus: Sequence[Gpu]) -> tuple[list[ModelSpec], int]:
    """The models as `within_limit` decides, and the MiB that they need, which is logged; 0 with GPUs."""
    specs = [model.spec() for model in models]
    if gpus:
        return specs, 0
    specs, needed_bytes, problem = within_limit(specs, threads)
    if problem:
        log.warning("%s", problem)
    log.info("memory: about %d MiB needed", needed_bytes >> 20)
    return specs, needed_bytes >> 20


def within_limit(models: Sequence[ModelSpec], threads: int) -> tuple[list[ModelSpec], int, str]:
    """Decides which models narrow lanes run too: the smallest first, as the container's memory limit allows.

    Returns:
        The models; about how many bytes of memory the server needs with them; what to tell the operator, if anything.
    """
    sizes = {model.name: sum(each.size_bytes for each in (model, model.second) if each) for model in models}
    least = _PROCESSES_BYTES + sum(sizes.values()) + _OPENVINO_BYTES * any(model.second for model in models)
    lanes_bytes = min(threads, MAX_LANES) * _LANE_BYTES
    names = sorted(sizes, key=sizes.__getitem__) if threads > 1 else []
    needs = [least, *(least + lanes_bytes + copies for copies in accumulate(map(sizes.__getitem__, names)))]
    limit = memory_limit()
    if limit is None or limit >= needs[-1]:
        return list(models), needs[-1], ""
    count = max(bisect_right(needs, limit) - 1, 0)
    needed, once = needs[count], names[count:]
    problem = f"the container's memory limit of {limit >> 20:,} MiB "
    if limit < needed:
        problem += f"may be too low: these models need about {needed >> 20:,} MiB"
    else:
        problem += f"leaves no room for a second copy of {', '.join(once)}, which narrow lanes would run"
    fitting = [msgspec.structs.replace(model, narrow=model.name not in once) for model in models]
    return fitting, needed, f"{problem}; give it {needs[-1] >> 20:,} MiB"
