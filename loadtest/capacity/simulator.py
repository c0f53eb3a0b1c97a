"""Discrete-event simulation of the scheduler: from batch costs and arrivals to the outcome of every request.

The `Scheduler` is the server's own. Only its surroundings are modeled, in six rules:

- The front end (the event loop, and the load generator if it shares the cores) does one thing at a time, in order. It
  takes `receive_us`, `text_us` for each text and `token_us` for each token until a request can be queued; `batch_us` to
  take in a batch; and `reply_us` for each answer.
- With several front processes, each does so with the requests of its clients. The core is another process that does
  one thing at a time: it takes `core_us` for each text and `core_token_us` for each token before it queues a request,
  and takes in the batches.
- A batch for an idle lane starts `wire_us` later. A prefetched batch starts immediately.
- A batch takes the time in the cost table, with random variation. If a server has corrected its table, batches take the
  corrected times with the variation measured there, while decisions use the warm-up's times, as in the server.
- If the engine shares its cores with the front end, the front end occupies one core whenever it works (so does each
  of its processes), and running batches share the rest. Corrected times already include this effect.

Simulated time depends only on events, so an hour of traffic takes as long as its decisions do. Deterministic.
"""

from __future__ import annotations

import math
import random
import statistics
from array import array
from collections import deque
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from bertserve.serving.errors import DeadlineExceeded, InvalidRequest, Overloaded
from bertserve.serving.records import BULK, DEFAULT_PRIORITY, EncodedText, ModelIndex
from bertserve.serving.scheduling.admission import AdmissionLimits, Permit
from bertserve.serving.scheduling.cost import ModelCosts
from bertserve.serving.scheduling.queue import WorkItem
from bertserve.serving.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bertserve.serving.scheduling.batcher import Assignment, Policy
    from bertserve.serving.scheduling.cost import CostPoint, CostTable

_MODEL = ModelIndex(0)
_CORE = 0
"""The process that owns the scheduler. The fronts are the processes after it, or this one if there is only one."""

_QUARTILES = 1.349
"""Interquartile range of a normal distribution, in standard deviations."""

_MAX_SPREAD = 0.25
"""A larger spread shows other processes during warm-up, not the variation of batches."""

_LASTING_S = 0.5
"""Correlation time of slowdowns of a machine, until the correlation falls to 1/e.

With 25 batches per second on a shared host, the next batch shared 0.4 to 0.5 of a batch's variance, the fifth 0.35 and
the tenth 0.1 to 0.3.
"""


class Arrival(NamedTuple):
    """A request.

    Attributes:
        at: Send time, in seconds.
        lengths: Tokens of its texts.
        timeout_s: Time from the server's receipt to the deadline, in seconds.
        priority: Priority class.
    """

    at: float
    lengths: tuple[int, ...]
    timeout_s: float = 2.0
    priority: int = DEFAULT_PRIORITY


class BulkJob(NamedTuple):
    """A client that keeps a fixed number of bulk requests in flight.

    Attributes:
        seconds: Time during which each answer triggers another request.
        mix: Weights of the text lengths in tokens.
        texts: Texts of each request.
        requests: Requests in flight.
    """

    seconds: float
    mix: Mapping[int, float]
    texts: int = 32
    requests: int = 8


class BulkDone(msgspec.Struct):
    """The work of a bulk job within its time."""

    texts: int = 0
    device_us: float = 0.0


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a request apart from the engine, in microseconds; see the module.

    Attributes:
        receive_us: Front end, per request: reading, parsing, queueing.
        text_us: Front end, per text.
        token_us: Front end, per token: tokenization.
        reply_us: Front end, per answer.
        batch_us: Front end, per batch; the core's if there are several front processes.
        wire_us: Delay until an idle lane starts a batch.
        core_us: Core, per text, if there are several front processes.
        core_token_us: Core, per token, likewise.
        fronts: Front processes, as in `serve --front-processes`; 1: one process does everything.
        shared_cores: Cores that the engine shares with the front end; 0 if it has its own, as on a GPU.
    """

    receive_us: float = 0.0
    text_us: float = 0.0
    token_us: float = 0.0
    reply_us: float = 0.0
    batch_us: float = 0.0
    wire_us: float = 0.0
    core_us: float = 0.0
    core_token_us: float = 0.0
    fronts: int = 1
    shared_cores: int = 0


class Variation(NamedTuple):
    """Random variation of batch times.

    Attributes:
        spread: Standard deviation relative to the time.
        lasting: Share of the variance that is correlated in time and common to all lanes.
    """

    spread: float
    lasting: float = 0.0


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one device slot.

    Attributes:
        points: Batch costs from the warm-up, as the scheduler knows them.
        times: Mean times since then in a server; None: as in the warm-up.
        variations: Variation in that server, by kind of lane; empty: from the spreads of the warm-up.
        narrow_lanes: Lanes in addition to the wide one.
        overhead: Overhead of the server.
    """

    points: Sequence[CostPoint]
    times: Sequence[CostPoint] | None = None
    variations: Mapping[str, Variation] = {}
    narrow_lanes: int = 0
    overhead: Overhead = Overhead()


