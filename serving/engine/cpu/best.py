"""ONNX Runtime and OpenVINO side by side: each bucket of lengths is computed by the library that is faster here.

Which one that is depends on the processor and on the length. It is measured when a model is first loaded on a node, and
kept with its costs. A text's answer must not depend on what else is in flight, so all lanes use the same library for a
bucket, as long as the version is served.
"""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import TYPE_CHECKING, Literal

import msgspec

from serving.engine.batches import sample_text
from serving.engine.cpu import openvino, ort
from serving.engine.cpu.backend import CpuBackend
from serving.errors import BundleError, EngineFault
from serving.records import Batch, KernelFiles, ModelIndex
from serving.scheduling.cost import BUCKETS, bucket_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from serving.engine.cpu.backend import LaneModel
    from serving.records import Array, ModelSpec
    from serving.scheduling.cost import CostPoint

log = logging.getLogger("bertserve.engine")

Library = Literal["onnxruntime", "openvino"]

_NAMES: Mapping[str, Library] = {"onnxruntime": "onnxruntime", "openvino": "openvino"}

VERSION = f"onnxruntime {ort.VERSION}, openvino {openvino.VERSION}"

_LIMIT_S, _BUCKET_S = 2.5, 0.5
"""For the choice of a model and of one of its buckets. Buckets that there is no time for follow the one before."""

_LEAST_PASSES, _PASSES = 2, 4
_IN_A_ROW = 3
"""Texts of one length before one of another. OpenVINO takes longer whenever the length changes: of equal lengths alone
it would win where it loses in traffic."""

_GROUP_TOKENS = 128
"""Of a batch on busy narrow lanes, about as many as the scheduler sends there. By lone texts OpenVINO would lose where
it wins: it gains more by batches."""

_LONG_TOKENS = 32
"""Longer buckets are measured at two of their lengths instead of four."""

_CLEARLY = 0.97
"""OpenVINO must take less than this part of ONNX Runtime's time: a tie is not worth its memory."""


class BestCpuBackend(CpuBackend):
    name = "cpu"

    def __init__(
        self,
        models: Sequence[ModelSpec],
        threads: int,
        measured: Sequence[Sequence[CostPoint]] = (),
        kernels: Sequence[KernelFiles] = (),
        load_model: Callable[[ModelSpec, Sequence[int]], Sequence[LaneModel]] = ort.load,
    ) -> None:
        """Loads every model in both forms, and keeps what is used.

        Args:
            models: What to load; one without a `second` form is left to ONNX Runtime.
            threads: Cores to use.
            measured: For each model its costs on this node, which name the libraries; empty where they are not known.
            kernels: For each model the file of what OpenVINO compiles; empty for none.
            load_model: Loads a model for ONNX Runtime.
        """
        known = [_known(model, points) for model, points in zip(models, measured, strict=False)]
        self._known = iter([*known, *[None] * (len(models) - len(known))])
        self._load_model = load_model
        self._kernels = chain(kernels, repeat(KernelFiles()))
        self._libraries: list[Sequence[Library]] = []
        super().__init__(models, threads, self._load)

    def labelled(self, costs: list[list[CostPoint]]) -> list[list[CostPoint]]:
        return [
            [_with_library(point, libraries) for point in points]
            for libraries, points in zip(self._libraries, costs, strict=True)
        ]

    def _load(self, model: ModelSpec, threads: Sequence[int]) -> list[LaneModel]:
        known, files = next(self._known), next(self._kernels)
        second = model.second
        if second is None:
            known = ["onnxruntime"] * (bucket_index(model.max_length) + 1)
        lanes: dict[Library, Sequence[LaneModel]] = {}
        if known is None or "onnxruntime" in known:
            lanes["onnxruntime"] = self._load_model(model, threads)
        libraries = known or []
        if second is not None and (known is None or "openvino" in known):
            recalled = openvino.recall(second, threads, files)
            lanes["openvino"] = loaded = recalled or openvino.load(second, threads, alone=False)
            libraries = known or _fastest(model, lanes)
            lengths = [n for n in range(1, model.max_length + 1) if libraries[bucket_index(n)] == "openvino"]
            # What a larger model compiles would fill the node's cache, and saves it little.
            if lengths and files.write and model.copied and not recalled:
                openvino.keep(second, loaded[0], files.write)
            openvino.warm_up(loaded, lengths)
        self._libraries.append(libraries)
        log.info("%s: %s", model.name, summary(libraries))
        return [_Model([lanes[library][lane] for library in libraries]) for lane in range(len(threads))]


class _Model:
    """One model on one lane, by bucket."""

    def __init__(self, buckets: Sequence[LaneModel]) -> None:
        self._buckets = buckets

    def run(self, batch: Batch) -> Sequence[Array]:
        texts = batch.texts
        model = self._buckets[bucket_index(len(texts[0].ids))]
        if len(texts) > 1 and any(self._buckets[bucket_index(len(text.ids))] is not model for text in texts):
            # The scheduler batches within a bucket; if it did not, an answer would depend on its company.
            raise EngineFault("a batch of texts that are computed by different libraries")
        return model.run(batch)


