"""Sensitivity of a sizing to the rate, the objective and the lengths, from latency curves of one replica.

It has as many front processes as help.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from loadtest.capacity.plan import replicas

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.plan import SizingLoad, SizingPlan

    Curve = Sequence[tuple[float, float]]

SHARES = (0.03, 0.2, 0.4, 0.55, 0.7, 0.8, 0.88, 0.95)
"""The simulated loads, as shares of a replica's maximum throughput."""

FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Factors by which the text lengths are varied."""

_REQUESTS = 3_000


@dataclass(slots=True, frozen=True)
class Sensitivity:
    """The sensitivity of one candidate.

    Attributes:
        plan: The plan of the candidate.
        curves: Rates of a replica and the objective's percentile in ms at each, by the factor of the text lengths.
    """

    plan: SizingPlan
    curves: Mapping[float, Curve]

    def devices(self, rate: float, limit_ms: float, factor: float = 1.0) -> float:
        """Number of devices that hold the objective, by the curves; NaN if none does."""
        most = capacity(self.curves[factor], limit_ms)
        return math.ceil(rate / most) * self.plan.memory.devices if most else math.nan

    def price(self, rate: float, limit_ms: float, factor: float = 1.0) -> float:
        """Their price per hour; without a price, their number."""
        price = self.plan.device.price_per_hour
        return self.devices(rate, limit_ms, factor) * (1.0 if price is None else price)


def sensitivities(
    plans: Sequence[SizingPlan], encoder: Encoder, load: SizingLoad, tell: Callable[[int, int], None]
) -> list[Sensitivity]:
    """The latency curves of plans; `tell` is called with the number of finished curves and their total."""
    found = []
    for index, plan in enumerate(plans):
        curves: dict[float, Curve] = {}
        for at, factor in enumerate(FACTORS):
            tell(index * len(FACTORS) + at, len(plans) * len(FACTORS))
            scaled = replace(load, lengths=load.lengths.scaled(factor, encoder.positions))
            *_, replica = replicas(plan.costs, scaled, plan.memory.devices)
            rates = [share * replica.most_per_s for share in SHARES]
            curves[factor] = [(rate, replica.run(rate, _REQUESTS).slo_ms) for rate in rates]
        found.append(Sensitivity(plan, curves))
    return found


def capacity(curve: Curve, limit_ms: float) -> float:
    """The highest rate at which a replica holds a limit, interpolated between simulated rates; 0 if none holds."""
    if curve[0][1] > limit_ms:
        return 0.0
    for (low, low_ms), (high, high_ms) in pairwise(curve):
        if high_ms > limit_ms:
            if not math.isfinite(high_ms):
                return low
            return low + math.log(limit_ms / low_ms) / math.log(high_ms / low_ms) * (high - low)
    return curve[-1][0]
