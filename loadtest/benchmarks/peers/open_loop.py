"""What users have, beside other servers: texts of mixed lengths that arrive at random, deadlines, texts that repeat.

Every server gets the same arrivals (Poisson) of texts of 6 to 250 words, at rates from a fifth of what ours carries
with the same engine to twice that. Short blocks alternate, so that a host which changes its speed meets all alike.
"""

from __future__ import annotations

import signal
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.drive import drive, even, mixed_texts, repeated_texts
from loadtest.benchmarks.peers.entrants import (
    CACHE_MB,
    DEADLINE_MS,
    KNOWN_TEXTS,
    REPEATING,
    ZIPF_SHARES,
    Entrant,
    groups,
)
from loadtest.benchmarks.peers.kit import PeerBenchmark
from loadtest.benchmarks.peers.open_loop_page import capacities, page_of
from loadtest.benchmarks.peers.servers import CACHED, open_loop_peer
from loadtest.benchmarks.turns import send_signal, thawed
from loadtest.generator.child import Child

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.benchmarks.drive import Workload
    from loadtest.benchmarks.peers.servers import Peer
    from loadtest.benchmarks.runner import Page
    from loadtest.benchmarks.server_process import ServerProcess
    from loadtest.benchmarks.store import Step, Store

_CONNECTIONS = 4
_CAPACITIES, _CAPACITY_S, _WARM_UP_S = 3, 3.0, 0.5
_PATIENCE_S = 2.0
_COLLAPSED = 0.1
"""Of the requests: who takes no deadlines and answers fewer in time is asked at no higher rate."""

_FIRST_S, _FIRST_RATE = 4.0, 20.0
_KNOWN_RATE = 25.0
_REST_S, _RESTING_CPU_S, _LONGEST_REST_S = 0.2, 0.02, 10.0


class OpenLoopBenchmark(PeerBenchmark):
    """The curves of the README."""

    name = "open-loop"
    purpose = "texts of mixed lengths that arrive at random, beside Triton, infinity and FastAPI"
    rounds = 3
    seconds = 8.0
    tokens = None

    def steps(self) -> Iterator[Step]:
        yield "versions", self.versions
        for number in range(1, _CAPACITIES + 1):
            for engine, entrants in groups().items():
                yield f"capacity {number} {engine}", partial(self._capacity, entrants[0])
        for number in range(1, self.options.rounds + 1):
            for engine, entrants in groups().items():
                for share in sorted({share for entrant in entrants for share in entrant.shares}):
                    for entrant in entrants if number % 2 else entrants[::-1]:
                        if share in entrant.shares and not self._has_collapsed(entrant, number):
                            block = partial(self._block, entrant, engine, share, number)
                            yield f"block {number} {share:g} {entrant.name}", block
            for share in ZIPF_SHARES:
                for entrant in REPEATING if number % 2 else REPEATING[::-1]:
                    block = partial(self._block, entrant, entrant.engine, share, number, repeat=True)
                    yield f"zipf {number} {share:g} {entrant.name}", block

    def _has_collapsed(self, entrant: Entrant, number: int) -> bool:
        blocks = (self.store.steps.get(f"block {number} {share:g} {entrant.name}") for share in entrant.shares)
        return not entrant.takes_deadlines and any(
            block["good_per_s"] < _COLLAPSED * block["offered_per_s"] for block in blocks if block
        )

    @cached_property
    def _mixed(self) -> Workload:
        return mixed_texts(self.kit.ort)

    @cached_property
    def _repeated(self) -> Workload:
        return repeated_texts(self.kit.ort)

    @cached_property
    def _peers(self) -> dict[str, Peer]:
        """Who has been started."""
        return {}

    def _peer(self, entrant: Entrant) -> Peer:
        """Its server, started when it is first asked for; another project's is stopped meanwhile."""
        if entrant.server not in self._peers:
            self.say(f"starting {entrant.server}")
            peer = open_loop_peer(self.kit, entrant.server, CACHE_MB)
            self.stack.enter_context(peer.process)
            self._peers[entrant.server] = peer
            for other in (other for group in groups().values() for other in group if other.server == entrant.server):
                target = other.target(peer.http_port, self.kit.ort.model)
                drive(target, self._mixed, even(_FIRST_S), _FIRST_RATE, 1)
            if entrant.server.endswith(CACHED):
                texts = [kind.texts[0] for kind in self._repeated.kinds[:KNOWN_TEXTS]]
                # No more at once than it computes at once: it may refuse what waits.
                self._closed_loop(entrant, peer, texts, KNOWN_TEXTS / _KNOWN_RATE, self.kit.threads)
            _rest(peer.process)
            if not entrant.is_ours:
                send_signal(peer.process, signal.SIGSTOP)
                # What is stopped would not hear that it shall end.
                self.stack.callback(send_signal, peer.process, signal.SIGCONT)
        return self._peers[entrant.server]

    def _capacity(self, entrant: Entrant) -> dict[str, float]:
        texts = [kind.texts[0] for kind in self._mixed.kinds]
        return {"per_s": self._closed_loop(entrant, self._peer(entrant), texts[::7], _CAPACITY_S, _CONNECTIONS)}

    def _closed_loop(
        self, entrant: Entrant, peer: Peer, texts: Sequence[Any], seconds: float, connections: int
    ) -> float:
        """Texts a second that a few clients get, who ask for them in turn."""
        target, size = entrant.target(peer.http_port, self.kit.ort.model), self.kit.ort.hidden_size
        with Child("loadtest.generator.client") as client:
            way: dict[str, Any] = {"way": entrant.name, "form": "v2", "port": target.port}
            client.ask("open", endpoint=target.path("embed"), hidden_size=size, texts={0: texts}, **way)
            times = {"warm_up_s": _WARM_UP_S, "seconds": seconds}
            sample = client.ask("measure", way=entrant.name, connections=connections, tokens=0, **times)
        return float(sample["per_s"])

    def _block(
        self, entrant: Entrant, engine: str, share: float, number: int, *, repeat: bool = False
    ) -> dict[str, float]:
        peer, rate = self._peer(entrant), share * capacities(self.store)[engine]
        target, seconds = entrant.target(peer.http_port, self.kit.ort.model), self.options.seconds
        workload = self._repeated if repeat else self._mixed
        with thawed(None if entrant.is_ours else peer.process):
            requests, generator = drive(target, workload, even(seconds), rate, 10 * number, _PATIENCE_S)
            _rest(peer.process)
        late_ms = generator.lateness.percentile_ms(99)
        return {"rate": rate, **requests.figures(seconds, DEADLINE_MS), "generator_late_p99_ms": late_ms}

    def page(self, store: Store) -> Page:
        return page_of(store)


def _rest(server: ServerProcess) -> None:
    """Waits until a server has finished what nobody waits for any more."""
    until = time.perf_counter() + _LONGEST_REST_S
    before = server.cpu_s()
    while time.perf_counter() < until:
        time.sleep(_REST_S)
        now = server.cpu_s()
        if now.server + now.engine - before.server - before.engine < _RESTING_CPU_S:
            return
        before = now
