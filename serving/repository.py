"""The model repository: which models there are, verified before anything loads them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.bundle import BundleError, open_bundle, versions
from serving.engine.base import ModelSpec
from serving.errors import InvalidRequest, ModelNotFound, StartupError
from serving.manifest import MODEL_NAME
from serving.records import ModelIndex
from serving.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from serving.manifest import Artifact, Manifest


@dataclass(slots=True, frozen=True)
class ServedModel:
    """A model that requests can name.

    Attributes:
        index: Its position in the engine's list.
        path: Its bundle.
        manifest: What the bundle says.
        artifact: The form of it that is served.
        tokenizer: Text to ids.
    """

    index: ModelIndex
    path: Path
    manifest: Manifest
    artifact: Artifact
    tokenizer: TextTokenizer

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.model

    @property
    def version(self) -> str:
        """The model's version, as protocols write it."""
        return str(self.manifest.version)

    def spec(self) -> ModelSpec:
        """The model as an engine loads it."""
        return ModelSpec(
            name=self.name,
            path=str(self.path / self.artifact.file),
            sha256=self.artifact.sha256,
            batch_invariant=self.artifact.batch_invariant,
            vocab_size=self.manifest.vocab_size,
            max_length=self.manifest.max_length,
            special_ids=self.manifest.special_ids,
            inputs=tuple(tensor.name for tensor in self.manifest.inputs),
            outputs=self.manifest.outputs,
        )


class Repository:
    """The models being served, by exact name; a name from a request never becomes a path."""

    def __init__(self, models: list[ServedModel]) -> None:
        self.models = models
        self._by_name = {model.name: model for model in models}

    @classmethod
    def open(cls, root: Path, precision: str) -> Repository:
        """Verifies and opens the newest version of every model below `root`.

        Args:
            root: `<root>/<model>/<version>/`.
            precision: `fp32`, `int8`, or `auto` for the fastest there is on a CPU.

        Raises:
            StartupError: There is no model, or one of them must not be served.
        """
        if not root.is_dir():
            raise StartupError(f"model repository {root}: no such directory; make one with `bertserve export`")
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and MODEL_NAME.fullmatch(entry.name))
        found = [(root / name, versions(root / name)) for name in names]
        newest = [directory / str(numbers[-1]) for directory, numbers in found if numbers]
        if not newest:
            raise StartupError(f"model repository {root}: holds no model; make one with `bertserve export`")
        try:
            return cls([_open_model(ModelIndex(index), path, precision) for index, path in enumerate(newest)])
        except BundleError as error:
            raise StartupError(str(error)) from error
        except OSError as error:
            raise StartupError(f"model repository {root}: {error}") from error

    def find(self, name: str | None, version: str | None = None) -> ServedModel:
        """The model of that name and version.

        Args:
            name: Exact name; None for the only model.
            version: Exact version; None or "" for the one being served.

        Raises:
            ModelNotFound: Nothing of that name and version is served.
            InvalidRequest: No name, and several models to choose from.
        """
        if name is None:
            if len(self.models) == 1:
                return self.models[0]
            raise InvalidRequest(f"{len(self.models)} models are served; name one")
        model = self._by_name.get(name)
        if model is None:
            raise ModelNotFound("no model of that name is served")
        if version and version != model.version:
            raise ModelNotFound(f"model {model.name!r} is served in version {model.version} only")
        return model


def _open_model(index: ModelIndex, path: Path, precision: str) -> ServedModel:
    bundle = open_bundle(path)
    wanted = ("int8", "fp32") if precision == "auto" else (precision,)
    artifact = next((found for name in wanted if (found := bundle.artifact(name))), None)
    if artifact is None:
        offered = ", ".join(entry.precision for entry in bundle.manifest.artifacts)
        raise BundleError(f"bundle {path}: holds no artifact of precision {precision} (it has {offered})")
    tokenizer = TextTokenizer.open(path, bundle.manifest)
    return ServedModel(index, path, bundle.manifest, artifact, tokenizer)
