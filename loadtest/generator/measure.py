"""One complete measurement: probe the server, check the generator against a no-op server, run the load."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bertserve.loadtest.generator.discovery import engine_of
from bertserve.loadtest.generator.probe import Probe
from bertserve.loadtest.generator.run import Load, measure_generator, run
from bertserve.loadtest.report import machine
from bertserve.loadtest.report.result import Result
from bertserve.loadtest.report.slo import good_limit_ms

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bertserve.loadtest.generator.messages import Target
    from bertserve.loadtest.generator.run import Kind
    from bertserve.loadtest.generator.scenario import Scenario
    from bertserve.loadtest.report.slo import Objective


@dataclass(slots=True, frozen=True)
class Measurement:
    """Common parameters of all runs of one command.

    Attributes:
        target: The server.
        scenario: The load.
        kinds: Its requests.
        slo: The objectives; they decide which answers count as good.
        seed: Seed of the schedules.
        engine: Engine and precision, if the server reports them.
    """

    target: Target
    scenario: Scenario
    kinds: tuple[Kind, ...]
    slo: tuple[Objective, ...]
    seed: int
    engine: str = ""

    @classmethod
    def prepare(
        cls,
        target: Target,
        scenario: Scenario,
        bundle: Path | None,
        slo: tuple[Objective, ...],
        seed: int,
        texts: Path | None = None,
    ) -> Measurement:
        """Probes the server and builds the requests.

        Args:
            target: The server.
            scenario: The load.
            bundle: Bundle that counts tokens; None: the server counts them.
            slo: The objectives.
            seed: Seed of the schedules.
            texts: File with the texts; None: the built-in text, in the scenario's lengths.

        Raises:
            BenchError: The server is unreachable, or does not answer such requests.
        """
        with Probe(target) as probe:
            return cls(target, scenario, probe.kinds(scenario, bundle, texts), slo, seed, engine_of(target))

    def run(
        self, scenario: Scenario, rate: float, seed: int, show: Callable[[Result, float], None], *, check: bool = True
    ) -> Result:
        """Runs a load.

        Args:
            scenario: With the phases of this run.
            rate: Requests per second where a phase's share is 1.
            seed: Seed of this run.
            show: Called with the progress.
            check: Measure the generator first.

        Raises:
            BenchError: A generator failed.
        """
        load = Load(scenario, rate, self.kinds, seed)
        result = Result(self.facts(scenario, rate, seed), scenario.seconds, good_limit_ms(self.slo))
        if check:
            measure_generator(self.target, load, result)
        return run(self.target, load, result, show)

    def facts(self, scenario: Scenario, rate: float, seed: int) -> dict[str, str]:
        """The conditions of a run for its report."""
        tasks = list(dict.fromkeys(kind.task for kind in self.kinds))
        return {
            "target": self.target.url,
            "task": ", ".join(tasks),
            "protocol": f"{self.target.protocol}: {', '.join(dict.fromkeys(map(self.target.path, tasks)))}",
            "scenario": scenario.name,
            "purpose": scenario.purpose,
            "rate": f"{rate:g} requests/s at full load, {scenario.arrivals} arrivals, seed {seed}",
            "phases": "; ".join(
                f"{phase.seconds:g} s at {rate * phase.begin:g}"
                + (f" to {rate * phase.end:g}" if phase.end != phase.begin else "")
                + " requests/s"
                for phase in scenario.phases
            ),
            "requests": ", ".join(
                f"{kind.name} (weight {kind.weight:g}{kind.lengths and f', {kind.lengths}'})" for kind in self.kinds
            ),
            "engine": self.engine or "not reported by the server",
            "command": shlex.join(["bertserve", "load", *sys.argv[2:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **{f"client's {name}" if name in {"CPU", "cores"} else name: fact for name, fact in _machine().items()},
        }


def _machine() -> dict[str, str]:
    facts = machine.facts()
    return {name: facts[name] for name in ("CPU", "cores", "memory", "system", "Python")}
