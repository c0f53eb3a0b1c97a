"""Attacks one after another, each on a server of its own, beside a polite client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.hostile import page
from loadtest.benchmarks.hostile.attacks import ATTACKS
from loadtest.benchmarks.hostile.measure import Plan, trial
from loadtest.benchmarks.hostile.polite import Polite
from loadtest.benchmarks.hostile.victim import Victim
from loadtest.benchmarks.runner import Benchmark
from loadtest.benchmarks.server_process import BertServer, few_descriptors
from loadtest.generator.child import Child
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.runner import Page
    from loadtest.benchmarks.store import Step, Store

PER_S = 100.0
"""Requests of the polite client a second, over each wire."""

_BEFORE_S, _CONTROL_S, _SETTLE_S = 1.5, 2.0, 60.0


class HostileBenchmark(Benchmark):
    """Needs the fake engine alone."""

    name = "hostile"
    purpose = "what attacks cost a polite client, in latency and memory"
    rounds = 1
    seconds = 4.0

    def facts(self) -> dict[str, Any]:
        return {**self.model_facts(), "seconds": self.options.seconds}

    def steps(self) -> Iterator[Step]:
        attacker = self.stack.enter_context(Child("loadtest.benchmarks.hostile.attacker"))
        for name in ATTACKS:
            yield name, partial(self._attack, attacker, name)

    def _attack(self, attacker: Child, name: str) -> dict[str, Any]:
        bundle = self.bundle
        options = ("--engine", "fake", "--default-timeout-ms", "10000")
        server = BertServer(self.options.models, self.options.precision, available_cpus(), *options)
        with few_descriptors(), server:
            victim = Victim.of(server.pids()[0], server.http_port, server.grpc_port, server.log_lines)
            with Polite(victim, bundle.model, PER_S) as polite:
                plan = Plan(_BEFORE_S, self.options.seconds, _CONTROL_S, _SETTLE_S)
                return trial(victim, polite, attacker, name, plan)

    def page(self, store: Store) -> Page:
        return page.page(store)

    def failed(self, store: Store) -> bool:
        return not store.steps or any(step["faults"] for step in store.steps.values())
