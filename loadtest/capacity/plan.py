"""How many replicas hold an objective: simulates one replica with the server's own scheduler and its batch costs.

A load balancer that splits evenly at random gives each of n replicas Poisson arrivals at 1/n of the rate. One replica
is therefore simulated, with a fixed seed. A replica is one device, or a pipeline of as many devices as its weights
need, as in `bertserve simulate --stages`. It has several front processes only if this saves devices.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from loadtest.capacity.figures import World
from loadtest.capacity.overhead import usual
from loadtest.capacity.traffic import poisson
from serving.scheduling.admission import DEADLINE_COST_FACTOR
from serving.scheduling.batcher import GROUP_TOKENS
from serving.scheduling.cost import ModelCosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.capacity.candidates import Candidate
    from loadtest.capacity.encoder import Encoder
    from loadtest.capacity.figures import Figures
    from loadtest.capacity.lengths import Lengths
    from loadtest.capacity.tables import BatchCosts

_USED_MEMORY = 0.9
_LIBRARIES_BYTES = 1e9
"""Estimated share of a device's memory that is usable, and the part that drivers and libraries take."""
_UNEVEN = 1.1
"""Upper bound of the largest of N parts relative to 1/N of the weights, guaranteed by `export --split`."""

_REQUESTS = 6_000
_FINAL_REQUESTS = 20_000
_FEW = 0.02
"""Share of a replica's throughput at which requests do not queue."""
_LOADS = (0.95, 0.85, 0.7, 0.5, 0.3, 0.15, 0.06)
_EXACT = 100
"""Up to this many replicas the search is exact; above, it is within 1%."""

Stage = Literal["engine", "front", "core"]
"""What a text passes in a replica: its devices, a front process (the only process if there is one), and the core."""


class Objective(NamedTuple):
    """A limit on a percentile of all requests. Rejected and late requests count as infinitely late.

    Attributes:
        percent: 99 for p99.
        limit_ms: Limit in milliseconds.
    """

    percent: float
    limit_ms: float

    def __str__(self) -> str:
        return f"p{self.percent:g} <= {self.limit_ms:g} ms"


@dataclass(slots=True, frozen=True)
class SizingLoad:
    """The load of a sizing.

    Attributes:
        rate: Requests per second, with one text each.
        lengths: Text lengths.
        objective: The objective.
        max_batch_tokens: As in `serve`.
        timeout_ms: Deadline of every request; extended if a single text needs more, as in `serve`.
        seed: Seed of arrivals, lengths and jitter.
    """

    rate: float
    lengths: Lengths
    objective: Objective
    max_batch_tokens: int = 1024
    timeout_ms: float = 2000.0
    seed: int = 1


@dataclass(slots=True, frozen=True)
class Memory:
    """Memory of a replica, and the number of devices that it takes.

    Attributes:
        weights_bytes: All weights.
        working_bytes: Activations of a batch, estimated.
        devices: 1 if everything fits on one; more if the weights must be split; 0 if no split fits.
    """

    weights_bytes: int
    working_bytes: int
    devices: int


def memory_of(device: Candidate, encoder: Encoder, precision: str, max_batch_tokens: int) -> Memory:
    """The memory and the number of devices for one replica of an encoder."""
    weights = encoder.weight_bytes(precision)
    working = encoder.working_bytes(precision, max_batch_tokens)
    room = _USED_MEMORY * device.memory_gb * 1e9 - _LIBRARIES_BYTES - working
    if weights <= room:
        return Memory(weights, working, 1)
    parts = math.ceil(_UNEVEN * weights / room) if room > 0 else 0
    return Memory(weights, working, parts if parts <= encoder.layers else 0)


