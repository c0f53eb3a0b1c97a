"""What a simulation says: figures of one run, the highest rate that keeps an objective, curves over the rate."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loadtest.capacity.simulator import Arrival, BulkJob, Device, Outcome, Overhead, RequestOutcome, play
from loadtest.generator.search import bracket, narrowed
from loadtest.report.sample import percentile as nearest_rank
from serving.scheduling.batcher import GROUP_TOKENS, PREFETCH_TOKENS, Policy
from serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadtest.capacity.tables import BatchCosts

_MAX_QUEUE_TOKENS = 1 << 19
_NARROW = 1.01
"""A search ends when the rates on both sides of the edge are so near."""


@dataclass(slots=True, frozen=True)
class World:
    """Everything but the traffic.

    Attributes:
        device: What computes.
        policy: How it is scheduled.
        scheduler: By whom.
        max_queue_tokens: Tokens in flight.
        seed: Of what varies by chance.
        bulk: Weights of the lengths of a saturating bulk job's texts; None where there is none.
    """

    device: Device
    policy: Policy
    scheduler: type[Scheduler]
    max_queue_tokens: int
    seed: int
    bulk: Mapping[int, float] | None = None

    @classmethod
    def of(
        cls,
        costs: BatchCosts,
        overhead: Overhead,
        max_batch_tokens: int,
        seed: int,
        scheduler: type[Scheduler] = Scheduler,
        bulk: Mapping[int, float] | None = None,
    ) -> World:
        """One model behind a server, by what its batches cost."""
        device = Device(
            points=costs.warm_up or costs.points,
            times=costs.points if costs.warm_up else None,
            variations=costs.variations,
            narrow_lanes=costs.narrow_lanes,
            stages=costs.stages,
            overhead=overhead,
        )
        policy = Policy(
            max_batch_tokens,
            batch_invariant=[costs.batched],
            narrow=[costs.narrow_lanes > 0],
            group_tokens=GROUP_TOKENS,
            prefetch_tokens=PREFETCH_TOKENS,
            apart=costs.stages > 1,
        )
        return cls(device, policy, scheduler, _MAX_QUEUE_TOKENS, seed, bulk)

    def run(self, arrivals: Sequence[Arrival], seconds: float, percent: float = 99) -> Figures:
        """What becomes of a schedule of so many seconds, summed up; the objective is of that percentile."""
        played = play(
            self.device,
            self.policy,
            arrivals,
            BulkJob(seconds, self.bulk) if self.bulk else None,
            max_queue_tokens=self.max_queue_tokens,
            scheduler=self.scheduler,
            seed=self.seed,
        )
        found = Figures.of(arrivals, played.outcomes, seconds, percent)
        found = replace(found, utilisation=min(1.0, played.busy_s / seconds))
        if not self.bulk:
            return found
        share = played.bulk.device_us / 1e6 / seconds
        return replace(found, bulk_per_s=played.bulk.texts / seconds, bulk_device_share=share)


@dataclass(slots=True, frozen=True)
class Figures:
    """One run.

    Attributes:
        offered_per_s: Offered load.
        answered_per_s: Throughput.
        p50_ms: Of the answered; not a number where there is none.
        p99_ms: Of the answered.
        short_p99_ms: Of the answered among the shortest third of the requests.
        slo_ms: The objective's percentile of all requests, in which one without an answer has taken for ever.
        fates: How many requests ended how, by the words of `RequestOutcome`.
        bulk_per_s: Texts of a bulk job; None where there was none.
        bulk_device_share: What it took of the device's time.
        queue_ms: Mean wait of the answered for a lane, as a server's headers count it.
        compute_ms: Mean time of their batches, likewise.
        utilisation: Share of the time for which the devices computed.
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
    utilisation: float = math.nan

    @classmethod
    def of(
        cls, arrivals: Sequence[Arrival], outcomes: Sequence[Outcome], seconds: float, percent: float = 99
    ) -> Figures:
        """Sums up a run whose schedule had so many seconds."""
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
            percentile([*answered, *[math.inf] * (len(outcomes) - len(answered))], percent),
            dict(Counter(outcome.fate.value for outcome in outcomes)),
            queue_ms=_mean([outcome.queue_s * 1e3 for outcome in ended]),
            compute_ms=_mean([outcome.compute_s * 1e3 for outcome in ended]),
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that so many percent do not exceed; not a number where there is none."""
    return nearest_rank(sorted(values), percent) if values else math.nan


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def capacity(run: Callable[[float], Figures], slo_ms: float, rate: float) -> tuple[float | None, list[Figures]]:
    """The highest rate at which the 99th percentile of all requests keeps the objective, and every run of the search.

    Args:
        run: Plays a rate.
        slo_ms: The objective.
        rate: Where to begin.

    Returns:
        None where even the lowest rate breaks it.
    """
    runs: list[Figures] = []

    def holds(rate: float) -> bool:
        runs.append(run(rate))
        return runs[-1].slo_ms <= slo_ms

    low, _ = narrowed(*bracket(rate, holds), holds, _NARROW)
    return low, runs
