"""Replicas behind HAProxy, restarted one after another under load: a proof that no request is lost."""

from __future__ import annotations

import math
import shlex
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.rolling.drive import PROTOCOLS, Plan, experiment
from loadtest.benchmarks.runner import Benchmark, Option, Page, Picture
from loadtest.benchmarks.show import chart, figure, table
from loadtest.report.tables import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.store import Step, Store

_STEP = "rolling"
_MEANS = (
    "Every request has an id. A client counts a reply only if it bears that id and the answer that its text has"
    " always had; afterwards every id must stand exactly once, as answered, in the replicas' access logs."
)

Run = dict[str, Any]
"""What `Found.figures` gives, and the command line of the servers."""


class RollingBenchmark(Benchmark):
    """Fails where a promise was broken."""

    name = "rolling"
    purpose = "replicas behind HAProxy that are restarted under load: is a request lost?"
    rounds = 1
    seconds = 6.0
    own = (
        Option("--restarts", 20, "at least so many (%(default)s)"),
        Option("--requests", 200_000, "at least so many (%(default)s)"),
        Option("--rate", None, "requests a second (0.7 of the capacity, which is measured)", float),
        Option("--lame-duck-s", 5.0, "of the servers (%(default)s)", zero=True),
        Option("--server", "", "more options of each server, as one word"),
        Option("--logs", None, "keep the logs of servers and proxy there", Path),
    )

    def facts(self) -> dict[str, Any]:
        return self.model_facts()

    def steps(self) -> Iterator[Step]:
        yield _STEP, self._experiment

    def _experiment(self) -> Run:
        options = self.options
        folder = options.logs or Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        more = tuple(shlex.split(options.server))
        plan = Plan(options.models, folder, options.restarts, options.requests, options.rate, more, options.lame_duck_s)
        server = shlex.join(["bertserve", "serve", "--lame-duck-s", f"{options.lame_duck_s:g}", *more])
        return {**experiment(plan, self.say).figures(), "server": server}

    def page(self, store: Store) -> Page:
        return page(store.steps[_STEP])

    def failed(self, store: Store) -> bool:
        return bool(store.steps[_STEP]["wrong"])


def page(run: Run) -> Page:
    """The page of a run."""
    offered = sum(run["offered"].values())
    verdict = f"**{offered:,} requests over {len(run['restarts'])} restarts: none lost, none reset, no 5xx.**"
    if run["wrong"]:
        verdict = "**Not kept:**\n\n" + "\n".join(f"- {line}" for line in run["wrong"])
    method = (
        f"Three replicas (`{run['server']}`) behind HAProxy with `deploy/haproxy/haproxy.cfg`, which asks"
        " `/readyz` once a second and believes the second refusal. Half of the requests come over HTTP keep-alive, half"
        " over gRPC; open loop, Poisson arrivals. One replica after another gets SIGTERM, ends by itself, is started"
        " again and waits until HAProxy takes it back. Everything shares the machine, so a replica that starts takes"
        " its cores from those that answer."
    )
    latencies = table(
        "Latency",
        "From the intended time of sending, in milliseconds.",
        [{"when": name, **row} for name, row in run["latencies"].items()],
        ("", lambda row: row["when"]),
        ("answers", lambda row: f"{row['answers']:,}"),
        *((name, figure(name)) for name in ("p50", "p99", "p99.9")),
        ("most", figure("most", 0)),
        words=1,
    )
    rate = _plot(run, "Requests a second", "requests/s", {"offered": "grey", "answered": "blue"}, "_per_s")
    latency = _plot(run, "Latency", "ms", {"p50": "blue", "p99": "orange"}, "_ms", log_up=True)
    pictures = [Picture("rate", rate), Picture("latency", latency)]
    return Page(
        "Rolling restarts under load", method, [_MEANS, _counts(run), _restarts(run), latencies, *pictures], verdict
    )


def _counts(run: Run) -> Table:
    counted = {
        **{f"requests over {protocol}": f"{run['offered'][protocol]:,}" for protocol in PROTOCOLS},
        "requests a second": f"{run['rate']:.0f}",
        **({"of a capacity of": f"{run['capacity']:.0f}"} if run["capacity"] else {}),
        "seconds": f"{run['seconds']:.0f}",
        "requests failed": f"{sum(run['faults'].values()):,}",
        "requests not answered exactly once": f"{run['unaccounted']:,}",
        **{f"HAProxy: {name}": f"{count:,}" for name, count in run["proxy"].items()},
    }
    note = "A request sent again is one for which no connection could be made: nothing of it had been read."
    return Table("What was counted", note, ("", "count"), [list(pair) for pair in counted.items()], 1)


def _restarts(run: Run) -> Table:
    spans = {
        "from SIGTERM to the end, s": [one["ended"] - one["signalled"] for one in run["restarts"]],
        "from the end until it takes requests again, s": [one["back"] - one["ended"] for one in run["restarts"]],
    }
    codes = ", ".join(str(code) for code in sorted({restart["code"] for restart in run["restarts"]}))
    return table(
        "The restarts",
        f"Exit codes: {codes}.",
        spans.items(),
        ("", lambda span: span[0]),
        ("least", lambda span: f"{min(span[1]):.1f}"),
        ("median", lambda span: f"{statistics.median(span[1]):.1f}"),
        ("most", lambda span: f"{max(span[1]):.1f}"),
        words=1,
    )


def _plot(run: Run, title: str, up: str, names: dict[str, str], unit: str, *, log_up: bool = False) -> str:
    """Figures over time; each SIGTERM is marked."""

    def points(key: str) -> list[tuple[float, float]]:
        return [(row["at_s"], math.nan if row[key] is None else row[key]) for row in run["slices"]]

    lines = {name: (colour, points(name + unit)) for name, colour in names.items()}
    moments = [restart["signalled"] for restart in run["restarts"]]
    return chart(
        title, "seconds; a dotted line is a SIGTERM", up, lines, log_up=log_up, reach=run["seconds"], moments=moments
    )
