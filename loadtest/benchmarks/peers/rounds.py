"""The rounds of the comparison: everybody in turns, length by length."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from loadtest.benchmarks.peers.subjects import MANY, ONE, ORT, RAW
from loadtest.benchmarks.turns import Turn, idle_percent, measure_round, send_signal
from loadtest.errors import BenchError
from loadtest.generator.client import GRPC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadtest.benchmarks.peers.servers import Peer
    from loadtest.benchmarks.peers.subjects import Subject
    from loadtest.generator.child import Child
    from loadtest.generator.workload import Bundle, Text

_ASK_S = 120.0
_COMPARED_TEXTS = 8
_LEAST_COSINE = {"fp32": 0.9999, "INT8": 0.95}
_LEAST_COSINE_OF_ONE_ARTIFACT = 0.9999
_FROZEN_FROM_PERCENT = 1.0
_LONG_TOKENS, _LONGER = 128, 4.0
"""A server that answers 32 long texts at once takes a second or two: a window has to hold some."""


class Rounds:
    """The measurements over servers and measuring processes that are up.

    Attributes:
        likeness: The least cosine of each subject's vectors to those of the fp32 model.
        idle_percent: CPU that each server used while nobody asked, in percent of one core.
    """

    def __init__(self, subjects: Sequence[Subject], peers: dict[str, Peer], children: dict[str, Child]) -> None:
        """Takes what is running.

        Args:
            subjects: Whom to compare.
            peers: The servers, ready, by name.
            children: `fp32` and `raw`, each a `loadtest.benchmarks.raw_engine`, and `client`.
        """
        self._subjects = subjects
        self._peers = peers
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
                peer = self._peers[subject.server]
                self._children["client"].ask(
                    "open",
                    way=subject.key(connections),
                    form=subject.form,
                    port=peer.grpc_port if subject.form == GRPC else peer.http_port,
                    endpoint=subject.endpoint(connections),
                    hidden_size=ort.hidden_size,
                    texts=words,
                )
        for tokens in texts:
            self._compare(tokens)
        self._find_restless()

    def run(self, tokens: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
        """One round at one length: samples by subject, as JSON values."""
        return measure_round(list(self._turns(tokens, seconds)), say)

    def _turns(self, tokens: int, seconds: float) -> Iterator[Turn]:
        for connections in (ONE, MANY):
            each_s = seconds * (_LONGER if connections == MANY and tokens >= _LONG_TOKENS else 1.0)
            for subject in self._subjects:
                if subject is RAW:
                    arguments = {"tokens": tokens, "options": "served", "way": subject.endpoint(connections)}
                    yield Turn(subject.key(connections), self._children["raw"], arguments, each_s)
                    continue
                way = subject.key(connections)
                arguments = {"tokens": tokens, "connections": connections, "way": way}
                server, is_frozen = self._peers[subject.server].process, subject.server in self._frozen
                yield Turn(way, self._children["client"], arguments, each_s, server, is_frozen)

    def _compare(self, tokens: int) -> None:
        exact = self._children["fp32"].ask("vectors", tokens=tokens, count=_COMPARED_TEXTS)
        same = self._children["raw"].ask("vectors", tokens=tokens, count=_COMPARED_TEXTS)
        self._note(RAW, tokens, same, exact)
        for subject in self._subjects:
            for connections in (ONE, MANY) if subject is not RAW else ():
                found = self._children["client"].ask(
                    "vectors",
                    _ASK_S,
                    way=subject.key(connections),
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
        self.idle_percent = idle_percent({name: peer.process for name, peer in self._peers.items()})
        for name, percent in self.idle_percent.items():
            if percent >= _FROZEN_FROM_PERCENT:
                self._frozen.add(name)
                send_signal(self._peers[name].process, signal.SIGSTOP)


def _least_cosine(found: list[list[float]], expected: list[list[float]]) -> float:
    return min(_cosine(a, b) for a, b in zip(found, expected, strict=True))


def _cosine(one: list[float], other: list[float]) -> float:
    """Of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))
