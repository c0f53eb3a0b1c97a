"""How a sizing changes with the rate, the objective and the lengths: what follows of curves of one replica."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from loadtest.capacity.plan import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.plan import Load, Plan, Run

SHARES = (0.03, 0.2, 0.4, 0.55, 0.7, 0.8, 0.88, 0.95)
"""Of the greatest throughput of a replica: the loads that are simulated."""

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""By which texts are shorter or longer."""

_REQUESTS = 3_000


@dataclass(slots=True, frozen=True)
class Sensitivity:
    """One candidate.

    Attributes:
        plan: What it was sized to.
        runs: A replica under rising loads, by the factor of the texts' lengths.
    """

    plan: Plan
    runs: Mapping[float, Sequence[Run]]

    def devices(self, rate: float, limit_ms: float, factor: float = 1.0) -> float:
        """How many devices hold, by the curves; not a number where none do."""
        most = capacity(self.runs[factor], limit_ms)
        return math.ceil(rate / most) * self.plan.memory.devices if most else math.nan

    def price(self, rate: float, limit_ms: float, factor: float = 1.0) -> float:
        """What they cost an hour; their number, where they have no price."""
        price = self.plan.device.price_per_hour
        return self.devices(rate, limit_ms, factor) * (1.0 if price is None else price)


def sensitivities(
    plans: Sequence[Plan], encoder: Encoder, load: Load, tell: Callable[[int, int], None]
) -> list[Sensitivity]:
    """The curves of plans.

    Args:
        plans: Of candidates that hold.
        encoder: What they serve.
        load: What they were sized for.
        tell: Told how many of how many curves are done.
    """
    found = []
    for index, plan in enumerate(plans):
        runs = {}
        for at, factor in enumerate(FACTORS):
            tell(index * len(FACTORS) + at, len(plans) * len(FACTORS))
            scaled = replace(load, lengths=load.lengths.scaled(factor, encoder.positions))
            replica = Replica(plan.costs, scaled, plan.memory.devices)
            runs[factor] = [replica.run(share * replica.most_per_s, _REQUESTS) for share in SHARES]
        found.append(Sensitivity(plan, runs))
    return found


def capacity(runs: Sequence[Run], limit_ms: float) -> float:
    """The rate up to which a replica holds a limit, between the rates that were simulated; 0 where none holds."""
    if runs[0].objective_ms > limit_ms:
        return 0.0
    for low, high in pairwise(runs):
        if high.objective_ms > limit_ms:
            if not math.isfinite(high.objective_ms):
                return low.rate
            share = math.log(limit_ms / low.objective_ms) / math.log(high.objective_ms / low.objective_ms)
            return low.rate + share * (high.rate - low.rate)
    return runs[-1].rate
