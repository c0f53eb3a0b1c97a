"""The rounds of a benchmark: who is measured when, and what else the machine did meanwhile."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loadtest.benchmarks.processes import cpu_s, descendants, machine_cpu_s
from loadtest.benchmarks.server.report import Samples
from loadtest.benchmarks.server.subjects import (
    CONNECTIONS,
    OPTIONS,
    PROTOCOLS,
    WIDE,
    is_raw,
    raw_subject,
    server_subject,
    ways,
)
from loadtest.benchmarks.server_process import HOST
from loadtest.errors import BenchError
from loadtest.report.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from loadtest.benchmarks.server_process import BertServer
    from loadtest.generator.child import Child
    from loadtest.generator.workload import Bundle, Text

_LEAST_COSINE = 0.9999
_LONGEST_WARM_UP_S = 0.5
_ASK_S = 60.0

_MOST_REPEATS = 3


@dataclass(slots=True, frozen=True)
class Plan:
    """What is measured how often and how long.

    Attributes:
        lengths: Tokens of the texts.
        rounds: How often everything is measured.
        seconds: Length of a measurement.
    """

    lengths: tuple[int, ...]
    rounds: int
    seconds: float

    @property
    def warm_up_s(self) -> float:
        """What comes before each measurement and is not counted."""
        return min(_LONGEST_WARM_UP_S, self.seconds / 4)


@dataclass(slots=True, frozen=True)
class Turn:
    """One measurement: whom to ask, what, and under which name its sample is kept."""

    child: Child
    subject: str
    tokens: int
    arguments: dict[str, object]


class Rounds:
    """The measurements over a server and three measuring processes that are up.

    Attributes:
        samples: Every measurement that counts.
        repeats: Measurements that were made again because others used the machine meanwhile.
    """

    def __init__(self, plan: Plan, server: BertServer, children: dict[str, Child]) -> None:
        """Takes what is running.

        Args:
            plan: What to do.
            server: Ready.
            children: The measuring processes by the names `raw`, `HTTP` and `gRPC`.
        """
        self._plan = plan
        self._server = server
        self._children = children
        self._idle_cpu_s = 0.0
        self._idle_s = 0.0
        self._repeats_left = 0
        self.repeats = 0
        self.samples = Samples()

    @property
    def idle_percent(self) -> float:
        """CPU that the server used while it had nothing to do, in percent of one core."""
        return 100 * self._idle_cpu_s / self._idle_s if self._idle_s else 0.0

    def open(self, bundle: Bundle, threads: int, texts: dict[int, list[Text]]) -> None:
        """Hands every child its work and sees that all of them give the same vectors.

        Raises:
            BenchError: The server's vectors are not the raw engine's: they would not do the same work.
        """
        words = {tokens: [text.text for text in group] for tokens, group in texts.items()}
        self._children["raw"].ask(
            "open",
            artifact=str(bundle.artifact),
            names=bundle.inputs,
            threads=threads,
            cores=os.cpu_count(),
            texts={tokens: [text.ids for text in group] for tokens, group in texts.items()},
        )
        self._children["HTTP"].ask(
            "open", host=HOST, port=self._server.http_port, hidden_size=bundle.hidden_size, texts=words
        )
        self._children["gRPC"].ask(
            "open", target=self._server.grpc_target, model=bundle.model, hidden_size=bundle.hidden_size, texts=words
        )
        for tokens in texts:
            vectors = {name: child.ask("vector", tokens=tokens) for name, child in self._children.items()}
            for name in PROTOCOLS:
                likeness = sum(a * b for a, b in zip(vectors["raw"], vectors[name], strict=True))
                if likeness < _LEAST_COSINE:
                    raise BenchError(
                        f"over {name} a text of {tokens} tokens has another embedding than from the raw engine"
                        f" (cosine {likeness:.5f}): they do not run the same artifact"
                    )

    def run(self, show: Callable[[str], None], *, batch_invariant: bool) -> None:
        """Measures everything, round by round.

        Args:
            show: Told the progress before each measurement.
            batch_invariant: Of the artifact.
        """
        turns = list(self._turns(batch_invariant=batch_invariant))
        whole, done, started = len(turns) * self._plan.rounds, 0, time.perf_counter()
        for number in range(1, self._plan.rounds + 1):
            # On a machine that is never quiet the run becomes half as long again, not four times as long.
            self._repeats_left = len(turns) // 2 if self._plan.rounds > 1 else 0
            for turn in turns:
                passed = time.perf_counter() - started
                # Before anything was measured, the least it can take.
                each = passed / done if done else self._plan.seconds + self._plan.warm_up_s
                show(
                    f"round {number} of {self._plan.rounds}, {turn.tokens} tokens, {turn.subject}:"
                    f" {passed:.0f} s of about {each * whole:.0f} s"
                )
                self.samples.add(turn.tokens, turn.subject, self._least_disturbed(turn))
                done += 1

    def _turns(self, *, batch_invariant: bool) -> Iterator[Turn]:
        """A round, in an order that puts what is compared side by side: the machine's own speed drifts."""
        others = [way for way in ways(batch_invariant=batch_invariant) if way != WIDE]
        pairs = list(zip(OPTIONS, PROTOCOLS, strict=True))
        for tokens in self._plan.lengths:
            for options, protocol in pairs:
                yield self._raw_turn(tokens, WIDE, options)
                yield self._server_turn(tokens, protocol, CONNECTIONS[0])
            for options, protocol in pairs:
                for way in others:
                    yield self._raw_turn(tokens, way, options)
                for connections in CONNECTIONS[1:]:
                    yield self._server_turn(tokens, protocol, connections)

    def _raw_turn(self, tokens: int, way: str, options: str) -> Turn:
        return Turn(self._children["raw"], raw_subject(way, options), tokens, {"way": way, "options": options})

    def _server_turn(self, tokens: int, protocol: str, connections: int) -> Turn:
        subject = server_subject(protocol, connections)
        return Turn(self._children[protocol], subject, tokens, {"connections": connections})

    def _least_disturbed(self, turn: Turn) -> Sample:
        """Measures again while others use the machine; the rule is the same for every subject."""
        best = self._measure(turn)
        for _ in range(_MOST_REPEATS):
            if best.quiet or not self._repeats_left:
                break
            self._repeats_left -= 1
            self.repeats += 1
            best = min(best, self._measure(turn), key=lambda sample: sample.others_percent)
        return best

    def _measure(self, turn: Turn) -> Sample:
        plan = self._plan
        before, all_before, own_before, started = self._server.cpu_s(), *_cpu_s(), time.perf_counter()
        try:
            fields = turn.child.ask(
                "measure",
                limit_s=_ASK_S + plan.warm_up_s + plan.seconds,
                tokens=turn.tokens,
                warm_up_s=plan.warm_up_s,
                seconds=plan.seconds,
                **turn.arguments,
            )
        except BenchError as error:
            raise BenchError(
                f"{turn.subject}, {turn.tokens} tokens: {error}\n\nThe server said last:\n{self._server.last_words()}"
            ) from error
        passed = time.perf_counter() - started
        after, all_after, own_after = self._server.cpu_s(), *_cpu_s()
        sample = Sample(**fields)
        others = max(0.0, (all_after - all_before) - (own_after - own_before))
        sample = replace(sample, others_percent=100 * others / passed / (os.cpu_count() or 1))
        server, engine = after.server - before.server, after.engine - before.engine
        if is_raw(turn.subject):
            self._idle_cpu_s += server + engine
            self._idle_s += passed
            return sample
        each = 1e6 / sample.exchanges
        return replace(sample, server_cpu_us=server * each, engine_cpu_us=engine * each)


def _cpu_s() -> tuple[float, float]:
    """CPU time of the whole machine and of everything that belongs to this run, in seconds."""
    own = os.getpid()
    return machine_cpu_s()[0], sum(cpu_s(pid) for pid in [own, *descendants(own)])
