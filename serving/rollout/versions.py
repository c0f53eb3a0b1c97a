"""Which version of each model is served, and how another takes its place.

A version is read, verified, loaded and warmed in an engine process of its own, beside the one that serves; only then
is it switched to. One that fails on the way does not serve: what is there serves on, and the reason is kept for
whoever asks. A reason that lies in the version refuses it for good; one that passes (its process was killed, memory
ran out, it took too long) says nothing of it, so that it may be tried again. A version whose engine process ends while
the engine before is still there gives way to that at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from serving.engine.process.supervisor import EngineFailed
from serving.errors import BundleError, EngineLost, ModelNotFound, VersionNotLoaded, VersionRefused
from serving.inference.served_models import ServedModel
from serving.inference.tokenizer import TextTokenizer
from serving.models import verified_dir
from serving.models.forms import spec_of
from serving.models.manifest import TOKENIZER
from serving.models.statistics import VersionState
from serving.rollout.retries import TRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from serving.inference.served_models import Repository
    from serving.models.bundle import Bundle
    from serving.models.manifest import Artifact, Manifest
    from serving.rollout.engine_swap import Exchange
    from serving.rollout.retries import Key, Retries

log = logging.getLogger("bertserve.swap")

_AGAIN_S = 5.0
"""When a load call may be worth repeating, where no watch says when it tries."""


class Versions:
    """The versions of the models that the repository held when the server started.

    Attributes:
        outcomes: Swaps so far: `switched`, `refused`, `failed` for a reason that passes, or `rolled_back` because the
            engine of the new one ended.
    """

    def __init__(
        self,
        root: Path,
        repository: Repository,
        exchange: Exchange,
        choose: Callable[[Path], tuple[Bundle, Artifact]],
        retries: Retries | None = None,
        cache: Path | None = None,
    ) -> None:
        """Takes what it works with.

        Args:
            root: The model repository's directory.
            repository: The models that are served.
            exchange: Brings up engines and switches.
            choose: Reads a version, and says which form of it an engine shall run.
            retries: When a watch tries newer versions again; None where nobody watches.
            cache: Where engines lie that this node has built.
        """
        self._root = root
        self._places = [f"{place}/" for place in (root, cache) if place]
        self._repository = repository
        self._exchange = exchange
        self._choose = choose
        self._retries = retries
        self._lock = exchange.turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._loading: Key | None = None
        self._left_out: dict[Key, str] = {}
        self._failed: dict[Key, str] = {}
        self._incomplete: dict[Key, str] = {}
        self.outcomes = {"switched": 0, "refused": 0, "failed": 0, "rolled_back": 0}

    def served(self) -> dict[str, int]:
        """The version of each model."""
        return {model.name: model.manifest.version for model in self._repository.models}

    def others(self) -> list[VersionState]:
        """What is known of the versions that are not served."""
        served = self.served()
        self._forget_removed()
        reasons = (
            {key: f"incomplete: {missing}" for key, missing in self._incomplete.copy().items()}
            | {key: f"{reason}; {self._when(key)}" for key, reason in self._failed.items()}
            | self._left_out
        )
        found = {key: ("UNAVAILABLE", reason) for key, reason in reasons.items()}
        if kept := self._exchange.leaving or self._exchange.kept:
            for name, version in {(model.name, model.manifest.version) for model in kept.models} - set(served.items()):
                found[name, version] = ("UNAVAILABLE", "kept for the way back")
        if self._loading:
            found[self._loading] = ("LOADING", "being verified, loaded and warmed beside the version that serves")
        return [VersionState(name, str(version), *said) for (name, version), said in sorted(found.items())]

    def _forget_removed(self) -> None:
        """Of a version whose directory is not there any more there is nothing to say."""
        for key in {*self._left_out, *self._failed, *self._incomplete.copy()}:
            if _is_gone(self._path(*key)):
                self._incomplete.pop(key, None)
                self._forget(key)

    def _forget(self, key: Key) -> None:
        """What was said against a version holds no longer."""
        self._left_out.pop(key, None)
        self._failed.pop(key, None)
        if self._retries:
            self._retries.forget(key)

    def _when(self, key: Key) -> str:
        watched = self._retries if key[1] > self.served()[key[0]] else None
        return watched.when(key) if watched else "not tried again by itself"

    def _path(self, name: str, version: int) -> Path:
        return self._root / name / str(version)

    def waits(self, name: str, version: int) -> bool:
        """Whether a version failed for a reason that passes, and it is too early to try it again."""
        return self._retries is not None and self._retries.waits((name, version))

    def is_left_out(self, name: str, version: int) -> bool:
        """Whether a version was refused, or passed over by whoever asked for an older one."""
        return (name, version) in self._left_out

    def note_missing(self, name: str, version: int, missing: str | None) -> None:
        """Says what a version that is being copied still lacks; None for nothing any more."""
        if missing is None:
            self._incomplete.pop((name, version), None)
        else:
            self._incomplete[name, version] = self._without_places(missing)

    def _without_places(self, words: str) -> str:
        """What clients may see too: no path of this machine."""
        for place in self._places:
            words = words.replace(place, "")
        return words

    def leave_out(self, name: str, version: int, reason: str) -> None:
        """Says why a version is not served."""
        self._left_out[name, version] = reason

    async def load(self, name: str, version: int | None = None) -> None:
        """Serves a version, and takes its model into service if it was out of it; goes on if the caller leaves.

        Args:
            name: The model.
            version: Which; None for the newest that the repository holds.

        Raises:
            ModelNotFound: The repository had no such model when the server started, or has no such version.
            VersionRefused: It must not or cannot be served; the message says why.
            VersionNotLoaded: It could not be loaded now; the message says why.
        """
        if name not in self.served():
            raise ModelNotFound("the repository held no model of that name when the server started")
        await self._whoever_leaves(self._load(name, version))

    async def swap(self, name: str, version: int) -> None:
        """Serves a version of a model; goes on if the caller leaves. Swaps follow one another.

        Raises:
            VersionRefused: It must not or cannot be served; the message says why.
            VersionNotLoaded: It could not be loaded now; the message says why.
        """
        await self._whoever_leaves(self._swap(name, version))

    async def _whoever_leaves(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    def unload(self, name: str) -> None:
        """Takes a model out of service; its memory stays with the engine.

        Raises:
            ModelNotFound: The repository had no such model when the server started.
        """
        if name not in self.served():
            raise ModelNotFound("the repository held no model of that name when the server started")
        self._repository.unload(self._repository.named(name))

    def fall_back(self) -> bool:
        """Serves what was served before, because the engine has ended; False where nothing is kept."""
        ended = self.served()
        if not self._exchange.fall_back():
            return False
        for name, version in self.served().items():
            if ended[name] != version:
                self.outcomes["rolled_back"] += 1
                self.leave_out(name, ended[name], f"rolled back to version {version}: its engine process ended")
                log.error("%s: the engine of version %d ended, version %d serves again", name, ended[name], version)
        return True

    async def close(self) -> None:
        """Gives up what is under way and ends what is kept."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._exchange.close()

    async def _load(self, name: str, version: int | None) -> None:
        served = self.served()[name]
        try:
            there = await asyncio.to_thread(_versions, self._root / name)
        except OSError as error:
            if version is None or not (version == served or self._keeps(name, version)):
                reason = f"the versions of the model {name!r} cannot be looked at: {error.strerror}"
                raise VersionNotLoaded(reason, retry_after_s=_AGAIN_S) from None
            there = []
        wanted = max(there, default=served) if version is None else version
        if wanted not in {*there, served} and not self._keeps(name, wanted):
            raise ModelNotFound(f"the repository holds no version {wanted} of the model {name!r}")
        await self._swap(name, wanted)
        for newer in there:
            if newer > wanted:
                self.leave_out(name, newer, f"passed over: version {wanted} was asked for")
        self._repository.load(self._repository.named(name))

    async def _swap(self, name: str, version: int) -> None:
        async with self._lock:
            # Until the one before is drained its models may come back, and before the first is warm there are no costs
            # to take over: what is served is known only then.
            await self._exchange.drained()
            await self._exchange.serving()
            before = self._repository.named(name)
            if before.manifest.version == version:
                return
            self._loading = (name, version)
            started = time.perf_counter()
            log.info("%s: version %d is to take the place of version %d", name, version, before.manifest.version)
            try:
                await self._take_turns(before, version)
            except (BundleError, EngineFailed, EngineLost, MemoryError, OSError) as error:
                raise self._not_served(before, version, error) from None
            finally:
                self._loading = None
            self._forget((name, version))
            self.outcomes["switched"] += 1
            passed = time.perf_counter() - started
            log.info("%s: version %d serves after %.2f s", name, version, passed)

    def _not_served(self, before: ServedModel, version: int, error: Exception) -> VersionRefused | VersionNotLoaded:
        """Keeps why a version does not serve, and returns what whoever asked for it is told."""
        name, reason = before.name, self._without_places(reason_of(error))
        told = f"version {version} of the model {name!r} is not served: {reason}"
        if not _passes(error):
            self._refuse(name, version, reason, error)
            return VersionRefused(told)
        pause_s: float | None = _AGAIN_S
        if self._retries and version > before.manifest.version:  # no other is watched for
            pause_s = self._retries.failed((name, version))
        if pause_s is None:
            self._refuse(name, version, f"{reason}; given up after {TRIES} tries", error)
            return VersionNotLoaded(told, retry_after_s=_AGAIN_S)
        self._left_out.pop((name, version), None)
        self._failed[name, version] = reason
        self.outcomes["failed"] += 1
        log.warning(
            "%s: version %d is not served now: %s; %s",
            *(name, version, str(error) or reason, self._when((name, version))),
        )
        return VersionNotLoaded(told, retry_after_s=pause_s)

    def _refuse(self, name: str, version: int, reason: str, error: Exception) -> None:
        self._forget((name, version))
        self.outcomes["refused"] += 1
        self.leave_out(name, version, reason)
        log.error("%s: version %d is not served: %s", name, version, str(error) or reason)

    async def _take_turns(self, before: ServedModel, version: int) -> None:
        exchange = self._exchange
        if self._keeps(before.name, version):
            exchange.back()
            return
        path = self._path(before.name, version)
        bundle, artifact = await asyncio.to_thread(self._choose, path)
        if bundle.manifest.task != before.manifest.task:
            raise BundleError(
                f"bundle {path}: it is for the task {bundle.manifest.task}, and the version that serves is for"
                f" {before.manifest.task}; give it a name of its own"
            )
        models = list(self._repository.models)  # perhaps not `before`: an engine that ends gives way to another
        place = [model.name for model in models].index(before.name)
        others = [*models[:place], *models[place + 1 :]]
        specs = [model.spec() for model in models]
        specs[place] = spec_of(bundle.made_here_in(artifact) or path, bundle.manifest, artifact)
        # The costs are those of the models that serve, so that of the old version is the new one's own.
        load = msgspec.structs.replace(exchange.load, models=specs, bundles=[(str(path), bundle.sha256)])
        async with exchange.beside(load) as engine:
            tokenizer = await asyncio.to_thread(_tokenizer, before, bundle)
            await exchange.serving()
            if not exchange.still_serves(others):
                raise EngineLost("other models changed with an engine that ended; try again", retry_after_s=_AGAIN_S)
            index = exchange.new_index()
            models[place] = ServedModel.of(index, bundle, artifact, tokenizer)
            exchange.switch(engine, load, models)

    def _keeps(self, name: str, version: int) -> bool:
        """Whether the engine before is there and differs in nothing but this version of this model."""
        kept = self._exchange.kept or self._exchange.leaving
        if kept is None:
            return False
        return {(model.name, model.manifest.version) for model in kept.models} == {
            *(self.served() | {name: version}).items()
        }


