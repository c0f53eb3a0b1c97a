"""The fake engine, without a model: deterministic outputs, configurable latency, fault injection.

Scheduling, fault and overload tests run against it, in process or behind the real socket. Its output depends on every
token and its position, so a swapped or truncated output is detected.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from array import array
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from bertserve.serving.engine.base import ANY_BATCH, BatchOutput, lanes_for
from bertserve.serving.engine.batches import finite_rows
from bertserve.serving.errors import EngineFault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.engine.base import Batch, LaneKind, Runner
    from bertserve.serving.engine.specs import ModelSpec
    from bertserve.serving.records import Array, EncodedText, TensorSpec


class Fault(StrEnum):
    """Faults that a token id can trigger."""

    NAN = "nan"
    """The text's output contains a NaN."""
    RAISE = "raise"
    """The whole batch fails; the engine continues."""
    EXIT = "exit"
    """The process exits at once, as after a segfault."""
    HANG = "hang"
    """The batch hangs."""


def fake_vector(text: EncodedText, size: int) -> NDArray[np.float32]:
    """Returns the fake output for a text, float32 [size]; it depends on each id, its position and its token type."""
    types = text.type_ids or array("i", bytes(4 * len(text.ids)))
    return _sines(zlib.crc32(types, zlib.crc32(text.ids)), size)


@lru_cache(maxsize=256)  # warm-up and benchmarks repeat a few texts
def _sines(key: int, size: int) -> NDArray[np.float32]:
    # The sine of small numbers is much faster. The phase keeps a key near 0 from giving zeros.
    vector: NDArray[np.float32] = np.sin(key % math.tau * np.arange(1, size + 1) + 1.0).astype(np.float32)
    vector.flags.writeable = False
    return vector


class FakeBackend:
    largest_batch = ANY_BATCH
    padded_to: Sequence[int] = ()

    def __init__(
        self,
        models: Sequence[ModelSpec],
        threads: int,
        delay_ms: float = 0.0,
        faults: Mapping[int, Fault] | None = None,
        batch_ms: Mapping[int, float] | None = None,
        token_us: float = 0.0,
    ) -> None:
        """Configures the simulated latency and faults.

        Args:
            models: Models to simulate.
            threads: Number of cores, as for a CPU engine.
            delay_ms: Duration of a batch; with `batch_ms`, of a batch of one text.
            faults: Faults by the token id that triggers them.
            batch_ms: Durations by number of texts: linear between two sizes, proportional above the largest.
            token_us: Additional duration per padded token of a batch.
        """
        self._models = models
        self._lanes = lanes_for(models, threads)
        points = sorted({**(batch_ms or {}), 1: delay_ms}.items())
        self._sizes, self._delays_ms = [texts for texts, _ in points], [ms for _, ms in points]
        self._token_ms = token_us / 1e3
        self._faults = dict(faults or {})

    def lanes(self) -> Sequence[LaneKind]:
        return self._lanes

    def runner(self, lane: int) -> Runner:  # noqa: ARG002  all lanes are alike
        return self

    def run(self, batch: Batch) -> BatchOutput:
        started = time.perf_counter()
        outputs, texts = self._models[batch.model].outputs, batch.texts
        shapes = [_shape(spec, batch) for spec in outputs]
        length = sum(map(math.prod, shapes))
        rows = [fake_vector(text, length) for text in texts]
        finite = [True] * len(texts)
        if self._faults:
            answers = np.stack(rows)
            for row, text in enumerate(texts):
                for token in self._faults.keys() & set(text.ids):
                    _provoke(self._faults[token], answers[row])
            finite = finite_rows([answers], len(texts))
        else:
            answers = np.stack(rows) if len(rows) > 1 else rows[0][None]
        if delay_ms := self._delay_ms(len(texts)) + self._token_ms * len(texts) * batch.padded_length:
            time.sleep(delay_ms / 1e3)
        return BatchOutput(_split(answers, outputs, shapes), finite, (time.perf_counter() - started) * 1e6)

    def _delay_ms(self, texts: int) -> float:
        if len(self._sizes) == 1:
            return self._delays_ms[0]
        return float(np.interp(texts, self._sizes, self._delays_ms)) * max(1.0, texts / self._sizes[-1])


def _shape(spec: TensorSpec, batch: Batch) -> list[int]:
    """Returns an output's shape for one text; a dynamic dimension is the batch's padded length."""
    return [batch.padded_length if size < 0 else size for size in spec.shape[1:]]


def _split(rows: NDArray[np.float32], outputs: Sequence[TensorSpec], shapes: Sequence[list[int]]) -> list[Array]:
    """Splits each row into the outputs, in their shapes.

    Integers are ids of tokens, each once. `weights` descend, as those of a graph.
    """
    arrays: list[Array] = []
    at = 0
    for spec, shape in zip(outputs, shapes, strict=True):
        end = at + math.prod(shape)
        part: NDArray[Any] = rows[:, at:end].reshape(len(rows), *shape)
        if spec.dtype == "int32":
            part = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), part.shape)
        elif spec.name == "weights":
            part = -np.sort(-np.abs(part))
        arrays.append(part)
        at = end
    return arrays


def _provoke(fault: Fault, row: NDArray[np.float32]) -> None:
    if fault is Fault.NAN:
        row[0] = np.nan
    elif fault is Fault.RAISE:
        raise EngineFault("the fake engine was told to fail on a token of this batch")
    elif fault is Fault.EXIT:
        os._exit(139)
    else:
        time.sleep(3600)
