"""ONNX Runtime and OpenVINO combined: ONNX Runtime computes short texts, OpenVINO long ones.

The border between them depends on the processor. It is measured when a model is first loaded on a node, and cached with
its costs. A text's output must not depend on other requests in flight. So all lanes use the same library for a length
bucket while the version is served. The output should not depend on the replica either, so a border other than the usual
one needs a clear gain.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import TYPE_CHECKING, Literal

import msgspec

from bertserve.serving.engine.base import Batch
from bertserve.serving.engine.batches import sample_text
from bertserve.serving.engine.cpu import openvino, ort
from bertserve.serving.engine.cpu.backend import CpuBackend
from bertserve.serving.engine.specs import KernelFiles
from bertserve.serving.errors import BundleError, EngineFault
from bertserve.serving.records import ModelIndex
from bertserve.serving.scheduling.cost import BUCKETS, GROUP_TOKENS, bucket_index

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.engine.cpu.backend import LaneModel
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array
    from bertserve.serving.scheduling.cost import CostPoint

log = logging.getLogger("bertserve.engine")

Library = Literal["onnxruntime", "openvino"]

_NAMES: Mapping[str, Library] = {"onnxruntime": "onnxruntime", "openvino": "openvino"}

VERSION = f"onnxruntime {ort.VERSION}, openvino {openvino.VERSION}"

_USUAL = 1
"""Buckets that ONNX Runtime computes unless another border gains: up to 16 tokens, the best border in measurements
(docs/benchmarks/decisions.md)."""

_MARGIN = 0.4
"""Minimum gain of each bucket between the usual border and another one, as a natural logarithm: about half as much time
again. Replicas on equal machines must choose alike, and noise rarely shifts a measurement by as much."""

_LIMIT_S, _BUCKET_S = 3.5, 0.7
"""Time limits in seconds for a model and for one of its buckets. Buckets beyond the limit take the gain of the one
before."""

_MIN_TURNS, _TURNS = 4, 12
_CLEAR = 0.3
"""Distance between a bucket's gain and the margin at which more turns would change nothing."""

_IN_A_ROW = 3
"""Texts of one length before one of another. OpenVINO is slower after each change of length. With equal lengths alone
it would win buckets that it loses in real traffic."""

_LONG_TOKENS = 32
"""Longer buckets are measured at two lengths instead of four."""


class HybridCpuBackend(CpuBackend):
    def __init__(
        self,
        models: Sequence[ModelSpec],
        threads: int,
        measured: Sequence[Sequence[CostPoint]] = (),
        kernels: Sequence[KernelFiles] = (),
    ) -> None:
        """Loads every model in both forms, and keeps those in use.

        Args:
            models: Models to load; one without a `second` form runs on ONNX Runtime.
            threads: Cores to use.
            measured: Each model's costs on this node, which name the libraries; empty if unknown.
            kernels: Files of each model's kernels that OpenVINO compiles; empty for none.
        """
        known = [_recall_libraries(model, points) for model, points in zip(models, measured, strict=False)]
        self._known = iter([*known, *[None] * (len(models) - len(known))])
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
        with ThreadPoolExecutor(1) as pool:  # OpenVINO compiles while ONNX Runtime loads
            compiled = None
            if second is not None and (known is None or "openvino" in known):
                compiled = pool.submit(_compile, second, threads, files)
            if known is None or "onnxruntime" in known:
                lanes["onnxruntime"] = ort.load(model, threads)
            libraries = known or []
            if second is not None and compiled is not None:
                loaded, is_recalled = compiled.result()
                lanes["openvino"] = loaded
                libraries = known or _fastest(model, lanes)
                lengths = [n for n in range(1, model.max_length + 1) if libraries[bucket_index(n)] == "openvino"]
                # Kernels of a larger model would fill the node's cache and save little time.
                if lengths and files.write and second.small and not is_recalled:
                    openvino.keep(second, loaded[0], files.write)
                openvino.warm_up(loaded, lengths)
        self._libraries.append(libraries)
        log.info("%s: %s", model.name, summary(libraries))
        return [_Model([lanes[library][lane] for library in libraries]) for lane in range(len(threads))]


def _compile(
    model: ModelSpec, threads: Sequence[int], files: KernelFiles
) -> tuple[Sequence[openvino.OpenVinoModel], bool]:
    """Returns OpenVINO's lanes, and whether they come from the node's cache."""
    recalled = openvino.recall(model, threads, files)
    return recalled or openvino.load(model, threads, alone=False), bool(recalled)


class _Model:
    """One model on one lane, with a library for each bucket."""

    def __init__(self, buckets: Sequence[LaneModel]) -> None:
        self._buckets = buckets

    def run(self, batch: Batch) -> Sequence[Array]:
        texts = batch.texts
        model = self._buckets[bucket_index(len(texts[0].ids))]
        if len(texts) > 1 and any(self._buckets[bucket_index(len(text.ids))] is not model for text in texts):
            # The scheduler batches within a bucket; otherwise an output would depend on the rest of the batch.
            raise EngineFault("a batch of texts that are computed by different libraries")
        return model.run(batch)

    def trim(self) -> None:
        for model in dict.fromkeys(self._buckets):
            model.trim()


def summary(libraries: Sequence[str]) -> str:
    """Describes which library computes which lengths, for the log.

    >>> summary(["onnxruntime", "openvino", "openvino"])
    'onnxruntime up to 16 tokens, then openvino'
    """
    parts = []
    for bucket, library in enumerate(libraries):
        if bucket + 1 == len(libraries) or libraries[bucket + 1] != library:
            parts.append(library if bucket + 1 == len(libraries) else f"{library} up to {BUCKETS[bucket]} tokens")
    return ", then ".join(parts)