def _passes(error: Exception) -> bool:
    """Whether a version that failed so may be loaded another time; else the reason lies in it."""
    return error.passing if isinstance(error, EngineFailed) else not isinstance(error, BundleError)


def reason_of(error: Exception) -> str:
    """What clients may know of a failure."""
    if isinstance(error, OSError):  # its own words name files
        return error.strerror or "it took too long to load"
    if isinstance(error, MemoryError):
        return "there was not enough memory for it"
    return str(error)


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:  # a volume with troubles says nothing
        return False
    return False


def _versions(place: Path) -> list[int]:
    try:
        return verified_dir.versions(place)
    except FileNotFoundError:
        return []


def _tokenizer(before: ServedModel, bundle: Bundle) -> TextTokenizer:
    """The tokenizer of a version, which mostly is that of the one before: then its table of words stays warm."""
    if _reading(before.manifest) == _reading(bundle.manifest):
        return before.tokenizer
    sha256 = next(entry.sha256 for entry in bundle.manifest.files if entry.file == TOKENIZER)
    if verified_dir.digest(bundle.path / TOKENIZER) != sha256:
        raise BundleError(f"bundle {bundle.path}: {TOKENIZER} has changed while it was being loaded")
    return TextTokenizer.open(bundle.path, bundle.manifest)


def _reading(manifest: Manifest) -> tuple[Any, ...]:
    """All that decides how a model's texts are read."""
    files = [entry.sha256 for entry in manifest.files if entry.file == TOKENIZER]
    return files, manifest.max_length, manifest.vocab_size, manifest.special_ids
