"""The experiment: load on both protocols while one replica after another ends and is started again."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loadtest.benchmarks.drive import closed_loop, even
from loadtest.benchmarks.server_process import HOST
from loadtest.generator.client import GRPC
from loadtest.generator.messages import Target
from loadtest.generator.run import Kind, Load, run
from loadtest.generator.scenario import Scenario
from loadtest.generator.workload import find_bundle, make_texts
from loadtest.report.result import Result
from tests.support.rolling.accounting import identity
from tests.support.rolling.parts import NAMES, Proxy, Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

PROTOCOLS = ("http", "grpc")
_GENERATOR = "tests.support.rolling.accounting"
_SHARE = 0.7
_TOKENS, _TEXTS = 16, 50
_CONNECTIONS = 16
_CAPACITY_S = 6.0
_CALM_S = 2.0
"""Seconds of load before the first restart and after the last."""

_SEEN_S = 10.0
_END_S = 30.0
"""Kubernetes' default, and the value in deploy/kubernetes."""

_PATIENCE_S, _LOOK_S = 10.0, 0.05
_BROKEN = ("replies broken", "replies cut off by a replica", "replies 4xx", "replies 5xx")


@dataclass(slots=True, frozen=True)
class Plan:
    """Plan of the experiment.

    Attributes:
        models: A model repository.
        folder: Directory for logs.
        restarts: Minimum number of restarts.
        requests: Minimum number of requests.
        rate: Requests per second; None for 0.7 of the measured capacity of the replicas.
        options: More command-line options of each server.
        lame_duck_s: The servers' setting.
    """

    models: Path
    folder: Path
    restarts: int
    requests: int
    rate: float | None
    options: tuple[str, ...]
    lame_duck_s: float


@dataclass(slots=True)
class Restart:
    """One restart: when it got SIGTERM, when it had ended, and when the proxy sent it requests again.

    Times are seconds from the load's start; `code` is its exit code.
    """

    replica: str
    signalled: float
    ended: float
    back: float
    code: int


@dataclass(slots=True)
class Found:
    """Results of the experiment.

    Attributes:
        rate: Offered requests per second.
        capacity: Requests per second of the replicas in a closed loop; None if not measured.
        seconds: Duration of the load.
        restarts: All restarts.
        offered: Requests, by protocol.
        faults: Failed requests, by reason.
        unaccounted: Ids that appear in no replica's log as answered, or more than once; should be 0.
        proxy: HAProxy's counts.
        errors: Other problems, such as errors in the replicas' logs.
    """

    rate: float
    capacity: float | None
    seconds: float
    restarts: list[Restart] = field(default_factory=list)
    offered: dict[str, int] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    unaccounted: list[str] = field(default_factory=list)
    proxy: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def verdict(self) -> list[str]:
        """Broken promises; empty if all were kept."""
        wrong = [f"{count} requests failed: {reason}" for reason, count in self.faults.items()]
        if self.unaccounted:
            shown = ", ".join(self.unaccounted[:3])
            wrong.append(f"{len(self.unaccounted)} requests were not answered exactly once, such as {shown}")
        wrong += [f"replica {one.replica} ended with exit code {one.code}" for one in self.restarts if one.code]
        if late := sum(one.back > self.seconds for one in self.restarts):
            wrong.append(f"{late} restarts ended after the load")
        wrong += [f"HAProxy counted {self.proxy[name]} {name}" for name in _BROKEN if self.proxy.get(name)]
        return wrong + self.errors


class Running:
    """A load that a thread of its own sends while the caller acts on the servers."""

    def __init__(self, target: Target, kinds: tuple[Kind, ...], seconds: float, rate: float, seed: int) -> None:
        load = Load(Scenario("rolling", "", even(seconds), {1: 1.0}), rate, kinds, seed, _PATIENCE_S)
        self.processes = load.processes
        self.result = Result({}, seconds)
        self._began: float | None = None
        pool = ThreadPoolExecutor(1)
        self._sent = pool.submit(run, target, load, self.result, self._show, _GENERATOR)
        pool.shutdown(wait=False)

    def began(self) -> float:
        """Start of the schedule on the clock `time.perf_counter`; waits for it."""
        while self._began is None:
            self.check()
            time.sleep(_LOOK_S)
        return self._began

    def check(self) -> None:
        """Raises BenchError if a generator has failed."""
        if self._sent.done():
            self._sent.result()

    def join(self) -> None:
        """Waits for the last answer; raises BenchError if a generator has failed."""
        self._sent.result()

    def _show(self, _: Result, passed_s: float) -> None:
        if self._began is None:
            self._began = time.perf_counter() - passed_s