class RequestOutcome(Enum):
    """The kind of outcome of a request."""

    ANSWERED = "answered"
    OVERLOADED = "refused: overloaded"
    HOPELESS = "refused: deadline too near"
    LATE = "deadline passed"
    INVALID = "refused: never fits"


class Outcome(NamedTuple):
    """The outcome of a request.

    Attributes:
        fate: Kind of outcome.
        latency_s: Time from its arrival to the outcome.
        queue_s: Longest wait of its texts for a lane.
        compute_s: Longest time of its batches.
    """

    fate: RequestOutcome
    latency_s: float
    queue_s: float = 0.0
    compute_s: float = 0.0


class Played(NamedTuple):
    """The result of a simulation.

    Attributes:
        outcomes: One for each arrival.
        bulk: The work of the bulk job.
    """

    outcomes: list[Outcome]
    bulk: BulkDone


def play(
    device: Device,
    policy: Policy,
    arrivals: Sequence[Arrival],
    bulk: BulkJob | None = None,
    *,
    max_queue_tokens: int = 1 << 19,
    seed: int = 1,
) -> Played:
    """Simulates arrivals until all have ended.

    Args:
        device: The device.
        policy: The scheduler's policy for one model.
        arrivals: Sorted by time.
        bulk: A bulk job in addition to the arrivals.
        max_queue_tokens: Maximum tokens in flight.
        seed: Random seed.
    """
    simulation = _Simulation(device, policy, max_queue_tokens, seed)
    if bulk is not None:
        simulation.begin_bulk(bulk)
    outcomes = simulation.play(arrivals)
    return Played(outcomes, simulation.bulk_done)


class _Request:
    """A request in progress."""

    __slots__ = (
        "arrival",
        "compute_s",
        "deadline",
        "front",
        "items",
        "missing",
        "outcome",
        "permit",
        "queue_s",
        "submitted",
    )

    def __init__(self, arrival: Arrival, front: int) -> None:
        self.arrival = arrival
        self.front = front
        self.items: list[WorkItem] = []
        self.missing = len(arrival.lengths)
        self.deadline = 0.0
        self.submitted = self.queue_s = self.compute_s = 0.0
        self.permit: Permit | None = None
        self.outcome: Outcome | None = None


class _Lane:
    """A lane, its running batch and its prefetched batches."""

    __slots__ = ("began", "end", "running", "table", "variation", "waiting")

    def __init__(self, table: CostTable, variation: Variation) -> None:
        self.table = table
        self.variation = variation
        self.running: Assignment | None = None
        self.waiting: deque[Assignment] = deque()
        self.began = 0.0
        self.end = 0.0


