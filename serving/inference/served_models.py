"""The models that requests can name, and how a request's model is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.engine.specs import EngineChoice
from bertserve.serving.errors import BundleError, InvalidRequest, ModelNotFound, ModelNotNamed, StartupError, WrongTask
from bertserve.serving.inference.after_engine import unit_us
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.models.artifact_selection import ServableArtifact, select_artifact, verify_bundles
from bertserve.serving.records import ModelIndex
from bertserve.serving.tasks import TASKS
from bertserve.serving.tasks.base import QUERIES, pairs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from bertserve.serving.inference.requests import InputType
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.records import TextInput
    from bertserve.serving.tasks.base import Task, TaskOptions

_DOCUMENTS = ("document", "passage", "corpus", "search_document")
_SIDES = (QUERIES, _DOCUMENTS)
"""Names of prompts for the two sides of a search; the first match wins."""

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

    @cached_property
    def default_prompt(self) -> str:
        """The prefix of each text if a request names no prompt; may be empty."""
        name = self.manifest.default_prompt
        return "" if name is None else self.manifest.prompts[name]

    def prompted(
        self, inputs: Sequence[TextInput], name: str | None, input_type: InputType | None = None
    ) -> Sequence[TextInput]:
        """Texts with one of the model's prompts as a prefix: the requested one, or the default.

        Token ids get no default prompt.

        Raises:
            InvalidRequest: The model has no such prompt, or an input is not a text although a prompt was requested.
        """
        if name is None and input_type is None:
            default = self.default_prompt
            return [default + value if isinstance(value, str) else value for value in inputs] if default else inputs
        prompt = self._prompt(name, input_type)
        if name is None and not prompt:
            return inputs
        texts = [f"{prompt}{value}" for value in inputs if isinstance(value, str)]
        if len(texts) != len(inputs):
            raise InvalidRequest(
                f"`{'input_type' if name is None else 'prompt_name'}` needs texts as inputs, not token IDs"
            )
        return texts

    def with_prompt_apart(
        self, inputs: Sequence[TextInput], name: str | None, input_type: InputType | None = None
    ) -> Sequence[TextInput]:
        """Pairs of the same prompts and their texts; raises `InvalidRequest`, also for token ids."""
        if not all(isinstance(value, str) for value in inputs):
            raise InvalidRequest("each input must be one text")
        chosen = name is not None or input_type is not None
        prompt = self._prompt(name, input_type) if chosen else self.default_prompt
        return [(prompt, value) for value in inputs if isinstance(value, str)]

    def with_prompts_by_side(
        self, inputs: Sequence[TextInput], name: str | None, input_type: InputType | None = None
    ) -> Sequence[TextInput]:
        """Pairs of query and document, each with its side's prompt; raises `InvalidRequest` for other inputs."""
        del name, input_type  # each side has its own
        if {own.casefold() for own in self.manifest.prompts}.isdisjoint(QUERIES + _DOCUMENTS):
            # As in Sentence Transformers, where the default prompt is for neither side.
            return pairs_of(inputs)
        before, behind = self._prompt(None, "query"), self._prompt(None, "document")
        return [(before + query, behind + document) for query, document in pairs_of(inputs)]

    @property
    def task(self) -> Task[Any, Any]:
        return TASKS[self.manifest.task]

    def _prompt(self, name: str | None, input_type: InputType | None) -> str:
        """The prompt of a name, or the one for an input type.

        A model without prompts treats all inputs alike. If only queries or only documents have a prompt, the other side
        has none, as in Sentence Transformers.
        """
        prompts = self.manifest.prompts
        names = ", ".join(sorted(prompts)) or "none"
        if input_type is None:
            if name not in prompts:
                raise InvalidRequest(f"unknown `prompt_name`; available: {names}")
            return prompts[name]
        if name is not None:
            raise InvalidRequest("`prompt_name` and `input_type` both select a prompt; send one of them")
        if not self.task.embeds:
            raise InvalidRequest(f"`input_type` is for embeddings; this model has the task {self.manifest.task}")
        by_name = {own.casefold(): text for own, text in prompts.items()}
        candidates = (input_type, *next((side for side in _SIDES if input_type in side), ()))
        found = next((by_name[own] for own in candidates if own in by_name), None)
        if found is not None:
            return found
        if any(prompts.values()) and (len(candidates) == 1 or by_name.keys().isdisjoint(QUERIES + _DOCUMENTS)):
            raise InvalidRequest(
                f"this model has no prompt for the `input_type` {input_type}; select one with `prompt_name`: {names}"
            )
        return ""


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
