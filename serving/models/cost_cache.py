"""Cost tables in the node's cache: what was measured here before need not be measured at every start.

A table holds for the artifact, the engine, the device, the libraries and the number of cores it was measured with;
where one of them differs it counts for nothing, and warm-up measures anew.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING

import msgspec

from serving.host import available_cpus
from serving.models import node
from serving.models.bundle import Bundle
from serving.models.node_cache import CacheError, CacheWriter, open_entry
from serving.scheduling.cost import CostPoint, CostTable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from serving.models.repository import ServedModel
    from serving.records import EngineChoice
    from serving.settings import Settings

log = logging.getLogger("bertserve")

_LARGEST_BYTES = 1 << 20
_MOST_POINTS = 512
"""Lengths times sizes, with room: a table of many more would take its time to build."""


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides about a model's costs.

    Attributes:
        artifact: SHA-256 of the file that is served.
        engine: What runs it, as `--engine` calls it.
        device: As `node.device` says it.
        libraries: Version by name of what runs it.
        threads: Cores.
        max_batch_tokens: Padded tokens of the largest batch that was measured.
    """

    artifact: str
    engine: str
    device: str
    libraries: dict[str, str]
    threads: int
    max_batch_tokens: int


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    fingerprint: Fingerprint
    points: list[CostPoint]


class CostCache:
    """The tables of one node, for one way of running its models."""

    def __init__(self, root: Path, engine: str, threads: int, max_batch_tokens: int) -> None:
        """Names the place and the way.

        Args:
            root: The node's cache.
            engine: As `--engine` calls it.
            threads: Cores.
            max_batch_tokens: Padded tokens of the largest batch.
        """
        self._root = root
        self._engine = engine
        self._threads = threads
        self._max_batch_tokens = max_batch_tokens

    def read(self, model: ServedModel) -> list[CostPoint]:
        """What was measured of a model on this very node; empty where nothing was, or nothing that counts."""
        try:
            entry = open_entry(self._root, bundle_of(model))
            if entry is None or all(file.file != self._name(model) for file in entry.derived.files):
                return []
            path = entry.path / self._name(model)
            if path.stat().st_size > _LARGEST_BYTES:
                return []
            found = msgspec.json.decode(path.read_bytes(), type=Costs)
            _check(found.points)
        except (CacheError, OSError, ValueError) as error:
            log.warning("the costs of %s in the node's cache count for nothing: %s", model.name, error)
            return []
        return found.points if found.fingerprint == self._fingerprint(model) else []

    def write(self, model: ServedModel, points: Sequence[CostPoint]) -> None:
        """Keeps what was measured; where that cannot be done, the log says so."""
        try:
            with CacheWriter(self._root, model.manifest.model, model.manifest.version) as writer:
                content = msgspec.json.encode(Costs(self._fingerprint(model), list(points)))
                (writer.path / self._name(model)).write_bytes(content)
                writer.publish(bundle_of(model), files=[self._name(model)])
        except (CacheError, OSError) as error:
            log.warning("the costs of %s were not kept: %s", model.name, error)

    def _name(self, model: ServedModel) -> str:
        stem = re.sub(r"[^A-Za-z0-9]+", "-", model.artifact.file)
        engine = re.sub(r"[^A-Za-z0-9-]+", "-", self._engine)
        return f"costs.{stem}.{engine}.json"

    def _fingerprint(self, model: ServedModel) -> Fingerprint:
        return Fingerprint(
            artifact=model.artifact.sha256,
            engine=self._engine,
            device=node.device(),
            libraries=node.libraries(model.artifact.target),
            threads=self._threads,
            max_batch_tokens=self._max_batch_tokens,
        )


class KeptCosts:
    """What a server knows of its models' costs from before, and adds to it; nothing where it has no cache."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._measured: set[str] = set()

    def read(self, choice: EngineChoice, models: Sequence[ServedModel]) -> list[list[CostPoint]]:
        """For each model what was measured on this very node, with this very engine."""
        cache = self._cache(choice)
        found = [cache.read(model) if cache else [] for model in models]
        self._measured = {model.artifact.sha256 for model, points in zip(models, found, strict=True) if not points}
        return found

    def write(self, choice: EngineChoice, models: Sequence[ServedModel], costs: Sequence[Sequence[CostPoint]]) -> None:
        """Keeps what was measured, once, beside the event loop: digests and `fsync` take their time.

        A version that came by a swap has the costs of the one before it, which are no measurement of its own.
        """
        cache = self._cache(choice)
        for model, points in zip(models, costs, strict=True):
            if cache is not None and model.artifact.sha256 in self._measured:
                self._measured.discard(model.artifact.sha256)
                threading.Thread(target=cache.write, args=(model, list(points))).start()

    def _cache(self, choice: EngineChoice) -> CostCache | None:
        settings = self._settings
        if settings.cache_dir is None or choice.engine == "fake":
            return None
        threads = settings.threads or available_cpus()
        # Of a GPU the name and how many there are decide, as the processor does of a CPU.
        engine = choice.engine if not choice.cards else f"{choice.engine} on {len(choice.cards)} {choice.cards[0].name}"
        return CostCache(settings.cache_dir, engine, threads, settings.max_batch_tokens)


def _check(points: Sequence[CostPoint]) -> None:
    """Refuses points of which no table can be made.

    Raises:
        ValueError: It says why.
    """
    if len(points) > _MOST_POINTS:
        raise ValueError(f"{len(points)} cost points; there are at most {_MOST_POINTS}")
    CostTable.of(point for point in points if point.kind == "wide")
    if narrow := [point for point in points if point.kind == "narrow"]:
        CostTable.of(narrow)


def bundle_of(model: ServedModel) -> Bundle:
    """The bundle that a model is of."""
    return Bundle(model.path, model.manifest, model.bundle_sha256)
