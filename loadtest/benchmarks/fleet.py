"""Three replicas behind HAProxy: balance by predicted wait, `leastconn` and round robin.

Each replica's engine sleeps as long as a real one would compute, so that three of them fit on one machine; everything
else is real. Equal replicas show the gain where only lengths differ, unequal ones where nodes differ too.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadtest.benchmarks.drive import block, closed_loop, even, mixed_texts
from loadtest.benchmarks.rolling.parts import CONFIGURATION, NAMES, Proxy, Replica
from loadtest.benchmarks.runner import Benchmark, Option
from loadtest.benchmarks.server_process import HOST
from loadtest.generator.messages import Target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadtest.benchmarks.drive import Workload
    from loadtest.benchmarks.store import Step, Store

_BY_WAIT = "by wait"
_POLICIES = (_BY_WAIT, "leastconn", "roundrobin")
_FLEETS = {"equal": (1.0, 1.0, 1.0), "unequal": (1.0, 0.6, 0.3)}
"""Speed of each replica."""

_TOKEN_US = 60.0
_OPTIONS = ("--engine", "fake", "--threads", "1", "--default-timeout-ms", "30000")
_CONNECTIONS, _THROUGHPUT_S, _UP_S = 4, 3.0, 10.0


def _configuration(policy: str) -> str:
    """The configuration that users get, or the same with another algorithm and without agent checks."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    if policy == _BY_WAIT:
        return text
    bare = re.sub(r' agent-check agent-inter \w+ weight \d+| agent-port "\S+"', "", text)
    return bare.replace("balance leastconn", f"balance {policy}")


class _Fleet(NamedTuple):
    """Three replicas, and a proxy in front of them for each policy."""

    replicas: list[Replica]
    proxies: dict[str, Proxy]


@contextlib.contextmanager
def _running(models: Path, precision: str, speeds: tuple[float, ...]) -> Iterator[_Fleet]:
    """A fleet, once every proxy has seen that all replicas are ready."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = _Fleet([], {})
        for name, speed in zip(NAMES, speeds, strict=True):
            options = (*_OPTIONS, "--precision", precision, "--fake-token-us", f"{_TOKEN_US / speed:g}")
            fleet.replicas.append(Replica(name, models, folder, options))
            stack.callback(fleet.replicas[-1].close)
            fleet.replicas[-1].start()
        for policy in _POLICIES:
            path = folder / f"{policy}.cfg"
            path.write_text(_configuration(policy), encoding="utf-8")
            proxy = fleet.proxies[policy] = stack.enter_context(Proxy(fleet.replicas, folder, path))
            for name in NAMES:
                proxy.wait_for(name, up=True, limit_s=_UP_S)
        yield fleet


class FleetBenchmark(Benchmark):
    """Every policy in turns, fleet by fleet."""

    name = "fleet"
    purpose = "Compare balancing by predicted wait with leastconn and round robin: three replicas behind HAProxy."
    rounds = 5
    seconds = 15.0
    own = (Option("--share", 0.8, "Load as a share of the replicas' capacity (default: %(default)s)."),)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "share": self.options.share}

    def steps(self) -> Iterator[Step]:
        for fleet in _FLEETS:
            yield f"capacity {fleet}", partial(self._capacity, fleet)
            for number in range(1, self.options.rounds + 1):
                turn = number % len(_POLICIES)
                for policy in (*_POLICIES[turn:], *_POLICIES[:turn]):
                    yield f"block {fleet}, {number}, {policy}", partial(self._block, fleet, number, policy)

    @cached_property
    def _workload(self) -> Workload:
        return mixed_texts(self.bundle)

    def _fleet(self, name: str) -> _Fleet:
        options = self.options
        return self.only(f"{name} replicas", partial(_running, options.models, options.precision, _FLEETS[name]))

    def _capacity(self, fleet: str) -> dict[str, float]:
        """Texts per second that each replica answers to several clients in a closed loop."""
        endpoint, size, texts = f"/v2/models/{self.bundle.model}/infer", self.bundle.hidden_size, self._workload.texts
        return {
            one.name: closed_loop(("v2", one.http_port, endpoint), size, texts[::7], _CONNECTIONS, _THROUGHPUT_S)
            for one in self._fleet(fleet).replicas
        }

    def _block(self, fleet: str, number: int, policy: str) -> dict[str, float]:
        rate = self.options.share * sum(self.store.steps[f"capacity {fleet}"].values())
        target = Target("v2", HOST, self._fleet(fleet).proxies[policy].http_port, self.bundle.model)
        return block(target, self._workload, even(self.options.seconds), rate, number)

    def figures(self, store: Store) -> dict[str, Any]:
        """Blocks of each fleet by policy, and the ratios of p99 to balance by wait, if all were measured."""
        fleets, ratios = {}, {}
        for fleet in _FLEETS:
            blocks: dict[str, list[dict[str, float]]] = {policy: [] for policy in _POLICIES}
            for name, found in store.named(f"block {fleet}, ").items():
                if "p99_ms" in found:
                    blocks[name.partition(", ")[2]].append(found)
            if all(blocks.values()):
                fleets[fleet] = blocks
                ratios[fleet] = {
                    policy: [a["p99_ms"] / b["p99_ms"] for a, b in zip(blocks[_BY_WAIT], blocks[policy], strict=False)]
                    for policy in _POLICIES[1:]
                }
        return {"fleets": fleets, "ratios": ratios, "speeds": _FLEETS, "lost": _lost}


def _lost(blocks: list[dict[str, float]]) -> list[float]:
    return [found["refused_per_s"] + found["missed_per_s"] for found in blocks]
