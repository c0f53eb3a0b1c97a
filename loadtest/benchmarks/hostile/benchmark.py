"""Attacks one after another, each on a server of its own, beside a polite client."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.hostile.attacks import ATTACKS, BYTES_PER_S, CONNECTIONS, MANY_CONNECTIONS
from loadtest.benchmarks.hostile.measure import LEFT_MB, MAX_MB, Plan, trial
from loadtest.benchmarks.hostile.polite import WIRES, Polite
from loadtest.benchmarks.hostile.victim import Victim
from loadtest.benchmarks.runner import Benchmark
from loadtest.benchmarks.server_process import BertServer, few_descriptors
from loadtest.benchmarks.store import Store
from loadtest.generator.child import Child
from serving.host import available_cpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step

PER_S = 100.0
"""Requests per second of the polite client over each wire."""

_BEFORE_S, _CONTROL_S, _SETTLE_S = 1.5, 2.0, 60.0


class Outcome(NamedTuple):
    """The effect of an attack; latencies are those of the slower protocol.

    Attributes:
        before_ms: The polite client's p99 before the attack.
        p99_ms: The same during the attack.
        work_ms: CPU time that the server spends while a polite request waits, p99.
        over_control: `p99_ms` relative to the control's; None without a control.
        most_mb: Memory growth during the attack.
        left_mb: Memory growth after it.
    """

    before_ms: float
    p99_ms: float
    work_ms: float
    over_control: float | None
    most_mb: float
    left_mb: float

    @classmethod
    def of(cls, step: dict[str, Any]) -> Outcome:
        """The outcome in a result of `trial`."""

        def slower(when: str, figure: str = "p99_ms") -> float:
            return max(float(step["polite"][when][wire][figure]) for wire in WIRES)

        memory, during_ms = step["memory_mb"], slower("during")
        over = during_ms / slower("control") if "control" in step["polite"] else None
        grown = (memory[when] - memory["before"] for when in ("most", "after"))
        return cls(slower("before"), during_ms, slower("during", "work_p99_ms"), over, *grown)

    def meets(self, aims: Outcome) -> bool:
        pairs = zip(self, aims, strict=True)
        return all(found <= aim for found, aim in pairs if found is not None and aim is not None)


AIMS = Outcome(math.inf, 250.0, math.inf, 3.0, MAX_MB, LEFT_MB)
"""Maximum of each figure; besides, no request of the polite client fails."""


class HostileBenchmark(Benchmark):
    """Needs the fake engine alone."""

    name = "hostile"
    purpose = "Measure what attacks cost a well-behaved client, in latency and memory."
    rounds = 1
    seconds = 4.0

    def steps(self) -> Iterator[Step]:
        attacker = self.stack.enter_context(Child("loadtest.benchmarks.hostile.attacker"))
        for name in ATTACKS:
            yield name, partial(self._attack, attacker, name)

    def _attack(self, attacker: Child, name: str) -> dict[str, Any]:
        options = ("--engine", "fake", "--default-timeout-ms", "10000")
        server = BertServer(self.options.models, self.options.precision, available_cpus(), *options)
        with few_descriptors(), server:
            victim = Victim(server.pids()[0], {"http": server.http_port, "grpc": server.grpc_port}, server.log_lines)
            with Polite(victim, self.bundle.model, PER_S) as polite:
                return trial(
                    victim, polite, attacker, name, Plan(_BEFORE_S, self.options.seconds, _CONTROL_S, _SETTLE_S)
                )

    def figures(self, store: Store) -> dict[str, Any]:
        now = {name: Outcome.of(step) for name, step in store.steps.items()}
        before = store.path.with_name(f"{store.path.stem}-before.json")
        return {
            "now": now,
            "failed": sum(len(step["faults"]) for step in store.steps.values()),
            "aims": AIMS,
            "missed": [name for name, found in now.items() if store.steps[name]["faults"] or not found.meets(AIMS)],
            "former": [Outcome.of(step) for step in Store.read(before).steps.values()] if before.exists() else [],
            "former_name": before.name,
            "connections": CONNECTIONS,
            "many": MANY_CONNECTIONS,
            "mb_per_s": BYTES_PER_S / 1e6,
            "per_s": PER_S,
        }

    def failed(self, store: Store) -> bool:
        return not store.steps or any(step["faults"] for step in store.steps.values())