class _Simulation:
    def __init__(self, device: Device, policy: Policy, max_queue_tokens: int, seed: int) -> None:
        costs = ModelCosts(
            device.points,
            narrow_lanes=device.narrow_lanes,
            batched=policy.batch_invariant[_MODEL],
            max_batch_tokens=policy.max_batch_tokens,
            group_tokens=policy.group_tokens,
        )
        self._scheduler = Scheduler(policy, AdmissionLimits(max_queue_tokens), self._drop, jitter=lambda: 0.0)
        self._scheduler.engine_up(1 + device.narrow_lanes, [costs])
        self._together = policy.batch_invariant[_MODEL]
        taken = ModelCosts(device.times or device.points, narrow_lanes=device.narrow_lanes)
        wide, narrow = (device.variations.get(kind) or _of_warm_up(device.points, kind) for kind in ("wide", "narrow"))
        self._lanes = [_Lane(taken.wide, wide)]
        self._lanes += [_Lane(taken.narrow or taken.wide, narrow) for _ in range(device.narrow_lanes)]
        self._overhead = device.overhead
        self._are_means = device.times is not None
        self._slows = device.overhead.shared_cores > 0 and not self._are_means
        self._lasting, self._lasting_at = 0.0, -math.inf
        fronts = device.overhead.fronts
        self._fronts = range(1, 1 + fronts) if fronts > 1 else [_CORE]
        self._free = [0.0] * (self._fronts[-1] + 1)
        self._router = random.Random(seed)
        self._now = 0.0
        self._dice = random.Random(seed)
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._serial = count()
        self._texts: dict[int, EncodedText] = {}
        self._job: BulkJob | None = None
        self.bulk_done = BulkDone()

    def play(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        requests = [self._received(arrival) for arrival in arrivals]
        events, index, following = self._events, 0, math.inf
        if requests:
            following = requests[0].arrival.at
        while True:
            if events and events[0][0] <= following:
                self._now, _, event, argument = heappop(events)
                event(argument)
            elif index < len(requests):
                self._now = following
                self._arrive(requests[index])
                index += 1
                following = requests[index].arrival.at if index < len(requests) else math.inf
            else:
                return [request.outcome for request in requests if request.outcome is not None]

    def begin_bulk(self, job: BulkJob) -> None:
        self._job = job
        for _ in range(job.requests):
            self._at(0.0, self._next_bulk, job)
        self._at(job.seconds, self._end_bulk, None)

    def _at(self, when: float, event: Callable[..., None], argument: object) -> None:
        heappush(self._events, (when, next(self._serial), event, argument))

    # Front end.

    def _received(self, arrival: Arrival) -> _Request:
        """A request of a client of some front."""
        return _Request(arrival, self._router.choice(self._fronts))

    def _occupy(self, process: int, us: float) -> float:
        """Occupies a process of the front end and returns the end time."""
        begin = max(self._now, self._free[process])
        self._free[process] = end = begin + us / 1e6
        if self._slows:
            speed = self._speed_beside_front()
            for lane in self._lanes:
                if lane.running is not None and lane.end > begin:
                    lane.end = _slowed(begin, lane.end, end, speed)
        return end

    def _speed_beside_front(self) -> float:
        """The relative speed of each running lane while a process of the front end occupies a core."""
        cores = self._overhead.shared_cores
        threads = cores if self._lanes[0].running is not None else 0
        threads += sum(lane.running is not None for lane in self._lanes[1:])
        return min(1.0, (cores - 1) / threads) if threads else 1.0

    def _arrive(self, request: _Request) -> None:
        overhead, lengths = self._overhead, request.arrival.lengths
        needed_us = overhead.receive_us + overhead.text_us * len(lengths) + overhead.token_us * sum(lengths)
        received = self._occupy(request.front, needed_us)
        request.deadline = received - needed_us / 1e6 + request.arrival.timeout_s
        self._at(received, self._hand_over, request)

    def _hand_over(self, request: _Request) -> None:
        """Gives a request that a front has received to the core."""
        if request.front == _CORE:
            self._submit(request)
            return
        overhead, lengths = self._overhead, request.arrival.lengths
        needed_us = overhead.core_us * len(lengths) + overhead.core_token_us * sum(lengths)
        self._at(self._occupy(_CORE, needed_us), self._submit, request)

    def _next_bulk(self, job: BulkJob) -> None:
        """Starts a bulk request. A thread tokenizes it text by text, so the front end gets turns in between."""
        if self._job is None:
            return
        lengths = self._dice.choices(list(job.mix), list(job.mix.values()), k=job.texts)
        request = self._received(Arrival(self._now, tuple(lengths), math.inf, BULK))
        request.deadline = math.inf
        self._at(self._occupy(request.front, self._overhead.receive_us), self._tokenize, (request, 0))

    def _tokenize(self, progress: tuple[_Request, int]) -> None:
        request, done = progress
        overhead, lengths = self._overhead, request.arrival.lengths
        if done == len(lengths):
            self._hand_over(request)
        else:
            needed_us = overhead.text_us + overhead.token_us * lengths[done]
            self._at(self._occupy(request.front, needed_us), self._tokenize, (request, done + 1))

    def _end_bulk(self, _: object) -> None:
        self._job = None
        self.bulk_done.device_us = self._scheduler.bulk_us

    def _submit(self, request: _Request) -> None:
        arrival, now, scheduler = request.arrival, self._now, self._scheduler
        request.submitted = now
        if request.deadline <= now:
            self._settle(request, RequestOutcome.LATE)
            return
        request.items = [
            WorkItem(_MODEL, self._text(tokens), tokens, request, index) for index, tokens in enumerate(arrival.lengths)
        ]
        try:
            permit = Permit(scheduler.admission, _MODEL, arrival.priority, request.deadline)
            permit.confirm(arrival.lengths, now)
            request.permit = permit
            assignment = scheduler.submit(request.items, permit, now)
        except Overloaded:
            self._settle(request, RequestOutcome.OVERLOADED)
        except DeadlineExceeded:
            self._settle(request, RequestOutcome.HOPELESS)
        except InvalidRequest:
            self._settle(request, RequestOutcome.INVALID)
        else:
            if request.deadline < math.inf:
                self._at(request.deadline, self._miss, request)
            if assignment is not None:
                self._give(assignment)
            else:
                self._pump()

    def _pump(self) -> None:
        """Starts all batches that can start."""
        scheduler = self._scheduler
        if not scheduler.waiting:
            return
        while (assignment := scheduler.next(self._now)) is not None:
            self._give(assignment)

    def _collect(self, ended: tuple[Assignment, float]) -> None:
        """Handles a finished batch in the front end: starts the next one first, then sends the answers."""
        assignment, compute_us = ended
        occupied_us = self._scheduler.done(assignment, self._now)
        self._scheduler.learn(assignment, compute_us, occupied_us)
        self._pump()
        for item in assignment.items:
            request = _request(item)
            request.missing -= 1
            request.compute_s = max(request.compute_s, compute_us / 1e6)
            if item.priority == BULK and self._job is not None:
                self.bulk_done.texts += 1
            if request.missing == 0 and request.outcome is None:
                self._settle(request, RequestOutcome.ANSWERED, self._occupy(request.front, self._overhead.reply_us))

    def _drop(self, item: WorkItem) -> None:
        self._miss(_request(item))

    def _miss(self, request: _Request) -> None:
        if request.outcome is None:
            self._settle(request, RequestOutcome.LATE)
            self._scheduler.cancel(request.items)

    def _settle(self, request: _Request, fate: RequestOutcome, when: float | None = None) -> None:
        latency_s = (self._now if when is None else when) - request.arrival.at
        request.outcome = Outcome(fate, latency_s, request.queue_s, request.compute_s)
        if request.permit is not None:
            request.permit.__exit__()
        if request.arrival.priority == BULK and self._job is not None:
            self._at(max(self._now, self._now if when is None else when), self._next_bulk, self._job)

    def _text(self, tokens: int) -> EncodedText:
        known = self._texts.get(tokens)
        if known is None:
            known = self._texts[tokens] = EncodedText(array("i", bytes(4 * tokens)))
        return known

    # Engine.

    def _give(self, assignment: Assignment) -> None:
        lane = self._lanes[assignment.lane]
        lane.waiting.append(assignment)
        for item in assignment.items:
            request = _request(item)
            request.queue_s = max(request.queue_s, self._now - request.submitted)
        if lane.running is None:
            self._at(self._now + self._overhead.wire_us / 1e6, self._begin, lane)

    def _begin(self, lane: _Lane) -> None:
        if lane.running is not None or not lane.waiting:
            return
        lane.running = lane.waiting.popleft()
        now = lane.began = self._now
        lane.end = now + self._compute_us(lane, lane.running) / 1e6
        if self._slows:
            for free in self._free:
                if free > now:
                    lane.end = _slowed(now, lane.end, free, self._speed_beside_front())
        self._at(lane.end, self._end, lane)

    def _end(self, lane: _Lane) -> None:
        assignment = lane.running
        if assignment is None:
            return
        if lane.end > self._now:  # it was slowed down meanwhile
            self._at(lane.end, self._end, lane)
            return
        lane.running = None
        compute_us = (self._now - lane.began) * 1e6
        self._at(self._occupy(_CORE, self._overhead.batch_us), self._collect, (assignment, compute_us))
        self._begin(lane)

    def _compute_us(self, lane: _Lane, assignment: Assignment) -> float:
        batch_us = lane.table.batch_us
        if self._together:
            us = batch_us(assignment.padded_length, len(assignment.items))
        else:
            us = sum([batch_us(item.tokens, 1) for item in assignment.items])
        spread, lasting = lane.variation
        if not spread:
            return us
        off = math.sqrt(lasting) * self._lasting_off() + math.sqrt(1 - lasting) * self._dice.gauss()
        # The mean of a log-normal distribution is above its median.
        return us * math.exp(spread * off - spread * spread / 2 * self._are_means)

    def _lasting_off(self) -> float:
        """The deviation common to all lanes, in standard deviations: an Ornstein-Uhlenbeck process."""
        kept = math.exp((self._lasting_at - self._now) / _LASTING_S)
        self._lasting = kept * self._lasting + math.sqrt(1 - kept * kept) * self._dice.gauss()
        self._lasting_at = self._now
        return self._lasting


def _slowed(begin: float, end: float, until: float, speed: float) -> float:
    """The new end of an activity that would end at `end`, if it runs at `speed` from `begin` until `until`."""
    if end - begin <= (until - begin) * speed:
        return begin + (end - begin) / speed
    return end + (until - begin) * (1 - speed)


def _of_warm_up(points: Iterable[CostPoint], kind: str) -> Variation:
    shares = [point.spread_us / point.us for point in points if point.kind == kind and point.spread_us > 0]
    return Variation(min(_MAX_SPREAD, statistics.median(shares) / _QUARTILES) if shares else 0.0)


def _request(item: WorkItem) -> _Request:
    if not isinstance(item.owner, _Request):
        raise TypeError("a work item without a request")
    return item.owner
