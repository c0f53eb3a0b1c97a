"""Selects the version of each model that serves, and switches to others.

A version is verified, loaded and warmed up in an engine process of its own, beside the one that serves. Only then does
the engine slot switch to it. A version that fails on the way does not serve, and the reason is shown. It is refused if
the reason lies in the version, and not for a temporary reason (its process was killed, memory ran out, it took
too long).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.errors import (
    BundleError,
    EngineFailed,
    EngineLost,
    ModelNotFound,
    VersionNotLoaded,
    VersionRefused,
)
from bertserve.serving.inference.served_models import ServedModel
from bertserve.serving.inference.tokenizer import TextTokenizer
from bertserve.serving.logs import log_fields
from bertserve.serving.models import verified_dir
from bertserve.serving.models.bundle import warn_of_schema
from bertserve.serving.models.manifest import TOKENIZER
from bertserve.serving.models.statistics import VersionState
from bertserve.serving.unawaited import start

if TYPE_CHECKING:
    from pathlib import Path

    from bertserve.serving.inference.served_models import Repository
    from bertserve.serving.models.bundle import Bundle
    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.rollout.engine_choice import Chooser
    from bertserve.serving.rollout.engine_slot import EngineSlot
    from bertserve.serving.settings import Settings

log = logging.getLogger("bertserve.swap")

_AGAIN_S = 5.0
"""When to retry a load request."""

Key = tuple[str, int]
"""Model and version."""


class Versions:
    """The versions of the models that the repository held when the server started.

    Attributes:
        outcomes: Swaps so far: `switched`, `refused`, or `failed` for a temporary reason.
    """

    def __init__(self, settings: Settings, repository: Repository, slot: EngineSlot, chooser: Chooser) -> None:
        self._root = settings.models
        self._repository = repository
        self._slot = slot
        self._chooser = chooser
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._loading: Key | None = None
        self._private = [f"{path}/" for path in (settings.models, settings.cache_dir) if path]
        self._unserved: dict[Key, str] = {}
        self.outcomes = {"switched": 0, "refused": 0, "failed": 0}

    def served(self) -> dict[str, int]:
        return {model.name: model.manifest.version for model in self._repository.models}

    def others(self) -> list[VersionState]:
        """The versions that are loading or failed to, unless their directory is gone."""
        for key in [key for key in self._unserved if _is_gone(self._root / key[0] / str(key[1]))]:
            del self._unserved[key]
        states = {key: ("UNAVAILABLE", reason) for key, reason in self._unserved.items()}
        if self._loading:
            states[self._loading] = ("LOADING", "verifying, loading and warming up next to the served version")
        return [VersionState(name, str(version), *state) for (name, version), state in sorted(states.items())]

    async def load(self, name: str, version: int | None = None) -> None:
        """Serves a version, the newest by default, and puts its model in service; goes on if the caller leaves.

        Raises:
            ModelNotFound: The repository had no such model when the server started, or has no such version.
            VersionRefused: It must not or cannot be served.
            VersionNotLoaded: It could not be loaded now, or the server ends.
        """
        self._check_name(name)
        task = start(self._load(name, version))
        if self._stopped:
            task.cancel()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # the caller has left
            raise VersionNotLoaded("the server is shutting down") from None

    def unload(self, name: str) -> None:
        """Takes a model out of service; its memory stays with the engine."""
        self._check_name(name)
        self._repository.unload(self._repository.named(name))

    def _check_name(self, name: str) -> None:
        if name not in self.served():
            raise ModelNotFound("unknown model: it was not in the repository when the server started")

    def stop(self) -> None:
        """Cancels all loading and starts no more; callers are told."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        self.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _load(self, name: str, version: int | None) -> None:
        served = self.served()[name]
        try:
            present = await asyncio.to_thread(_versions, self._root / name)
        except OSError as error:
            if version != served:
                reason = f"cannot list the versions of the model {name!r}: {error.strerror}"
                raise VersionNotLoaded(reason, retry_after_s=_AGAIN_S) from None
            present = []
        wanted = max(present, default=served) if version is None else version
        if wanted not in {*present, served}:
            raise ModelNotFound(f"the repository has no version {wanted} of the model {name!r}")
        await self._swap(name, wanted)
        self._repository.load(self._repository.named(name))

    async def _swap(self, name: str, version: int) -> None:
        async with self._slot.turn():
            before = self._repository.named(name)
            if before.manifest.version == version:
                return
            self._loading = (name, version)
            started = time.perf_counter()
            log_fields(
                log.info,
                "%s: loading version %d to replace version %d",
                model=name,
                version=version,
                before=before.manifest.version,
            )
            try:
                await self._bring_up(before, version)
            except (BundleError, EngineFailed, EngineLost, MemoryError, OSError) as error:
                raise self._not_served(before, version, error) from None
            finally:
                self._loading = None
            self._unserved.pop((name, version), None)
            self.outcomes["switched"] += 1
            passed = time.perf_counter() - started
            log_fields(
                log.info, "%s: serving version %d after %.2f s", model=name, version=version, seconds=round(passed, 2)
            )

    def _not_served(self, before: ServedModel, version: int, error: Exception) -> VersionRefused | VersionNotLoaded:
        """Records why a version is not served, and returns the error for the caller."""
        name, reason = before.name, _reason_of(error)
        told = str(error) or reason
        for path in self._private:
            reason = reason.replace(path, "")
        self._unserved[name, version] = reason
        message = f"version {version} of the model {name!r} is not served: {reason}"
        if _passes(error):
            self.outcomes["failed"] += 1
            log_fields(log.warning, "%s: version %d failed to load: %s", model=name, version=version, reason=told)
            return VersionNotLoaded(message, retry_after_s=_AGAIN_S)
        self.outcomes["refused"] += 1
        log_fields(log.error, "%s: version %d rejected: %s", model=name, version=version, reason=told)
        return VersionRefused(message)

    async def _bring_up(self, before: ServedModel, version: int) -> None:
        """Loads a version in a new engine, with the other models unchanged, and switches to it."""
        slot, repository, choice = self._slot, self._repository, self._repository.engine
        path = self._root / before.name / str(version)
        servable = await asyncio.to_thread(self._chooser.select_artifact, path, choice)
        bundle = servable.bundle
        warn_of_schema(bundle)
        if repository.engine.engine != choice.engine:
            raise EngineLost("the engine for this version has exited; try again", retry_after_s=_AGAIN_S)
        served = before.manifest
        if bundle.manifest.task != served.task or not set(served.also) <= {*bundle.manifest.also}:
            raise BundleError(
                f"bundle {path}: it has the task {_tasks(bundle.manifest)}, but the served version has"
                f" {_tasks(served)}; give it another model name"
            )
        models = list(repository.models)
        position = models.index(before)
        specs = list(slot.load.models)
        specs[position] = msgspec.structs.replace(servable.spec(), narrow=specs[position].narrow)
        # The costs are those of the models that serve: the new version takes over those of the old one.
        load = msgspec.structs.replace(slot.load, models=specs, bundles=[(str(path), bundle.sha256)])
        async with slot.beside(load) as engine:
            tokenizer = await asyncio.to_thread(_tokenizer, before, bundle)
            await slot.serving()
            if repository.engine.engine != choice.engine:
                raise EngineLost("another engine serves since the swap began; try again", retry_after_s=_AGAIN_S)
            models[position] = ServedModel.of(servable, slot.free_index(), tokenizer)
            slot.switch(engine, load, models)


def _passes(error: Exception) -> bool:
    """Whether a version that failed with this error may be tried again. Otherwise the reason lies in the version."""
    return error.passing if isinstance(error, EngineFailed) else not isinstance(error, BundleError)


def _reason_of(error: Exception) -> str:
    if isinstance(error, OSError):  # its message names files
        return error.strerror or "loading took too long"
    if isinstance(error, MemoryError):
        return "out of memory"
    return str(error)


def _versions(path: Path) -> list[int]:
    try:
        return verified_dir.versions(path)
    except FileNotFoundError:
        return []


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:  # a failing volume proves nothing
        return isinstance(error, FileNotFoundError)
    return False


def _tokenizer(before: ServedModel, bundle: Bundle) -> TextTokenizer:
    """The new version's tokenizer; the old one, with its warm wordpiece cache, if both read texts alike."""
    if before.manifest.reading == bundle.manifest.reading:
        return before.tokenizer
    bundle.verify(TOKENIZER)
    return TextTokenizer.open(bundle.path, bundle.manifest)


def _tasks(manifest: Manifest) -> str:
    return ", ".join((manifest.task, *manifest.also))