def experiment(plan: Plan, say: Callable[[str], None]) -> Found:
    """Runs the experiment; raises BenchError if a server or generator does not start, or a server does not end."""
    bundle = find_bundle(plan.models)
    texts = [text.text for text in make_texts(bundle.path, _TOKENS, _TEXTS)]
    with contextlib.ExitStack() as stack:
        options = ("--lame-duck-s", str(plan.lame_duck_s), *plan.options)
        replicas = [Replica(name, plan.models, plan.folder, options) for name in NAMES]
        say("starting the replicas")
        for replica in replicas:
            stack.callback(replica.close)
        pool = stack.enter_context(ThreadPoolExecutor(len(replicas)))
        start_s = max(pool.map(Replica.start, replicas))
        proxy = stack.enter_context(Proxy(replicas, plan.folder))
        for replica in replicas:
            proxy.wait_for(replica.name, up=True, limit_s=_SEEN_S)
        capacity = None
        if plan.rate is None:
            say("measuring what they carry")
            capacity = _capacity(proxy, bundle.model, bundle.hidden_size, texts)
        rate = plan.rate or _SHARE * (capacity or 0.0)
        # Three started at once; a start under load takes about as long. The proxy checks once a second.
        cycle_s = plan.lame_duck_s + start_s + 3.0
        seconds = max(plan.requests / rate * 1.02, 2 * _CALM_S + plan.restarts * cycle_s)
        before = proxy.counts()
        found = Found(rate, capacity, seconds)
        kinds = (Kind("embed", "embed", 1.0, tuple(texts)),)
        loads = {}
        for seed, protocol in enumerate(PROTOCOLS, 1):
            target = Target(protocol, HOST, getattr(proxy, f"{protocol}_port"), bundle.model)
            loads[protocol] = Running(target, kinds, seconds, rate / len(PROTOCOLS), seed)
        _restart_all(found, plan, replicas, proxy, loads, say)
        say("waiting for the last answers")
        for load in loads.values():
            load.join()
        found.proxy = {name: count - before[name] for name, count in proxy.counts().items()}
        codes = pool.map(lambda replica: replica.stop(_END_S), replicas)
        found.errors += [f"at the end a replica's exit code was {code}" for code in codes if code]
        _account(found, loads, replicas)
    return found


def _capacity(proxy: Proxy, model: str, hidden_size: int, texts: list[str]) -> float:
    """Capacity of half HTTP and half gRPC: a request costs the mean of the two."""
    places = (("embed", proxy.http_port, "/embed"), (GRPC, proxy.grpc_port, model))
    rates = [closed_loop(place, hidden_size, texts, _CONNECTIONS, _CAPACITY_S) for place in places]
    return len(rates) / sum(1 / rate for rate in rates)


def _restart_all(
    found: Found,
    plan: Plan,
    replicas: Sequence[Replica],
    proxy: Proxy,
    loads: dict[str, Running],
    say: Callable[[str], None],
) -> None:
    """Restarts one replica after another, evenly over the load, each after the previous one is back."""
    began = min(load.began() for load in loads.values())

    def now() -> float:
        return time.perf_counter() - began

    each_s = (found.seconds - 2 * _CALM_S) / plan.restarts
    for number in range(plan.restarts):
        while now() < _CALM_S + number * each_s:
            for load in loads.values():
                load.check()
            time.sleep(_LOOK_S)
        replica = replicas[number % len(replicas)]
        failed = sum(load.result.failed + load.result.unsent for load in loads.values())
        say(f"restart {number + 1} of {plan.restarts}; {now():.0f} of {found.seconds:.0f} s, {failed} requests failed")
        signalled = now()
        code = replica.stop(_END_S)
        ended = now()
        replica.start()
        proxy.wait_for(replica.name, up=True, limit_s=_SEEN_S)
        found.restarts.append(Restart(replica.name, signalled, ended, now(), code))


def _account(found: Found, loads: dict[str, Running], replicas: Sequence[Replica]) -> None:
    """Compares what was sent, what clients received, and what the replicas' logs say they answered."""
    answered: Counter[str] = Counter()
    for replica in replicas:
        answered += replica.answered()
        found.errors += [f"replica {replica.name} logged: {line}" for line in replica.faults()]
    for protocol, load in loads.items():
        result, of = load.result, load.processes
        found.offered[protocol] = result.offered
        found.faults += Counter(result.faults)
        names = [
            identity(protocol, index, number)
            for index in range(of)
            for number in range(len(range(index, result.offered, of)))
        ]
        found.unaccounted += [name for name in names if answered[name] != 1]
