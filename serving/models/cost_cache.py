"""Caches cost tables on the node, so that a start need not repeat measurements.

A table is valid only for the artifact, engine, device, libraries, threads and largest batch that it was measured with.
"""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving import host
from bertserve.serving.engine.kinds import ENGINES
from bertserve.serving.models.node_cache import CacheError, add_file, libraries_of, open_entry
from bertserve.serving.scheduling.cost import CostPoint, CostTable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bertserve.serving.engine.specs import EngineChoice
    from bertserve.serving.models.artifact_selection import ServableArtifact

log = logging.getLogger("bertserve")

_LARGEST_BYTES = 1 << 20
_MAX_POINTS = 512
"""Lengths times batch sizes, with room. A much larger table would take long to build."""


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model's costs depend on.

    Attributes:
        artifact: SHA-256 of the artifact that is served, or of both.
        engine: Name as in `--engine`; for GPUs also their name and number.
        libraries: Versions of the libraries that run it, by name.
        max_batch_tokens: Padded tokens of the largest batch measured.
    """

    artifact: str
    engine: str
    device: str
    libraries: dict[str, str]
    threads: int
    max_batch_tokens: int


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fingerprint: Fingerprint
    points: list[CostPoint]


class CostCache:
    """The cost tables of one node; none without a `root`. `max_batch_tokens` counts padded tokens."""

    def __init__(self, root: Path | None, *, threads: int, max_batch_tokens: int) -> None:
        self._root = root
        self._threads = threads
        self._max_batch_tokens = max_batch_tokens
        self._measured: set[str] = set()

    def read(
        self, choice: EngineChoice, models: Sequence[ServableArtifact], narrow: Sequence[bool]
    ) -> list[list[CostPoint]]:
        """The cached costs of each model on this engine; empty if they have to be measured.

        `narrow` says whether narrow lanes run the model too: costs that were measured otherwise are not used.
        """
        self._measured.clear()
        if self._root is None or not ENGINES[choice.engine].keeps_costs:
            return [[] for _ in models]
        tables = [self._read(self._root, choice, model, narrow=own) for model, own in zip(models, narrow, strict=True)]
        self._measured = {model.artifact.sha256 for model, points in zip(models, tables, strict=True) if not points}
        return tables

    def write(
        self, choice: EngineChoice, models: Sequence[ServableArtifact], costs: Sequence[Sequence[CostPoint]]
    ) -> None:
        """Writes new measurements once, in a thread, because digests and `fsync` are slow.

        A version that was hot-swapped in is not written: it has the costs of the version before it.
        """
        for model, points in zip(models, costs, strict=True):
            if model.artifact.sha256 in self._measured:
                self._measured.discard(model.artifact.sha256)
                threading.Thread(target=self.write_table, args=(choice, model, list(points))).start()

    def write_table(self, choice: EngineChoice, model: ServableArtifact, points: Sequence[CostPoint]) -> None:
        if self._root is None:
            return
        content = msgspec.json.encode(Costs(self._fingerprint(choice, model), list(points)))
        try:
            add_file(self._root, model.bundle, _file_name(choice, model), content)
        except (CacheError, OSError) as error:
            log.warning("cannot cache the costs of %s: %s", model.name, error)

    def _read(self, root: Path, choice: EngineChoice, model: ServableArtifact, *, narrow: bool) -> list[CostPoint]:
        try:
            entry = open_entry(root, model.bundle)
            file = entry.file(_file_name(choice, model)) if entry else None
            if entry is None or file is None or file.size_bytes > _LARGEST_BYTES:
                return []
            costs = msgspec.json.decode((entry.path / file.file).read_bytes(), type=Costs)
            _check(costs.points)
        except (CacheError, OSError, ValueError) as error:
            log.warning("ignoring the cached costs of %s: %s", model.name, error)
            return []
        is_same = choice.gpus or narrow == any(point.kind == "narrow" for point in costs.points)
        return costs.points if is_same and costs.fingerprint == self._fingerprint(choice, model) else []

    def _fingerprint(self, choice: EngineChoice, model: ServableArtifact) -> Fingerprint:
        return Fingerprint(
            artifact=" ".join(artifact.sha256 for artifact in model.artifacts),
            engine=_engine(choice),
            device=host.cpu(),
            libraries={k: v for artifact in model.artifacts for k, v in libraries_of(artifact.target).items()},
            threads=self._threads,
            max_batch_tokens=self._max_batch_tokens,
        )


def _engine(choice: EngineChoice) -> str:
    return f"{choice.engine} on {len(choice.gpus)} {choice.gpus[0].name}" if choice.gpus else choice.engine


def _file_name(choice: EngineChoice, model: ServableArtifact) -> str:
    artifact = re.sub(r"[^A-Za-z0-9]+", "-", model.artifact.file)
    engine = re.sub(r"[^A-Za-z0-9-]+", "-", _engine(choice))
    return f"costs.{artifact}.{engine}.json"


def _check(points: Sequence[CostPoint]) -> None:
    """Raises ValueError for points that cannot form a table."""
    if len(points) > _MAX_POINTS:
        raise ValueError(f"{len(points)} cost points; the maximum is {_MAX_POINTS}")
    CostTable.of(point for point in points if point.kind == "wide")
    if narrow := [point for point in points if point.kind == "narrow"]:
        CostTable.of(narrow)