def _recall_libraries(model: ModelSpec, points: Sequence[CostPoint]) -> list[Library] | None:
    """Returns the library of each bucket if the costs name one for all of them, else None."""
    named = {bucket_index(point.tokens): _NAMES.get(point.library) for point in points}
    found = [named.get(bucket) for bucket in range(bucket_index(model.max_length) + 1)]
    libraries = [library for library in found if library is not None]
    return libraries if len(libraries) == len(found) else None


def _with_library(point: CostPoint, libraries: Sequence[Library]) -> CostPoint:
    return msgspec.structs.replace(point, library=libraries[bucket_index(point.tokens)])


def _fastest(model: ModelSpec, lanes: Mapping[Library, Sequence[LaneModel]]) -> list[Library]:
    """Returns the library for each bucket; ONNX Runtime's buckets come first."""
    started = time.perf_counter()
    gains: list[float] = []
    with ThreadPoolExecutor(len(lanes["openvino"])) as pool:
        for bucket in range(bucket_index(model.max_length) + 1):
            in_time = not gains or time.perf_counter() - started < _LIMIT_S
            gains.append(_gain(model, lanes, pool, bucket) if in_time else gains[-1])
    border = _border(gains)
    return ["onnxruntime" if bucket < border else "openvino" for bucket in range(len(gains))]


def _border(gains: Sequence[float]) -> int:
    """Returns how many buckets ONNX Runtime computes, from each bucket's gain with it.

    >>> _border([0.3, -0.1, -0.3]), _border([0.3, 0.3, -0.3]), _border([0.3, 0.5, -0.3]), _border([-0.5, -0.3, -0.3])
    (1, 1, 2, 0)
    """
    usual = min(_USUAL, len(gains))
    return max(range(len(gains) + 1), key=lambda border: sum(gains[:border]) - _MARGIN * abs(border - usual))


def _gain(
    model: ModelSpec, lanes: Mapping[Library, Sequence[LaneModel]], pool: ThreadPoolExecutor, bucket: int
) -> float:
    """Returns how much longer OpenVINO takes for a bucket, as a natural logarithm.

    The result is the mean of the wide lane and of busy narrow lanes. Both libraries are measured in turns, longer if
    they are close. The minimum time of each batch counts, because disturbances only add time. They add most to ONNX
    Runtime, whose threads wait for each other.
    """
    loads = [(slice(1), _lone(model, bucket)), (slice(1, None), _groups(model, bucket))]
    loads = loads[: min(len(lanes["openvino"]), 2)]
    limit = -_MARGIN if bucket < _USUAL else _MARGIN
    started, ratios = time.perf_counter(), list[float]()
    least: dict[tuple[int, Library], list[float]] = {}
    for turn in range(1 + _TURNS):
        for load, (group, batches) in enumerate(loads):
            for library, models in lanes.items():
                times = _times(pool, models[group], batches)
                if turn:  # the first turn is cold
                    before = least.get((load, library), times)
                    least[load, library] = [min(pair) for pair in zip(before, times, strict=True)]
        if turn < _MIN_TURNS:
            continue
        ratios = [sum(least[load, "openvino"]) / sum(least[load, "onnxruntime"]) for load in range(len(loads))]
        gain = statistics.fmean(map(math.log, ratios))
        if abs(gain - limit) > _CLEAR or time.perf_counter() - started > _BUCKET_S:
            break
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    log.info("%s, bucket %d: openvino takes %s of onnxruntime's time (%d turns)", model.name, bucket, shown, turn)
    return gain


def _lone(model: ModelSpec, bucket: int) -> list[Batch]:
    """Returns single-text batches of a bucket, several of each length in a row."""
    return [
        Batch(ModelIndex(0), [sample_text(model, length)])
        for length in _lengths(model, bucket)
        for _ in range(_IN_A_ROW)
    ]


def _groups(model: ModelSpec, bucket: int) -> list[Batch]:
    """Returns batches of a bucket's texts, each of another length than the one before.

    They are as large as busy narrow lanes get them for OpenVINO, which gains more from batching. With single texts it
    would lose buckets that it wins.
    """
    lengths = _lengths(model, bucket)
    size = max(1, GROUP_TOKENS["openvino"] // lengths[-1]) if model.batch_invariant else 1
    return [Batch(ModelIndex(0), [sample_text(model, length)] * size) for length in lengths]


def _lengths(model: ModelSpec, bucket: int) -> list[int]:
    """Returns evenly spaced lengths of a bucket in tokens, ascending."""
    top = min(BUCKETS[bucket] if bucket < len(BUCKETS) else model.max_length, model.max_length)
    low = BUCKETS[bucket - 1] if bucket else 0
    count = 4 if top <= _LONG_TOKENS else 2
    return sorted({low + max(1, (top - low) * part // count) for part in range(1, count + 1)})


def _times(pool: ThreadPoolExecutor, lanes: Sequence[LaneModel], batches: Sequence[Batch]) -> list[float]:
    """Returns the seconds of each batch, summed over all lanes, which run in parallel.

    Raises:
        BundleError: The graph cannot compute a batch.
    """

    def work(lane: LaneModel) -> list[float]:
        times = []
        for batch in batches:
            started = time.perf_counter()
            lane.run(batch)
            times.append(time.perf_counter() - started)
        return times

    try:
        return [math.fsum(times) for times in zip(*pool.map(work, lanes), strict=True)]
    except EngineFault as fault:
        raise BundleError(f"warm-up failed: {fault.message}") from fault
