"""The rounds of the comparison: everybody in turns, length by length."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from loadtest.benchmarks.peers.client import GRPC
from loadtest.benchmarks.peers.subjects import MANY, ONE, ORT, RAW
from loadtest.benchmarks.processes import cpu_s, descendants, machine_cpu_s
from loadtest.errors import BenchError
from loadtest.report.sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from loadtest.benchmarks.peers.servers import Place
    from loadtest.benchmarks.peers.store import Round
    from loadtest.benchmarks.peers.subjects import Subject
    from loadtest.generator.child import Child
    from loadtest.generator.workload import Bundle, Text

_LONGEST_WARM_UP_S = 0.5
_ASK_S = 120.0
_COMPARED_TEXTS = 8
_LEAST_COSINE = {"fp32": 0.9999, "INT8": 0.95}
_LEAST_COSINE_OF_ONE_ARTIFACT = 0.9999
_SETTLE_S = 2.0
_FROZEN_FROM_PERCENT = 1.0
_MOST_REPEATS = 2
_LONG_TOKENS, _LONGER = 128, 4.0
"""A server that answers 32 long texts at once takes a second or two: a window has to hold some."""


class Rounds:
    """The measurements over servers and measuring processes that are up.

    Attributes:
        likeness: The least cosine of each subject's vectors to those of the fp32 model.
        idle_percent: CPU that each server used while nobody asked, in percent of one core.
    """

    def __init__(self, subjects: Sequence[Subject], places: dict[str, Place], children: dict[str, Child]) -> None:
        """Takes what is running.

        Args:
            subjects: Whom to compare.
            places: The servers, ready, by name.
            children: `fp32` and `raw`, each a `loadtest.benchmarks.raw_engine`, and `client`.
        """
        self._subjects = subjects
        self._places = places
        self._children = children
        self._frozen: set[str] = set()
        self.likeness: dict[str, float] = {}
        self.idle_percent: dict[str, float] = {}

    def open(self, fp32: Bundle, ort: Bundle, texts: dict[int, list[Text]], threads: int) -> None:
        """Hands every child its work, compares all vectors, and freezes the servers that do not rest.

        Raises:
            BenchError: A server's vectors are not the model's.
        """
        for name, bundle in (("fp32", fp32), ("raw", ort)):
            self._children[name].ask(
                "open",
                artifact=str(bundle.artifact),
                names=bundle.inputs,
                threads=threads,
                cores=os.cpu_count(),
                texts={tokens: [text.ids for text in group] for tokens, group in texts.items()},
            )
        words = {tokens: [text.text for text in group] for tokens, group in texts.items()}
        for subject in self._subjects:
            for connections in (ONE, MANY) if subject is not RAW else ():
                place = self._places[subject.server]
                self._children["client"].ask(
                    "open",
                    way=f"{subject.name} {connections}",
                    form=subject.form,
                    port=place.grpc_port if subject.form == GRPC else place.http_port,
                    place=subject.place(connections),
                    hidden_size=ort.hidden_size,
                    texts=words,
                )
        for tokens in texts:
            self._compare(tokens)
        self._find_restless()

    def run(self, tokens: int, seconds: float, show: Callable[[str], None]) -> Round:
        """One round at one length."""
        turns = [(subject, connections) for connections in (ONE, MANY) for subject in self._subjects]
        samples: Round = {}
        for subject, connections in turns:
            show(f"{tokens} tokens, {connections} connections, {subject.name}")
            samples[subject.name, connections] = self._least_disturbed(subject, connections, tokens, seconds)
        return samples

    def _compare(self, tokens: int) -> None:
        exact = self._children["fp32"].ask("vectors", tokens=tokens, count=_COMPARED_TEXTS)
        same = self._children["raw"].ask("vectors", tokens=tokens, count=_COMPARED_TEXTS)
        self._note(RAW, tokens, same, exact)
        for subject in self._subjects:
            for connections in (ONE, MANY) if subject is not RAW else ():
                found = self._children["client"].ask(
                    "vectors",
                    _ASK_S,
                    way=f"{subject.name} {connections}",
                    tokens=tokens,
                    count=_COMPARED_TEXTS,
                )
                self._note(subject, tokens, found, exact)
                # infinity quantised the same model for itself; everybody else runs the bundle's file.
                alike = _least_cosine(found, same)
                if subject.engine == ORT and subject.system != "infinity" and alike < _LEAST_COSINE_OF_ONE_ARTIFACT:
                    raise BenchError(f"{subject.name}: another artifact than the raw engine's (cosine {alike:.5f})")

    def _note(self, subject: Subject, tokens: int, found: list[list[float]], exact: list[list[float]]) -> None:
        alike = _least_cosine(found, exact)
        if alike < next(least for precision, least in _LEAST_COSINE.items() if precision in subject.engine):
            raise BenchError(f"{subject.name}: a text of {tokens} tokens has a wrong embedding (cosine {alike:.4f})")
        self.likeness[subject.name] = min(alike, self.likeness.get(subject.name, 1.0))

    def _find_restless(self) -> None:
        time.sleep(_SETTLE_S)  # pools of threads spin for a while after their last work
        before, started = self._server_cpu_s(), time.perf_counter()
        time.sleep(_SETTLE_S)
        passed = time.perf_counter() - started
        after = self._server_cpu_s()
        self.idle_percent = {name: 100 * (after[name] - before[name]) / passed for name in after}
        for name, percent in self.idle_percent.items():
            if percent >= _FROZEN_FROM_PERCENT:
                self._frozen.add(name)
                self._signal(name, signal.SIGSTOP)

    def _server_cpu_s(self) -> dict[str, float]:
        usages = {name: place.server.cpu_s() for name, place in self._places.items()}
        return {name: usage.server + usage.engine for name, usage in usages.items()}

    def _signal(self, name: str, number: signal.Signals) -> None:
        for pid in self._places[name].server.pids():
            os.kill(pid, number)

    def _least_disturbed(self, subject: Subject, connections: int, tokens: int, seconds: float) -> Sample:
        """Measures again while others use the machine; the rule is the same for every subject."""
        best = self._measure(subject, connections, tokens, seconds)
        for _ in range(_MOST_REPEATS):
            if best.quiet:
                break
            again = self._measure(subject, connections, tokens, seconds)
            best = min(best, again, key=lambda sample: sample.others_percent)
        return best

    def _measure(self, subject: Subject, connections: int, tokens: int, seconds: float) -> Sample:
        if connections == MANY and tokens >= _LONG_TOKENS:
            seconds *= _LONGER
        arguments = {"tokens": tokens, "seconds": seconds, "warm_up_s": min(_LONGEST_WARM_UP_S, seconds / 4)}
        if subject is RAW:
            return self._watched("raw", options="served", way=subject.place(connections), **arguments)
        server = self._places[subject.server].server
        way = f"{subject.name} {connections}"
        if subject.server in self._frozen:
            self._signal(subject.server, signal.SIGCONT)
        try:
            before = server.cpu_s()
            sample = self._watched("client", way=way, connections=connections, **arguments)
            after = server.cpu_s()
        except BenchError as error:
            raise BenchError(f"{way}: {error}\n\nThe server said last:\n{server.last_words()}") from error
        finally:
            if subject.server in self._frozen:
                self._signal(subject.server, signal.SIGSTOP)
        each = 1e6 / sample.exchanges
        return replace(
            sample,
            server_cpu_us=(after.server - before.server) * each,
            engine_cpu_us=(after.engine - before.engine) * each,
        )

    def _watched(self, child: str, **arguments: object) -> Sample:
        all_before, own_before, started = *_cpu_s(), time.perf_counter()
        fields = self._children[child].ask("measure", _ASK_S, **arguments)
        all_after, own_after, passed = *_cpu_s(), time.perf_counter() - started
        others = max(0.0, (all_after - all_before) - (own_after - own_before))
        return replace(Sample(**fields), others_percent=100 * others / passed / (os.cpu_count() or 1))


def _least_cosine(found: list[list[float]], expected: list[list[float]]) -> float:
    return min(_cosine(a, b) for a, b in zip(found, expected, strict=True))


def _cosine(one: list[float], other: list[float]) -> float:
    """Of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def _cpu_s() -> tuple[float, float]:
    """CPU time of the whole machine and of everything that belongs to this run, in seconds."""
    own = os.getpid()
    return machine_cpu_s()[0], sum(cpu_s(pid) for pid in [own, *descendants(own)])
