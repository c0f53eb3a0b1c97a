"""Replicas behind HAProxy, restarted one after another under load: a proof that no request is lost."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.rolling.drive import Plan, experiment
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.show import chart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store

_STEP = "rolling"


class RollingBenchmark(Benchmark):
    """Fails if a promise was broken."""

    name = "rolling"
    purpose = "Restart replicas behind HAProxy under load, and count failed requests."
    own = (
        Option("--restarts", 20, "Minimum number of restarts (default: %(default)s)."),
        Option("--requests", 200_000, "Minimum number of requests (default: %(default)s)."),
        Option("--rate", None, "Requests/s (default: 0.7 of the measured capacity).", float),
        Option("--lame-duck-s", 5.0, "Lame duck of the servers, in seconds (default: %(default)s).", zero=True),
    )

    def facts(self) -> dict[str, Any]:
        return self.model_facts()

    def steps(self) -> Iterator[Step]:
        yield _STEP, self._experiment

    def _experiment(self) -> dict[str, Any]:
        """The result of `Found.figures`, and the command line of the servers."""
        options, folder = self.options, Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        plan = Plan(options.models, folder, options.restarts, options.requests, options.rate, (), options.lame_duck_s)
        server = f"bertserve serve --lame-duck-s {options.lame_duck_s:g}"
        return {**experiment(plan, self.say).figures(), "server": server}

    def figures(self, store: Store) -> dict[str, Any]:
        run = store.steps[_STEP]
        spans = {
            "from SIGTERM to the end, s": [one["ended"] - one["signalled"] for one in run["restarts"]],
            "from the end until it takes requests again, s": [one["back"] - one["ended"] for one in run["restarts"]],
        }
        return {"run": run, "spans": spans, "zeros": [name for name, count in run["proxy"].items() if not count]}

    def plots(self, store: Store) -> dict[str, str]:
        run = store.steps[_STEP]
        rate = _plot(run, "Requests a second", "requests/s", {"offered": "grey", "answered": "blue"}, "_per_s")
        latency = _plot(run, "Latency", "ms", {"p50": "blue", "p99": "orange"}, "_ms", log_up=True)
        return {"rate": rate, "latency": latency}

    def failed(self, store: Store) -> bool:
        return bool(store.steps[_STEP]["wrong"])


def _plot(run: dict[str, Any], title: str, up: str, names: dict[str, str], unit: str, *, log_up: bool = False) -> str:
    """Figures over time; each SIGTERM is marked."""

    def points(key: str) -> list[tuple[float, float]]:
        return [(row["at_s"], math.nan if row[key] is None else row[key]) for row in run["slices"]]

    lines = {name: (colour, points(name + unit)) for name, colour in names.items()}
    moments = [restart["signalled"] for restart in run["restarts"]]
    return chart(
        title, "seconds; a dotted line is a SIGTERM", up, lines, log_up=log_up, reach=run["seconds"], moments=moments
    )