class Replica:
    """One replica under the text lengths of a load."""

    def __init__(self, costs: BatchCosts, load: SizingLoad, devices: int, fronts: int = 1) -> None:
        # In a pipeline of CPUs, only one would share its cores with the server. The model assumes that none does.
        overhead = usual(costs.threads if devices == 1 else 0, fronts)
        if devices > 1:
            costs = costs.in_stages(devices)
        self.fronts = fronts
        self._load = load
        self._world = World.of(costs, overhead, load.max_batch_tokens, load.seed)
        self._runs: dict[tuple[float, int], Figures] = {}
        model = ModelCosts(
            costs.points,
            narrow_lanes=costs.narrow_lanes,
            batched=costs.batched,
            max_batch_tokens=load.max_batch_tokens,
            group_tokens=GROUP_TOKENS,
        )
        mix, weights = load.lengths.mix, sum(load.lengths.mix.values())
        # Narrow lanes prefetch their next batch.
        gap_us = 0.0 if costs.narrow_lanes else overhead.batch_us + overhead.wire_us
        shares_us = {tokens: model.share_us(tokens) + gap_us / model.group(tokens) for tokens in mix}
        engine_us = sum(shares_us[tokens] * weight for tokens, weight in mix.items()) / weights
        front_us = overhead.receive_us + overhead.text_us + overhead.reply_us + overhead.token_us * load.lengths.mean
        self.per_s: dict[Stage, float] = {"engine": 1e6 / engine_us, "front": fronts * 1e6 / front_us}
        """Maximum texts per second by what limits them."""
        if fronts > 1:
            self.per_s["core"] = 1e6 / (overhead.core_us + overhead.core_token_us * load.lengths.mean)
        self._timeout_s = max(load.timeout_ms, DEADLINE_COST_FACTOR * model.alone_us(max(mix)) / 1e3) / 1e3

    @property
    def bound(self) -> Stage:
        """What limits the texts per second."""
        return min(self.per_s, key=self.per_s.__getitem__)

    @property
    def most_per_s(self) -> float:
        """Maximum texts per second."""
        return self.per_s[self.bound]

    def run(self, rate: float, requests: int = _REQUESTS) -> Figures:
        """Simulates the replica at a rate. Deterministic."""
        key = (rate, requests)
        if key not in self._runs:
            load, seconds = self._load, requests / rate
            arrivals = poisson(rate, dict(load.lengths.mix), seconds, self._timeout_s, load.seed)
            self._runs[key] = self._world.run(arrivals, seconds, load.objective.percent)
        return self._runs[key]

    def holds(self, rate: float, requests: int = _REQUESTS) -> bool:
        return self.run(rate, requests).slo_ms <= self._load.objective.limit_ms


@dataclass(slots=True, frozen=True)
class SizingPlan:
    """The number of replicas on a candidate.

    Attributes:
        name: Name of the candidate.
        device: The candidate.
        precision: Precision of the artifact.
        costs: Batch costs on the device.
        memory: Memory of a replica.
        replicas: 0 if no number holds the objective, or the encoder does not fit.
        run: One replica at its share of the rate; at minimal load if no number holds.
        bound: What limits a replica, if the rate grows.
        fronts: Front processes of a replica.
        replicas_of_one_process: The number of replicas without several front processes.
    """

    name: str
    device: Candidate
    precision: str
    costs: BatchCosts
    memory: Memory
    replicas: int
    run: Figures | None
    bound: Stage | None = None
    fronts: int = 1
    replicas_of_one_process: int = 0

    @property
    def devices(self) -> int:
        return self.replicas * self.memory.devices

    @property
    def price_per_hour(self) -> float | None:
        price = self.device.price_per_hour
        return None if price is None or not self.replicas else self.devices * price

    @property
    def watts(self) -> float | None:
        """Maximum power of all devices."""
        return None if self.device.watts is None or not self.replicas else self.devices * self.device.watts

    def per_million_texts(self, rate: float) -> float | None:
        """The price of a million texts at a rate."""
        price = self.price_per_hour
        return None if price is None else price / (3600 * rate) * 1e6


def plan(
    name: str, device: Candidate, precision: str, costs: BatchCosts, encoder: Encoder, load: SizingLoad
) -> SizingPlan:
    """The smallest number of replicas that holds the load's objective."""
    memory = memory_of(device, encoder, precision, load.max_batch_tokens)
    if not memory.devices:
        return SizingPlan(name, device, precision, costs, memory, 0, None)
    replica, *others = replicas(costs, load, memory.devices)
    count = alone = _smallest(replica, load.rate)
    for other in others:
        if load.rate < (count - 1) * other.most_per_s and 0 < (found := _smallest(other, load.rate)) < count:
            replica, count = other, found
    run = replica.run(load.rate / count, _FINAL_REQUESTS) if count else replica.run(_FEW * replica.most_per_s)
    return SizingPlan(name, device, precision, costs, memory, count, run, replica.bound, replica.fronts, alone)


def replicas(costs: BatchCosts, load: SizingLoad, devices: int) -> Iterator[Replica]:
    """Replicas with 1 front process, 2 and so on, until something else limits the texts per second."""
    for fronts in itertools.count(1):
        replica = Replica(costs, load, devices, fronts)
        yield replica
        if replica.bound != "front":
            return


def _smallest(replica: Replica, rate: float) -> int:
    """The smallest number of replicas that holds, each at its share of the rate; 0 if none does."""
    if not replica.holds(min(rate, _FEW * replica.most_per_s)):
        return 0
    fails, holds = 0, 0
    for load in _LOADS:
        count = math.ceil(rate / (load * replica.most_per_s))
        if replica.holds(rate / count):
            holds = count
            break
        fails = count
    holds = holds or math.ceil(rate / (_FEW * replica.most_per_s))
    while holds - fails > max(1, holds // _EXACT):
        middle = (fails + holds) // 2
        fails, holds = (fails, middle) if replica.holds(rate / middle) else (middle, holds)
    # The final check uses more requests than the search.
    while not replica.holds(rate / holds, _FINAL_REQUESTS):
        holds += max(1, holds // _EXACT)
    return holds
