"""Selects the version of each model that serves, and switches to others.

A version is verified, loaded and warmed up in an engine process of its own, beside the one that serves. Only then does
the engine slot switch to it. A version that fails on the way does not serve, and the reason is shown. It is refused for
good if the reason lies in the version, and not for a temporary reason (its process was killed, memory ran out, it took
too long). If a new version's engine process ends while the previous generation is still there, that generation serves
again at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from serving.errors import BundleError, EngineFailed, EngineLost, ModelNotFound, VersionNotLoaded, VersionRefused
from serving.inference.served_models import ServedModel
from serving.inference.tokenizer import TextTokenizer
from serving.logs import tell
from serving.models import verified_dir
from serving.models.bundle import warn_of_schema
from serving.models.manifest import TOKENIZER
from serving.models.statistics import VersionState
from serving.rollout.engine_slot import EngineGeneration
from serving.rollout.unserved import TRIES, Key, UnservedVersions
from serving.unawaited import start

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from serving.inference.served_models import Repository
    from serving.models.bundle import Bundle
    from serving.models.manifest import Manifest
    from serving.rollout.engine_choice import Chooser
    from serving.rollout.engine_slot import EngineSlot
    from serving.settings import Settings

log = logging.getLogger("bertserve.swap")

_AGAIN_S = 5.0
"""When to retry a load request if no watch tries the version again."""


class Versions:
    """The versions of the models that the repository held when the server started.

    Attributes:
        outcomes: Swaps so far: `switched`, `refused`, `failed` for a temporary reason, `rolled_back` as the engine
            ended.
    """

    def __init__(self, settings: Settings, repository: Repository, slot: EngineSlot, chooser: Chooser) -> None:
        self._root = settings.models
        self._repository = repository
        self._slot = slot
        self._chooser = chooser
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._loading: Key | None = None
        self.unserved = UnservedVersions(settings.models, settings.cache_dir, settings.watch_models_s)
        self.outcomes = {"switched": 0, "refused": 0, "failed": 0, "rolled_back": 0}
        slot.on_fall_back.append(self._fallen_back)

    def served(self) -> dict[str, int]:
        return {model.name: model.manifest.version for model in self._repository.models}

    def others(self) -> list[VersionState]:
        served = self.served()
        states = {key: ("UNAVAILABLE", reason) for key, reason in self.unserved.reasons(served).items()}
        if previous := self._slot.previous:
            for key in set(previous.versions.items()) - set(served.items()):
                states[key] = ("UNAVAILABLE", "kept for rollback")
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
        await self._shielded(self._load(name, version))

    async def swap(self, name: str, version: int) -> None:
        """Serves a version of a model; goes on if the caller leaves."""
        await self._shielded(self._swap(name, version))

    async def _shielded(self, work: Coroutine[Any, Any, None]) -> None:
        task = start(work)
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

    def _fallen_back(self, ended: dict[str, int]) -> None:
        for name, version in self.served().items():
            if ended[name] != version:
                self.outcomes["rolled_back"] += 1
                reason = f"rolled back to version {version}: its engine process exited"
                self.unserved.leave_out((name, ended[name]), reason)
                log.error("%s: the engine of version %d exited, rolled back to version %d", name, ended[name], version)

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
            if version is None or not (version == served or self._is_kept(name, version)):
                reason = f"cannot list the versions of the model {name!r}: {error.strerror}"
                raise VersionNotLoaded(reason, retry_after_s=_AGAIN_S) from None
            present = []
        wanted = max(present, default=served) if version is None else version
        if wanted not in {*present, served} and not self._is_kept(name, wanted):
            raise ModelNotFound(f"the repository has no version {wanted} of the model {name!r}")
        await self._swap(name, wanted)
        for newer in present:
            if newer > wanted:
                self.unserved.leave_out((name, newer), f"skipped: version {wanted} was requested")
        self._repository.load(self._repository.named(name))

    async def _swap(self, name: str, version: int) -> None:
        async with self._slot.turn():
            before = self._repository.named(name)
            if before.manifest.version == version:
                return
            self._loading = (name, version)
            started = time.perf_counter()
            tell(
                log.info,
                "%s: loading version %d to replace version %d",
                model=name,
                version=version,
                before=before.manifest.version,
            )
            try:
                if self._is_kept(name, version):
                    self._slot.roll_back()
                else:
                    await self._bring_up(before, version)
            except (BundleError, EngineFailed, EngineLost, MemoryError, OSError) as error:
                raise self._not_served(before, version, error) from None
            finally:
                self._loading = None
            self.unserved.forget((name, version))
            self.outcomes["switched"] += 1
            passed = time.perf_counter() - started
            tell(log.info, "%s: serving version %d after %.2f s", model=name, version=version, seconds=round(passed, 2))

    def _not_served(self, before: ServedModel, version: int, error: Exception) -> VersionRefused | VersionNotLoaded:
        """Records why a version is not served, and returns the error for the caller."""
        name, served, key = before.name, before.manifest.version, (before.name, version)
        reason = self.unserved.public(reason_of(error))
        message = f"version {version} of the model {name!r} is not served: {reason}"
        if not _passes(error):
            self._refuse(key, reason, error)
            return VersionRefused(message)
        pause_s = self.unserved.fail(key, reason, served=served)
        if pause_s is None:
            self._refuse(key, f"{reason}; gave up after {TRIES} attempts", error)
        else:
            self.outcomes["failed"] += 1
            when = self.unserved.when(key, served=served)
            tell(
                log.warning,
                "%s: version %d failed to load: %s; %s",
                model=name,
                version=version,
                reason=str(error) or reason,
                again=when,
            )
        return VersionNotLoaded(message, retry_after_s=pause_s or _AGAIN_S)

    def _refuse(self, key: Key, reason: str, error: Exception) -> None:
        self.outcomes["refused"] += 1
        self.unserved.leave_out(key, reason)
        tell(log.error, "%s: version %d rejected: %s", model=key[0], version=key[1], reason=str(error) or reason)

    async def _bring_up(self, before: ServedModel, version: int) -> None:
        """Loads a version in a new engine, with the other models unchanged, and switches to it."""
        slot, choice = self._slot, self._slot.choice
        path = self._root / before.name / str(version)
        servable = await asyncio.to_thread(self._chooser.select_artifact, path, choice)
        bundle = servable.bundle
        warn_of_schema(bundle)
        if slot.choice.engine != choice.engine:
            raise EngineLost("the engine for this version has exited; try again", retry_after_s=_AGAIN_S)
        served = before.manifest
        if bundle.manifest.task != served.task or not set(served.also) <= {*bundle.manifest.also}:
            raise BundleError(
                f"bundle {path}: it has the task {_tasks(bundle.manifest)}, but the served version has"
                f" {_tasks(served)}; give it another model name"
            )
        models = list(slot.models)  # perhaps without `before`: the slot may have fallen back meanwhile
        position = [model.name for model in models].index(before.name)
        others = [*models[:position], *models[position + 1 :]]
        specs = [model.spec() for model in models]
        specs[position] = servable.spec()
        # The costs are those of the models that serve: the new version takes over those of the old one.
        load = msgspec.structs.replace(slot.load, models=specs, bundles=[(str(path), bundle.sha256)])
        async with slot.beside(load) as engine:
            tokenizer = await asyncio.to_thread(_tokenizer, before, bundle)
            await slot.serving()
            if not slot.still_serves(others):
                raise EngineLost("other models changed during the swap; try again", retry_after_s=_AGAIN_S)
            models[position] = ServedModel.of(servable, next(slot.new_indices()), tokenizer)
            slot.switch(EngineGeneration(engine, load, models, choice))

    def _is_kept(self, name: str, version: int) -> bool:
        """Whether the previous generation differs only in this version of this model."""
        previous = self._slot.previous
        return previous is not None and previous.versions == self.served() | {name: version}


def _passes(error: Exception) -> bool:
    """Whether a version that failed with this error may be tried again. Otherwise the reason lies in the version."""
    return error.passing if isinstance(error, EngineFailed) else not isinstance(error, BundleError)


def reason_of(error: Exception) -> str:
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


def _tokenizer(before: ServedModel, bundle: Bundle) -> TextTokenizer:
    """The new version's tokenizer; the old one, with its warm wordpiece cache, if both read texts alike."""
    if before.manifest.reading == bundle.manifest.reading:
        return before.tokenizer
    bundle.verify(TOKENIZER)
    return TextTokenizer.open(bundle.path, bundle.manifest)


def _tasks(manifest: Manifest) -> str:
    return ", ".join((manifest.task, *manifest.also))
