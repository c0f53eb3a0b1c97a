"""Statistics of models, and versions that are not served: plain data."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class Duration(msgspec.Struct):
    """How often, and how long in all, in nanoseconds."""

    count: int = 0
    ns: int = 0


class InferStatistics(msgspec.Struct):
    """Requests and their stages: tokenising is `compute_input`, what follows the engine `compute_output`."""

    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration


class BatchStatistics(msgspec.Struct):
    """The batches of one size, in texts; what an engine does before and behind its work is part of `compute_infer`."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class ModelStatistics(msgspec.Struct):
    """What a model has answered since the server started, whatever the route.

    Attributes:
        last_inference: In milliseconds since 1970.
        inference_count: Texts.
        execution_count: Batches.
        inference_stats: Requests; `fail` counts those of v2 alone.
        batch_stats: The same by size, of batches that have ended.
        memory_usage: Always empty.
    """

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferStatistics
    batch_stats: list[BatchStatistics] = []
    memory_usage: list[Duration] = []


class VersionState(NamedTuple):
    """A version that is not served, and why. `state` is `LOADING` or `UNAVAILABLE`, as in the v2 index."""

    name: str
    version: str
    state: str
    reason: str
