"""Work after the engine: its measured costs, and its end at a deadline or when its client leaves."""

from __future__ import annotations

import math
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from bertserve.serving.errors import BertserveError, InvalidRequest
from bertserve.serving.tasks import TASK_ROUTES
from bertserve.serving.tasks.base import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from bertserve.serving.inference.tokenizer import TextTokenizer
    from bertserve.serving.models.manifest import Manifest
    from bertserve.serving.records import EncodedText, Row, TextInput
    from bertserve.serving.tasks.base import TaskOptions, TaskRoute

_RUNS = 3
_QUERY, _TEXT = "word " * 120, "word " * 500
_NUMBERS = 8192


class EndedError(Exception):
    """Work has ended before its result: nobody waits for it any more."""


class Until:
    """The `Check` of work in a thread.

    Attributes:
        deadline: In seconds of the clock.
        left: Whether nobody waits for the result.
    """

    __slots__ = ("_clock", "deadline", "left")

    def __init__(self, deadline: float = math.inf, clock: Callable[[], float] = time.perf_counter) -> None:
        self.deadline = deadline
        self.left = False
        self._clock = clock

    def __call__(self) -> None:
        if self.left or self._clock() > self.deadline:
            raise EndedError


@lru_cache(1)
def number_us() -> float:
    """Microseconds to write a number of a vector as JSON, measured once."""
    numbers = np.random.default_rng(0).standard_normal(_NUMBERS, np.float32)
    return _least_us(lambda: orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)) / _NUMBERS


def unit_us(manifest: Manifest, tokenizer: TextTokenizer) -> dict[type[TaskOptions[Any]], float]:
    """Measures a unit of work (`Way.after`) of each way in which the model answers, in microseconds, on made-up rows.

    A way whose default options the model does not support is left out.
    """
    number_us()
    ways = [way for way in TASK_ROUTES.values() if way.after is not None and way.task and manifest.answers(way.task)]
    found = {}
    for way in ways:
        try:
            found[way.options] = _measured(way, manifest, tokenizer)
        except BertserveError:  # of the check, or of a tokenizer that reads no such text
            continue
    return found


def _measured(way: TaskRoute[Any, Any], manifest: Manifest, tokenizer: TextTokenizer) -> float:
    way.check(way.options(), manifest)
    try:
        inputs, options, texts = _read(way, _TEXT, manifest, tokenizer)
    except InvalidRequest:
        inputs, options, texts = _read(way, (_QUERY, _TEXT), manifest, tokenizer)
    random = np.random.default_rng(0)
    rows = [_row(manifest, len(text.ids), random) for text in texts]
    work = Work(inputs, options, texts, rows, manifest, tokenizer)
    units = way.after(inputs, [len(text.ids) for text in texts], options, manifest) if way.after else 0
    return _least_us(lambda: way.finish(work)) / max(1, units)


def _read(
    way: TaskRoute[Any, Any], value: TextInput, manifest: Manifest, tokenizer: TextTokenizer
) -> tuple[Sequence[TextInput], TaskOptions[Any], Sequence[EncodedText]]:
    inputs, options, _ = way.prepare([value], way.options(), manifest, None, None)
    return inputs, options, way.encode(tokenizer, inputs, options, truncate=True)


def _row(manifest: Manifest, tokens: int, random: np.random.Generator) -> Row:
    return tuple(
        _made_up([tokens if dim < 0 else dim for dim in spec.shape[1:]], spec.dtype, random)
        for spec in manifest.outputs
    )


def _made_up(shape: Sequence[int], dtype: str, random: np.random.Generator) -> NDArray[Any]:
    if dtype == "int32":
        return np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    return random.standard_normal(shape, np.float32)


def _least_us(work: Callable[[], object]) -> float:
    """The least time of several runs: others only make them slower."""
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times) * 1e6
