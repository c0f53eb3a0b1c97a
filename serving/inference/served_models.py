"""The models that requests can name, and how a request's model is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.engine.specs import EngineChoice
from bertserve.serving.errors import BundleError, ModelNotFound, ModelNotNamed, StartupError, WrongTask
from bertserve.serving.inference.after_engine import unit_us
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models.artifact_selection import ServableArtifact, select_artifact, verify_bundles
from bertserve.serving.records import ModelIndex
from bertserve.serving.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.tasks.base import Task, TaskOptions

_MAX_NAMES = 10
"""Maximum number of models that an error lists."""

COMPUTE_TYPES = sorted({kind.compute_type for kind in ENGINES.values()})
"""Possible values of `Outcome.compute_type`."""


@dataclass(frozen=True, kw_only=True)
class ServedModel(ServableArtifact):
    """A model that requests can name; another version of it has another `index`."""

    index: ModelIndex
    tokenizer: TextTokenizer

    @classmethod
    def of(cls, servable: ServableArtifact, index: ModelIndex, tokenizer: TextTokenizer) -> ServedModel:
        model = cls(
            bundle=servable.bundle, artifact=servable.artifact, second=servable.second, index=index, tokenizer=tokenizer
        )
        _ = model.after_us  # measured before there are requests
        return model

    @cached_property
    def after_us(self) -> Mapping[type[TaskOptions[Any]], float]:
        """Microseconds for a unit of work after the engine, by the options of requests."""
        return unit_us(self.manifest, self.tokenizer)

    @property
    def task(self) -> Task[Any, Any]:
        return TASKS[self.manifest.task]


class Repository:
    """The served models, by exact name; a name from a request never becomes a path.

    Attributes:
        models: One version of each model, loaded or not.
        compute_type: Device and library that compute; see `EngineKind`.
    """

    def __init__(self, models: list[ServedModel], defaults: Mapping[str, str] | None = None) -> None:
        """Serves verified models. `defaults` maps a task to the model that answers if a request names none.

        Raises:
            StartupError: A default is not a model of its task.
        """
        self.models = models
        self._by_name = {model.name: model for model in models}
        self._defaults = defaults or {}
        self._alone: dict[str | None, ServedModel] = {}
        self._listeners: list[Callable[[], None]] = []
        self._watchers: list[Callable[[], None]] = []
        self._engine, self.compute_type = EngineChoice("none"), "cpu"
        for task, name in self._defaults.items():
            if name not in self._by_name or not self._by_name[name].manifest.answers(task):
                raise StartupError(
                    f"--default {task}={name}: the repository has no model {name!r} with the task {task}"
                )

    @property
    def engine(self) -> EngineChoice:
        """The running engine; only the engine slot sets it."""
        return self._engine

    @engine.setter
    def engine(self, choice: EngineChoice) -> None:
        if choice != self._engine:
            self._set_engine(choice)
            self._changed()

    def _set_engine(self, choice: EngineChoice) -> None:
        self._engine = choice
        self.compute_type = ENGINES[choice.engine].compute_type if choice.engine in ENGINES else "cpu"

    @property
    def whole(self) -> bool:
        """Whether nothing is degraded: all artifacts are proven, the engine is the intended one, and no GPU is lost."""
        proven = all(model.proven for model in self.models)
        return proven and not (self.engine.degraded or self.engine.lost)

    @classmethod
    def open(
        cls,
        root: Path,
        precision: str = "auto",
        *,
        engine: str = "ort-cpu",
        allow_unproven: bool = False,
        cache: Path | None = None,
        defaults: Mapping[str, str] | None = None,
    ) -> Repository:
        """Verifies and opens the newest version of every model below `root`; see `verify_bundles` and `of`."""
        bundles = verify_bundles(root, cache)
        return cls.of(bundles, precision, engine=engine, allow_unproven=allow_unproven, defaults=defaults)

    @classmethod
    def of(
        cls,
        bundles: Sequence[Bundle],
        precision: str = "auto",
        *,
        engine: str = "ort-cpu",
        target: str = "",
        allow_unproven: bool = False,
        defaults: Mapping[str, str] | None = None,
    ) -> Repository:
        """Opens verified bundles for an engine.

        Args:
            bundles: Verified bundles.
            precision: `fp32`, `fp16`, `int8`, or `auto` for the fastest available.
            engine: The engine, which decides which artifacts can be served.
            target: The GPU architecture, such as `sm75`, for engines that are built for one.
            allow_unproven: Serve an artifact that was not compared with PyTorch if there is no other.
            defaults: For each task, the model that answers if a request names none.

        Raises:
            StartupError: One of them must not or cannot be served.
        """
        try:
            models = []
            for index, bundle in enumerate(bundles):
                servable = select_artifact(bundle, precision, engine, unproven=allow_unproven, target=target)
                tokenizer = TextTokenizer.open(bundle.path, bundle.manifest)
                models.append(ServedModel.of(servable, ModelIndex(index), tokenizer))
        except BundleError as error:
            raise StartupError(str(error)) from error
        return cls(models, defaults)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after models were replaced by other versions."""
        self._listeners.append(listener)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Calls `watcher` after each change, that of the engine too."""
        self._watchers.append(watcher)

    def replace(self, models: Sequence[ServedModel]) -> None:
        """Replaces models with other versions of the same names; unloaded models stay unloaded."""
        self._replace(models, self._by_name)

    def mirror(self, models: Sequence[ServedModel], served: Collection[str], engine: EngineChoice) -> None:
        """Takes over the models of another process; `served` are the names of those that are loaded."""
        self._set_engine(engine)
        self._replace(models, served)

    def _replace(self, models: Sequence[ServedModel], served: Collection[str]) -> None:
        self.models = list(models)
        self._by_name = {model.name: model for model in models if model.name in served}
        self._changed()
        for listener in self._listeners:
            listener()

    def _changed(self) -> None:
        self._alone.clear()
        for watcher in self._watchers:
            watcher()

    def of_task(self, task: str) -> Sequence[ServedModel]:
        return [model for model in self._by_name.values() if model.manifest.answers(task)]

    def named(self, name: str) -> ServedModel:
        return next(model for model in self.models if model.name == name)

    def serves(self, name: str) -> bool:
        return name in self._by_name

    def load(self, model: ServedModel) -> None:
        self._by_name[model.name] = model
        self._changed()

    def unload(self, model: ServedModel) -> None:
        self._by_name.pop(model.name, None)
        self._changed()

    def find(self, name: str | None, version: str | None = None, task: str | None = None) -> ServedModel:
        """The loaded model of that name and version.

        Args:
            name: None for the task's default or only model, or for the only model of all.
            version: None or "" for the served version.
            task: The task that it must have; None for any.

        Raises:
            ModelNotFound: No model of that name and version is served.
            WrongTask: The model has another task, or no model has this task.
            ModelNotNamed: No name was given, and several models match.
        """
        if name is None:
            return self._alone.get(task) or self._only(task)
        model = self._by_name.get(name)
        if model is None:
            raise self.unknown()
        if version and version != model.version:
            raise ModelNotFound(f"unknown version of the model {model.name!r}; available: {model.version}")
        if task is not None and not model.manifest.answers(task):
            fitting = [other.name for other in self.of_task(task)]
            there_are = f"; available: {_listed(fitting)}" if fitting else self._those_served()
            raise WrongTask(f"model {model.name!r} has the task {model.manifest.task}, not {task}{there_are}")
        return model

    def named_or_only(self, name: str | None, task: str) -> str | None:
        """The name to find for APIs in which clients must send a name, often another server's.

        Returns None, for the task's only or default model, if the name is not a model's.

        Raises:
            ModelNotFound: The name is unknown, and several models have the task.
        """
        if name is None or name in self._by_name:
            return name
        if len(models := self.of_task(task)) > 1:
            raise ModelNotFound(f"unknown model; {_choice(models, task)} in `model`")
        return None

    def _only(self, task: str | None) -> ServedModel:
        models = list(self._by_name.values()) if task is None else self.of_task(task)
        chosen = [model for model in models if model.name == self._defaults.get(task or "")]
        if len(models) == 1 or (task is not None and chosen):
            self._alone[task] = (chosen or models)[0]
            return self._alone[task]
        if not models:
            raise WrongTask(f"no model{f' with the task {task}' if task else ''} is available{self._those_served()}")
        raise ModelNotNamed(_choice(models, task))

    def unknown(self) -> ModelNotFound:
        return ModelNotFound(f"unknown model{self._those_served()}")

    def _those_served(self) -> str:
        served = [f"{model.name} ({model.manifest.task})" for model in self._by_name.values()]
        return f"; available: {_listed(served)}" if served else ""


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*sorted(names)[:_MAX_NAMES], *(["..."] if len(names) > _MAX_NAMES else [])])


def _choice(models: Sequence[ServedModel], task: str | None) -> str:
    """Lists the models to choose from. The protocol appends how to name one."""
    names = _listed([model.name for model in models])
    default = f"start the server with --default {task}=NAME, or " if task else ""
    return f"{len(models)} models are available{f' for {task}' if task else ''} ({names}); {default}name one"
