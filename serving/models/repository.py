"""The model repository: which models there are, verified before anything loads them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import msgspec

from serving.engine.base import ModelSpec
from serving.engine.lanes import COPIED_BYTES
from serving.errors import InvalidRequest, ModelNotFound, ModelNotNamed, StartupError, WrongTask
from serving.inference.tokenizer import TextTokenizer
from serving.models.bundle import BundleError, open_bundle, read_bundle
from serving.models.manifest import GPUS, MODEL_NAME, Target
from serving.models.node_cache import with_proofs
from serving.models.verified_dir import versions
from serving.records import ON_A_GPU, EngineChoice, ModelIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from serving.models.bundle import Bundle
    from serving.models.manifest import Artifact, Manifest, Precision, Task
    from serving.records import TextInput

_TARGETS: Mapping[str, frozenset[Target]] = {
    "ort-cpu": frozenset({"cpu"}),
    # The graphs for ONNX Runtime are fused into operators of its own.
    "openvino": frozenset({"openvino"}),
    "ort-cuda": frozenset({"cuda"}),
    "tensorrt": frozenset(GPUS),
    "fake": frozenset(get_args(Target)),
}
"""The artifacts that an engine can run, by what they were made for."""

_FASTEST_FIRST: Sequence[Precision] = ("int8", "fp32", "fp16")
"""What `auto` prefers on a CPU, which has no arithmetic of its own for fp16."""

_FASTEST_ON_A_GPU: Sequence[Precision] = ("fp16", "int8", "fp32")
"""INT8 is often no faster there and always less exact."""


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A model that requests can name.

    Attributes:
        index: What dispatching knows it by, as long as it is there; another version of it has another.
        path: Its bundle.
        bundle_sha256: Of the bundle's manifest.
        manifest: What the bundle says.
        artifact: The form of it that is served.
        tokenizer: Text to ids.
        made_here: Where this node keeps the artifact, if it made it; None for one of the bundle.
    """

    index: ModelIndex
    path: Path
    bundle_sha256: str
    manifest: Manifest
    artifact: Artifact
    tokenizer: TextTokenizer
    made_here: Path | None = None

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.model

    @property
    def version(self) -> str:
        """The model's version, as protocols write it."""
        return str(self.manifest.version)

    def prompted(self, inputs: Sequence[TextInput], name: str | None) -> Sequence[TextInput]:
        """Texts with one of the model's prompts before each.

        Args:
            inputs: Texts.
            name: Key of the prompt; None for none.

        Raises:
            InvalidRequest: The model has no such prompt, or an input is no text.
        """
        if name is None:
            return inputs
        prompt = self.manifest.prompts.get(name)
        if prompt is None:
            known = ", ".join(sorted(self.manifest.prompts)) or "none"
            raise InvalidRequest(f"`prompt_name` is not a prompt of this model (it has: {known})")
        texts = [f"{prompt}{value}" for value in inputs if isinstance(value, str)]
        if len(texts) != len(inputs):
            raise InvalidRequest("`prompt_name` needs texts as inputs")
        return texts

    def spec(self) -> ModelSpec:
        """The model as an engine loads it."""
        return spec_of(self.made_here or self.path, self.manifest, self.artifact)


def spec_of(place: Path, manifest: Manifest, artifact: Artifact) -> ModelSpec:
    """A form of a bundle's model as an engine loads it; `place` is the directory that the artifact lies in."""
    return ModelSpec(
        name=manifest.model,
        path=str(place / artifact.file),
        sha256=artifact.sha256,
        batch_invariant=artifact.batch_invariant,
        vocab_size=manifest.vocab_size,
        max_length=manifest.max_length,
        special_ids=manifest.special_ids,
        inputs=tuple(tensor.name for tensor in manifest.inputs),
        outputs=manifest.outputs,
        copied=artifact.size_bytes <= COPIED_BYTES,
        build=artifact.engine,
    )