def summary(libraries: Sequence[str]) -> str:
    """Which library computes which lengths, for a log.

    >>> summary(["onnxruntime", "openvino", "openvino"])
    'onnxruntime up to 16 tokens, then openvino'
    """
    parts = []
    for bucket, library in enumerate(libraries):
        if bucket + 1 == len(libraries) or libraries[bucket + 1] != library:
            parts.append(library if bucket + 1 == len(libraries) else f"{library} up to {BUCKETS[bucket]} tokens")
    return ", then ".join(parts)


def _known(model: ModelSpec, points: Sequence[CostPoint]) -> list[Library] | None:
    """The library of each bucket, where costs name one for all of them."""
    named = {bucket_index(point.tokens): _NAMES.get(point.library) for point in points}
    found = [named.get(bucket) for bucket in range(bucket_index(model.max_length) + 1)]
    libraries = [library for library in found if library is not None]
    return libraries if len(libraries) == len(found) else None


def _with_library(point: CostPoint, libraries: Sequence[Library]) -> CostPoint:
    return msgspec.structs.replace(point, library=libraries[bucket_index(point.tokens)])


def _fastest(model: ModelSpec, lanes: Mapping[Library, Sequence[LaneModel]]) -> list[Library]:
    """The faster library for each bucket: on the wide lane and, where there are any, on busy narrow lanes."""
    started = time.perf_counter()
    chosen: list[Library] = []
    count = len(lanes["openvino"])
    with ThreadPoolExecutor(count) as pool:
        for bucket in range(bucket_index(model.max_length) + 1):
            if chosen and time.perf_counter() - started > _LIMIT_S:
                chosen.append(chosen[-1])
                continue
            loads = [(slice(1), _lone(model, bucket)), (slice(1, None), _groups(model, bucket))][: min(count, 2)]
            ratios = [
                _ratio(pool, lanes["openvino"][group], lanes["onnxruntime"][group], batches) for group, batches in loads
            ]
            chosen.append("openvino" if math.prod(ratios) < _CLEARLY ** len(ratios) else "onnxruntime")
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            log.info("%s, bucket %d: openvino takes %s of onnxruntime's time", model.name, bucket, shown)
    return chosen


def _lone(model: ModelSpec, bucket: int) -> list[Batch]:
    """Lone texts of a bucket, some of each length in a row."""
    return [
        Batch(ModelIndex(0), [sample_text(model, length)])
        for length in _lengths(model, bucket)
        for _ in range(_IN_A_ROW)
    ]


def _groups(model: ModelSpec, bucket: int) -> list[Batch]:
    """Batches of texts of a bucket, as many as busy lanes get at once; each of another length than the one before."""
    lengths = _lengths(model, bucket)
    size = max(1, _GROUP_TOKENS // lengths[-1]) if model.batch_invariant else 1
    return [Batch(ModelIndex(0), [sample_text(model, length)] * size) for length in lengths]


def _lengths(model: ModelSpec, bucket: int) -> list[int]:
    """Evenly spread lengths of a bucket in tokens, ascending."""
    top = min(BUCKETS[bucket] if bucket < len(BUCKETS) else model.max_length, model.max_length)
    low = BUCKETS[bucket - 1] if bucket else 0
    count = 4 if top <= _LONG_TOKENS else 2
    return sorted({low + max(1, (top - low) * part // count) for part in range(1, count + 1)})


def _ratio(
    pool: ThreadPoolExecutor, one: Sequence[LaneModel], other: Sequence[LaneModel], batches: Sequence[Batch]
) -> float:
    """The time of one library's lanes over that of the other's, measured in turns; the least of some passes each.

    Raises:
        BundleError: The graph cannot compute them.
    """
    started, times = time.perf_counter(), list[tuple[float, float]]()
    try:
        while len(times) < _LEAST_PASSES or (len(times) < _PASSES and time.perf_counter() - started < _BUCKET_S):
            times.append((_pass_s(pool, one, batches), _pass_s(pool, other, batches)))
    except EngineFault as fault:
        raise BundleError(f"warm-up failed: {fault.message}") from fault
    ones, others = zip(*times[1:], strict=True)  # the first is a cold one
    return float(min(ones) / min(others))


def _pass_s(pool: ThreadPoolExecutor, lanes: Sequence[LaneModel], batches: Sequence[Batch]) -> float:
    """Seconds in which every lane computes all batches, side by side."""

    def work(lane: LaneModel) -> None:
        for batch in batches:
            lane.run(batch)

    started = time.perf_counter()
    list(pool.map(work, lanes))
    return time.perf_counter() - started
