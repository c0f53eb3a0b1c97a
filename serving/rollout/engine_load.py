"""The load of an engine process, with the costs and kernels that this node has cached for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serving.engine.base import EngineLoad
from serving.engine.specs import DATA_SUFFIX
from serving.errors import EngineFailed
from serving.host import available_cpus
from serving.models.cost_cache import CostCache
from serving.models.kernel_cache import KernelCache
from serving.rollout.engine_choice import too_full

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.engine.specs import ModelSpec
    from serving.rollout.engine_choice import Choice, Chooser
    from serving.scheduling.cost import CostPoint
    from serving.settings import Settings

_NICE = 10
"""Nice value added to the CPU threads that run batches: it keeps the front end responsive under overload. With 0 in
overload, a third of the requests stayed unanswered; with 10 none."""


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """A load, and the caches that its engine process adds to."""

    choice: Choice
    load: EngineLoad
    _costs: CostCache
    _kernels: KernelCache

    def cache_costs(self, measured: Sequence[Sequence[CostPoint]]) -> None:
        """Caches the costs measured by a warm-up that was not paused."""
        self._costs.write(self.choice.summary(), self.choice.repository.models, measured)

    def cache_kernels(self) -> None:
        self._kernels.keep()


class LoadBuilder:
    def __init__(self, settings: Settings, chooser: Chooser) -> None:
        self._settings = settings
        self._chooser = chooser

    def prepare(self, choice: Choice) -> PreparedLoad:
        settings, models = self._settings, choice.repository.models
        threads, kernels = settings.threads or available_cpus(), KernelCache(settings.cache_dir)
        costs = CostCache(settings.cache_dir, threads=threads, max_batch_tokens=settings.max_batch_tokens)
        load = EngineLoad(
            engine=choice.engine,
            models=[model.spec() for model in models],
            threads=threads,
            nice=0 if choice.gpus else _NICE,
            costs=costs.read(choice.summary(), models),
            options=settings.of_engine(choice.engine),
            max_batch_tokens=settings.max_batch_tokens,
            log_format=settings.log_format,
            gpus=[gpu.ordinal for gpu in choice.gpus],
            kernels=kernels.files(choice.engine, models),
        )
        return PreparedLoad(choice, load, costs, kernels)

    def check_room(self, load: EngineLoad) -> None:
        """Raises EngineFailed if a GPU lacks the memory for a second engine, which would end the first one too."""
        if not load.gpus:
            return
        size = sum(map(_size_bytes, load.models))
        for gpu, free in self._chooser.free_bytes():
            if gpu.ordinal in load.gpus and (problem := too_full(gpu, free, size)):
                remedy = "free GPU memory, or restart the server to load only the new engine"
                raise EngineFailed(f"{problem} beside the serving engine; {remedy}", passing=True)


def _size_bytes(model: ModelSpec) -> int:
    """Bytes that an engine loads for a model, with its external weights."""
    graph = Path(model.path)
    beside = graph.with_name(f"{graph.name}{DATA_SUFFIX}")
    return graph.stat().st_size + (beside.stat().st_size if beside.is_file() else 0)