class Repository:
    """The models being served, by exact name; a name from a request never becomes a path.

    Attributes:
        models: One version of each, in service or not.
        engine: What runs them now.
    """

    def __init__(self, models: list[ServedModel], defaults: Mapping[str, str] | None = None) -> None:
        """Serves all of them.

        Args:
            models: Verified.
            defaults: For a task, the model that answers where a request names none.

        Raises:
            StartupError: A default is no model of its task.
        """
        self.models = models
        self.engine = EngineChoice("none")
        self._by_name = {model.name: model for model in models}
        self._defaults = defaults or {}
        self._alone: dict[Task | None, ServedModel] = {}
        self._listeners: list[Callable[[], None]] = []
        for task, name in self._defaults.items():
            if name not in self._by_name or self._by_name[name].manifest.task != task:
                raise StartupError(f"--default {task}={name}: the repository holds no model of that name and task")

    @property
    def whole(self) -> bool:
        """Whether nothing is less than was meant: every form is proven, the engine the best one, no GPU given up."""
        proven = all(model.artifact.proven for model in self.models)
        return proven and not (self.engine.degraded or self.engine.lost)

    def note_lost(self, cards: Iterable[str]) -> None:
        """Keeps which GPUs the engine that serves has given up, each with its reason."""
        self.engine = msgspec.structs.replace(self.engine, lost=tuple(cards))

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
        """Verifies and opens the newest version of every model below `root`; see `verified` and `of`."""
        bundles = verified(root, cache)
        return cls.of(bundles, precision, engine=engine, allow_unproven=allow_unproven, defaults=defaults)

    @classmethod
    def of(
        cls,
        bundles: Sequence[Bundle],
        precision: str = "auto",
        *,
        engine: str = "ort-cpu",
        card: str = "",
        allow_unproven: bool = False,
        defaults: Mapping[str, str] | None = None,
    ) -> Repository:
        """Opens bundles for an engine.

        Args:
            bundles: Verified.
            precision: `fp32`, `fp16`, `int8`, or `auto` for the fastest that there is.
            engine: What will run the models; it decides which artifacts can be served.
            card: Compute capability of the GPU, as `sm75`, for engines that are made for one.
            allow_unproven: Serve an artifact that nobody compared with PyTorch, where there is no other.
            defaults: For a task, the model that answers where a request names none.

        Raises:
            StartupError: One of them must not or cannot be served.
        """
        try:
            return cls(
                [
                    _served(
                        ModelIndex(index),
                        bundle,
                        form_of(bundle, precision, engine, unproven=allow_unproven, card=card),
                    )
                    for index, bundle in enumerate(bundles)
                ],
                defaults,
            )
        except BundleError as error:
            raise StartupError(str(error)) from error

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever other versions have taken the place of models."""
        self._listeners.append(listener)

    def replace(self, models: Sequence[ServedModel]) -> None:
        """Puts other versions in the places of the models of the same names; what was out of service stays so."""
        self.models = list(models)
        self._by_name = {model.name: model for model in models if model.name in self._by_name}
        self._alone.clear()
        for listener in self._listeners:
            listener()

    def of_task(self, task: Task) -> Sequence[ServedModel]:
        """The models of a task that are in service."""
        return [model for model in self._by_name.values() if model.manifest.task == task]

    def named(self, name: str) -> ServedModel:
        """The model of a name that there is, in service or not."""
        return next(model for model in self.models if model.name == name)

    def serves(self, name: str) -> bool:
        """Whether a model of that name is in service."""
        return name in self._by_name

    def load(self, model: ServedModel) -> None:
        """Takes a model into service."""
        self._by_name[model.name] = model
        self._alone.clear()

    def unload(self, model: ServedModel) -> None:
        """Takes a model out of service: nothing finds it any more."""
        self._by_name.pop(model.name, None)
        self._alone.clear()

    def find(self, name: str | None, version: str | None = None, task: Task | None = None) -> ServedModel:
        """The model of that name and version.

        Args:
            name: Exact name; None for the task's default or only model, or the only one of all.
            version: Exact version; None or "" for the one being served.
            task: What it must do; None for anything.

        Raises:
            ModelNotFound: Nothing of that name and version is served.
            WrongTask: It does something else, or no model does this.
            ModelNotNamed: No name, and several models to choose from.
        """
        if name is None:
            return self._alone.get(task) or self._only(task)
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound("no model of that name is served")
        if version and version != model.version:
            raise ModelNotFound(f"model {model.name!r} is served in version {model.version} only")
        if task is not None and model.manifest.task != task:
            raise WrongTask(f"model {model.name!r} is for the task {model.manifest.task}, not for {task}")
        return model

    def named_or_only(self, name: str | None, task: Task) -> str | None:
        """The name to look for where clients must send one and often send another server's.

        Args:
            name: As it came.
            task: What the model must do.

        Returns:
            None, which means the task's only model, unless several have the task or the name is a model's.
        """
        return name if name in self._by_name or len(self.of_task(task)) > 1 else None

    def _only(self, task: Task | None) -> ServedModel:
        models = list(self._by_name.values()) if task is None else self.of_task(task)
        chosen = [model for model in models if model.name == self._defaults.get(model.manifest.task)]
        if len(models) == 1 or (task is not None and chosen):
            self._alone[task] = (chosen or models)[0]
            return self._alone[task]
        if not models:
            raise WrongTask(f"no model of the task {task} is served here")
        raise ModelNotNamed(f"{len(models)} models are served{f' for {task}' if task else ''}; name one")


def verified(root: Path, cache: Path | None = None) -> list[Bundle]:
    """The newest version of every model, verified, with what this node has made of it.

    Args:
        root: `<root>/<model>/<version>/`.
        cache: What this node made of bundles; None for no such directory.

    Raises:
        StartupError: There is no model, or one of them must not be served.
    """
    if not root.is_dir():
        raise StartupError(f"model repository {root}: no such directory; make one with `bertserve export`")
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and MODEL_NAME.fullmatch(entry.name))
        found = [(root / name, versions(root / name)) for name in names]
        newest = [directory / str(numbers[-1]) for directory, numbers in found if numbers]
        if not newest:
            raise StartupError(f"model repository {root}: holds no model; make one with `bertserve export`")
        bundles = [open_bundle(path) for path in newest]
    except BundleError as error:
        raise StartupError(str(error)) from error
    except OSError as error:
        raise StartupError(f"model repository {root}: {error}") from error
    return bundles if cache is None else [with_proofs(cache, bundle) for bundle in bundles]


def runs_on_a_gpu(bundles: Sequence[Bundle], *, built: bool = False) -> bool:
    """Whether every model has a form that some GPU could run, or with `built` brings what one can be built of."""
    targets = _TARGETS["ort-cuda"] | _TARGETS["tensorrt"]
    return all(
        (built and bundle.has_engine_graph) or any(artifact.target in targets for artifact in bundle.artifacts)
        for bundle in bundles
    )


def form_of(bundle: Bundle, precision: str, engine: str, *, unproven: bool, card: str = "") -> Artifact:
    """The form of a model that an engine shall run: proven before unproven, then the fastest, then this node's own.

    Raises:
        BundleError: It has none.
    """
    targets = {card} if card and engine == "tensorrt" else _TARGETS[engine]
    runnable = [artifact for artifact in bundle.artifacts if artifact.target in targets]
    if not runnable:
        made_for = ", ".join(sorted({artifact.target for artifact in bundle.artifacts}))
        here = f"{engine} on {card}" if card and engine == "tensorrt" else engine
        raise BundleError(f"bundle {bundle.path}: holds nothing that the engine {here} runs (it is for {made_for})")
    fastest = _FASTEST_ON_A_GPU if engine in ON_A_GPU else _FASTEST_FIRST
    wanted = fastest if precision == "auto" else (precision,)
    fitting = [artifact for artifact in runnable if artifact.precision in wanted]
    if not fitting:
        offered = ", ".join(artifact.precision for artifact in runnable)
        raise BundleError(
            f"bundle {bundle.path}: holds no artifact of precision {precision} for {engine} (it has {offered})"
        )
    best = min(
        fitting,
        key=lambda form: (not form.proven, wanted.index(form.precision), bundle.place_of(form) is None),
    )
    if not best.proven and not unproven:
        raise BundleError(
            f"bundle {bundle.path}: nobody has compared {best.file} with PyTorch; prove it here with `bertserve verify"
            f" {bundle.path} --cache-dir DIR` and serve it with the same --cache-dir, or serve it as it is with"
            " --allow-unproven true"
        )
    return best


def _served(index: ModelIndex, bundle: Bundle, artifact: Artifact) -> ServedModel:
    tokenizer = TextTokenizer.open(bundle.path, bundle.manifest)
    return ServedModel(
        index, bundle.path, bundle.sha256, bundle.manifest, artifact, tokenizer, bundle.place_of(artifact)
    )


def choose(
    path: Path,
    precision: str,
    *,
    engine: str,
    card: str = "",
    allow_unproven: bool = False,
    cache: Path | None = None,
) -> tuple[Bundle, Artifact]:
    """A version that shall take the place of another, and the form of it that an engine shall run; not verified yet.

    Args:
        path: `<root>/<model>/<version>`.
        precision: As `Repository.open`, like the others.
        engine: What will run it.
        card: As `Repository.of` has it.
        allow_unproven: Also what nobody compared with PyTorch.
        cache: What this node made of bundles.

    Raises:
        BundleError: It must not or cannot be served.
    """
    bundle = read_bundle(path)
    if cache is not None:
        bundle = with_proofs(cache, bundle)
    return bundle, form_of(bundle, precision, engine, unproven=allow_unproven, card=card)
