"""Three replicas behind HAProxy: balance by predicted wait beside `leastconn` and round robin.

Texts of 6 to 250 words arrive at random at a share of what the replicas carry together. Each replica's engine sleeps
for as long as a real one would compute, so that three of them have room on one machine; everything else is real. Equal
replicas show what knowing the wait is worth where lengths alone differ, unequal ones where nodes differ, too.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.drive import SLO_MS, closed_loop, drive, even, mixed_texts
from loadtest.benchmarks.rolling.parts import CONFIGURATION, NAMES, Proxy, Replica
from loadtest.benchmarks.runner import Benchmark, Option, Page
from loadtest.benchmarks.server_process import HOST
from loadtest.generator.messages import Target
from loadtest.report.sample import Spread
from loadtest.report.tables import MET, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.drive import Workload
    from loadtest.benchmarks.store import Step, Store

BY_WAIT, LEASTCONN, ROUND_ROBIN = "by wait", "leastconn", "roundrobin"
POLICIES = (BY_WAIT, LEASTCONN, ROUND_ROBIN)
FLEETS = {"equal": (1.0, 1.0, 1.0), "unequal": (1.0, 0.6, 0.3)}
"""The speed of each replica."""

_TOKEN_US = 60.0
_OPTIONS = ("--engine", "fake", "--threads", "1", "--default-timeout-ms", "30000")
_CONNECTIONS, _THROUGHPUT_S, _UP_S = 4, 3.0, 10.0
_MOST_OF_LEASTCONN = 0.7
_FIGURES = ("p50_ms", "p99_ms", "short_p99_ms")


def configuration(policy: str) -> str:
    """What users get, or the same with other algorithms and without agents."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    if policy == BY_WAIT:
        return text
    bare = re.sub(r' agent-check agent-inter \w+ weight \d+| agent-port "\S+"', "", text)
    return bare.replace("balance leastconn", f"balance {policy}")


class Fleet(NamedTuple):
    """Three replicas, and a proxy before them for each policy."""

    replicas: list[Replica]
    proxies: dict[str, Proxy]


@contextlib.contextmanager
def running(models: Path, precision: str, speeds: tuple[float, ...]) -> Iterator[Fleet]:
    """A fleet, once every proxy has seen that all replicas are ready."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = Fleet([], {})
        for name, speed in zip(NAMES, speeds, strict=True):
            options = (*_OPTIONS, "--precision", precision, "--fake-token-us", f"{_TOKEN_US / speed:g}")
            fleet.replicas.append(Replica(name, models, folder, options))
            stack.callback(fleet.replicas[-1].close)
            fleet.replicas[-1].start()
        for policy in POLICIES:
            path = folder / f"{policy}.cfg"
            path.write_text(configuration(policy), encoding="utf-8")
            fleet.proxies[policy] = stack.enter_context(Proxy(fleet.replicas, folder, path))
        for proxy in fleet.proxies.values():
            for name in NAMES:
                proxy.wait_for(name, up=True, limit_s=_UP_S)
        yield fleet


class FleetBenchmark(Benchmark):
    """Every policy in turns, fleet by fleet."""

    name = "fleet"
    purpose = "three replicas behind HAProxy: balance by predicted wait beside leastconn and round robin"
    rounds = 5
    seconds = 15.0

    own = (Option("--share", 0.8, "of what the replicas carry (%(default)s)"),)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "share": self.options.share}

    def steps(self) -> Iterator[Step]:
        for fleet in FLEETS:
            yield f"capacity {fleet}", partial(self._capacity, fleet)
            for number in range(1, self.options.rounds + 1):
                turn = number % len(POLICIES)
                for policy in (*POLICIES[turn:], *POLICIES[:turn]):
                    yield f"block {fleet}, {number}, {policy}", partial(self._block, fleet, number, policy)

    @cached_property
    def _workload(self) -> Workload:
        return mixed_texts(self.bundle)

    def _fleet(self, name: str) -> Fleet:
        models, precision = self.options.models, self.options.precision
        return self.only(f"{name} replicas", lambda: running(models, precision, FLEETS[name]))

    def _capacity(self, fleet: str) -> dict[str, float]:
        """Texts a second that each replica answers to several clients in a closed loop."""
        endpoint, size = f"/v2/models/{self.bundle.model}/infer", self.bundle.hidden_size
        texts = [kind.texts[0] for kind in self._workload.kinds][::7]
        return {
            one.name: closed_loop(("v2", one.http_port, endpoint), size, texts, _CONNECTIONS, _THROUGHPUT_S)
            for one in self._fleet(fleet).replicas
        }

    def _block(self, fleet: str, number: int, policy: str) -> dict[str, float]:
        rate = self.options.share * sum(self.store.steps[f"capacity {fleet}"].values())
        target = Target("v2", HOST, self._fleet(fleet).proxies[policy].http_port, self.bundle.model)
        requests, generator = drive(target, self._workload, even(self.options.seconds), rate, number)
        figures = requests.figures(self.options.seconds, SLO_MS)
        return {"rate": rate, **figures, "generator_late_p99_ms": generator.lateness.percentile_ms(99)}

    def page(self, store: Store) -> Page:
        rows, verdicts = [], []
        for fleet, speeds in FLEETS.items():
            blocks = {policy: _blocks(store, fleet, policy) for policy in POLICIES}
            if not all(blocks.values()):
                continue
            ratios = [
                Spread.of([a["p99_ms"] / b["p99_ms"] for a, b in zip(blocks[BY_WAIT], other, strict=False)])
                for other in (blocks[LEASTCONN], blocks[ROUND_ROBIN])
            ]
            verdicts.append(
                f"p99 of {fleet} replicas is {ratios[0].text(2)} of `leastconn`'s (at most {_MOST_OF_LEASTCONN:g} is"
                f" asked: {MET[ratios[0].median <= _MOST_OF_LEASTCONN]}) and {ratios[1].text(2)} of round robin's"
            )
            for policy, measured in blocks.items():
                spreads = [Spread.of([block[figure] for block in measured]).text(1) for figure in _FIGURES]
                other = Spread.of([block["refused_per_s"] + block["missed_per_s"] for block in measured])
                name = f"{fleet} ({', '.join(f'{speed:g}' for speed in speeds)})"
                rows.append([name, policy, f"{measured[0]['rate']:.0f}", *spreads, f"{other.median:.1f}"])
        method = (
            "Three replicas behind HAProxy with `deploy/haproxy/haproxy.cfg`, for the others the same without agent"
            f" checks. The engine sleeps {_TOKEN_US:g} us a token, divided by the replica's speed. Texts of 6 to 250"
            f" words in even steps, open loop, Poisson arrivals at {store.facts['share']:g} of what the replicas"
            f" answer one by one to {_CONNECTIONS} connections each; latency counts from the intended time. Blocks of"
            f" {store.facts['seconds']:g} s, the policies in turns, the same arrivals within a round, as the ratios."
        )
        note = "Medians of the blocks, least to greatest in brackets; `short`: the shortest third of the texts."
        head = ("replicas", "balanced", "offered/s", "p50 ms", "p99 ms", "p99 of short ms", "refused or late/s")
        verdict = f"**Balanced by predicted wait, {'; '.join(verdicts)}.**" if verdicts else ""
        return Page("A fleet that knows the wait", method, [Table("Latency", note, head, rows, words=2)], verdict)


def _blocks(store: Store, fleet: str, policy: str) -> list[dict[str, float]]:
    found = store.named(f"block {fleet}, ")
    return [block for name, block in found.items() if name.endswith(f", {policy}") and "p99_ms" in block]
