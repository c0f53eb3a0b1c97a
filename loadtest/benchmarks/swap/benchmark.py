"""What a swap of versions costs the requests that arrive meanwhile: p99 during it beside p99 before it."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.runner import Benchmark
from loadtest.benchmarks.swap import page
from loadtest.benchmarks.swap.measure import Bench, Plan, steps
from serving.host import available_cpus

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from loadtest.benchmarks.runner import Page
    from loadtest.benchmarks.store import Step, Store

_USUAL = Plan()


class SwapBenchmark(Benchmark):
    """`make bench-swap`."""

    name = "swap"
    purpose = "latency during a swap of versions beside latency before it"
    rounds = _USUAL.rounds
    seconds = _USUAL.calm_s

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> tuple[str, ...]:
        parser.add_argument("--scratch", type=Path, help="where there is room for the versions of one round")
        parser.add_argument("--swaps", type=int, default=_USUAL.swaps, help="of a round (%(default)s)")
        parser.add_argument("--room-s", type=float, default=_USUAL.room_s, help="for each, after --seconds of calm")
        parser.add_argument("--capacity-mixed", type=float, help="requests a second, in place of a search for it")
        parser.add_argument("--capacity-short", type=float, help="the same of short texts")
        return ("swaps", "room_s", "capacity_mixed", "capacity_short")

    @property
    def _plan(self) -> Plan:
        options = self.options
        return Plan(options.rounds, options.swaps, options.seconds, options.room_s)

    def facts(self) -> dict[str, Any]:
        model = self.model_facts()
        del model["version"]  # each swap makes another one
        return {**model, "plan": asdict(self._plan)}

    def steps(self) -> Iterator[Step]:
        for name in ("mixed", "short"):
            capacity = getattr(self.options, f"capacity_{name}")
            if capacity is not None and f"capacity {name}" not in self.store.steps:
                self.store.keep(f"capacity {name}", {"capacity_per_s": capacity, "confidence": "given"})
        scratch = Path(self.stack.enter_context(tempfile.TemporaryDirectory(dir=self.options.scratch)))
        yield from steps(Bench.over(self.bundle, available_cpus(), scratch, self._plan, self.store))

    def page(self, store: Store) -> Page:
        return page.page(store)
