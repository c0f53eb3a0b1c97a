"""Our scheduling beside first come, first served, and under overload."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark
from loadtest.benchmarks.scheduling import page
from loadtest.benchmarks.scheduling.steps import Bench, Plan, steps
from serving.host import available_cpus

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from loadtest.benchmarks.runner import Page
    from loadtest.benchmarks.store import Step, Store

_USUAL = Plan()


class SchedulingBenchmark(Benchmark):
    """`make bench-scheduling`."""

    name = "scheduling"
    purpose = "deadlines beside first come, first served; overload"
    rounds = _USUAL.rounds
    seconds = _USUAL.seconds
    probe_s = _USUAL.probe_s

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        parser.add_argument("--overload-s", type=float, default=_USUAL.overload_s, help="length (%(default)s)")
        return ("overload_s", *super().add_options(parser))

    @property
    def _plan(self) -> Plan:
        options = self.options
        return Plan(options.rounds, options.seconds, options.overload_s, options.probe_s)

    def facts(self) -> dict[str, Any]:
        return {**self.model_facts(), "plan": asdict(self._plan)}

    def steps(self) -> Iterator[Step]:
        return steps(Bench.over(self.bundle, available_cpus(), self.store, self._plan, self.stack))

    def page(self, store: Store) -> Page:
        return page.page(store)
