"""Results of a simulation: the figures of one run, and the capacity search."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bertserve.loadtest.capacity.simulator import Arrival, BulkJob, Device, Outcome, Overhead, RequestOutcome, play
from bertserve.loadtest.generator.search import bracket, narrowed
from bertserve.loadtest.report.sample import percentile as nearest_rank
from bertserve.serving.scheduling.batcher import GROUP_TOKENS, PREFETCH_TOKENS, Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from bertserve.loadtest.capacity.tables import BatchCosts

_NARROW = 1.01
"""The search ends when the ratio of the rates on both sides of the edge is at most this."""


@dataclass(slots=True, frozen=True)
class World:
    """Everything but the traffic.

    Attributes:
        device: The device and its costs.
        policy: The batching policy.
        seed: Random seed.
        bulk: Weights of the text lengths of a saturating bulk job; None without one.
    """

    device: Device
    policy: Policy
    seed: int
    bulk: Mapping[int, float] | None = None

    @classmethod
    def of(
        cls,
        costs: BatchCosts,
        overhead: Overhead,
        max_batch_tokens: int,
        seed: int,
        bulk: Mapping[int, float] | None = None,
    ) -> World:
        """One model behind a server, from its batch costs."""
        device = Device(
            points=costs.warm_up or costs.points,
            times=costs.points if costs.warm_up else None,
            variations=costs.variations,
            narrow_lanes=costs.narrow_lanes,
            overhead=overhead,
        )
        policy = Policy(
            max_batch_tokens,
            batch_invariant=[costs.batched],
            narrow=[costs.narrow_lanes > 0],
            group_tokens=GROUP_TOKENS,
            prefetch_tokens=PREFETCH_TOKENS,
        )
        return cls(device, policy, seed, bulk)

    def run(self, arrivals: Sequence[Arrival], seconds: float) -> Figures:
        """Simulates a schedule of that many seconds."""
        played = play(
            self.device,
            self.policy,
            arrivals,
            BulkJob(seconds, self.bulk) if self.bulk else None,
            seed=self.seed,
        )
        found = Figures.of(arrivals, played.outcomes, seconds)
        if not self.bulk:
            return found
        share = played.bulk.device_us / 1e6 / seconds
        return replace(found, bulk_per_s=played.bulk.texts / seconds, bulk_device_share=share)


@dataclass(slots=True, frozen=True)
class Figures:
    """The figures of one run.

    Attributes:
        offered_per_s: Offered load.
        answered_per_s: Throughput.
        p50_ms: Median latency of answered requests; NaN without one.
        p99_ms: 99th percentile of answered requests.
        short_p99_ms: 99th percentile of answered requests among the shortest third of all requests.
        slo_ms: 99th percentile of all requests; a request without an answer counts as infinitely late.
        fates: Number of requests by outcome, in the words of `RequestOutcome`.
        bulk_per_s: Texts of the bulk job per second; None without one.
        bulk_device_share: Share of the device's time that the bulk job took.
        queue_ms: Mean queue time of answered requests, as in a server's headers.
        compute_ms: Mean compute time of their batches, as in a server's headers.
    """

    offered_per_s: float
    answered_per_s: float
    p50_ms: float
    p99_ms: float
    short_p99_ms: float
    slo_ms: float
    fates: dict[str, int]
    bulk_per_s: float | None = None
    bulk_device_share: float | None = None
    queue_ms: float = math.nan
    compute_ms: float = math.nan

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], outcomes: Sequence[Outcome], seconds: float) -> Figures:
        """Summarizes a run whose schedule lasts that many seconds."""
        ended = [outcome for outcome in outcomes if outcome.fate is RequestOutcome.ANSWERED]
        answered = [outcome.latency_s * 1e3 for outcome in ended]
        indices = sorted(range(len(arrivals)), key=lambda index: sum(arrivals[index].lengths))
        third = [outcomes[index] for index in indices[: math.ceil(len(indices) / 3)]]
        short = [outcome.latency_s * 1e3 for outcome in third if outcome.fate is RequestOutcome.ANSWERED]
        return cls(
            len(outcomes) / seconds,
            len(answered) / seconds,
            percentile(answered, 50),
            percentile(answered, 99),
            percentile(short, 99),
            percentile([*answered, *[math.inf] * (len(outcomes) - len(answered))], 99),
            dict(Counter(outcome.fate.value for outcome in outcomes)),
            queue_ms=_mean([outcome.queue_s * 1e3 for outcome in ended]),
            compute_ms=_mean([outcome.compute_s * 1e3 for outcome in ended]),
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; NaN without values."""
    return nearest_rank(sorted(values), percent) if values else math.nan


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def capacity(run: Callable[[float], Figures], slo_ms: float, rate: float) -> tuple[float | None, list[Figures]]:
    """The highest rate at which the objective's percentile of all requests holds, and all runs of the search.

    Args:
        run: Simulates a rate.
        slo_ms: The objective.
        rate: First rate of the search.

    Returns:
        None as the rate if even the lowest rate misses the objective.
    """
    runs: list[Figures] = []

    def holds(rate: float) -> bool:
        runs.append(run(rate))
        return runs[-1].slo_ms <= slo_ms

    low, _ = narrowed(*bracket(rate, holds), holds, _NARROW)
    return low, runs
