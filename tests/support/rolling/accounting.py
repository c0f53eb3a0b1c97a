"""A generator that accounts for every request: each has a unique id, and its reply must carry it.

An answer must also equal the first answer to the same text. So neither a misrouted nor an invented reply goes unseen.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import numpy as np

from loadtest.generator.grpc_messages import fields_in
from loadtest.generator.messages import Target, messages
from loadtest.generator.open_loop import Generator, Job, Request, main

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from loadtest.generator.wire import Reply

_MIN_COSINE = 0.999
"""Minimum cosine between answers to a text alone and in any batch, as promised."""

_RAW_OUTPUT = 6
"""The field of `ModelInferResponse` that holds the vector."""


def identity(protocol: str, index: int, number: int) -> str:
    """Id of a generator's request. All ids of a protocol have one length, to fit into a prepared message."""
    return f"rolling-{protocol}-{index:02d}-{number:08d}"


class AccountingGenerator(Generator):
    """Numbers its requests."""

    def __init__(self, job: Job, tell: Callable[[bytes], None]) -> None:
        super().__init__(job, tell)
        target = Target.read(job.target)
        self._protocol, self._index = target.protocol, job.index
        blank = identity(target.protocol, job.index, 0)
        # The parts of the message before and after the id, for each text of each kind.
        self._halves = [
            [message.split(blank.encode()) for message in messages(target, task, texts, blank)]
            for task, _, texts in job.kinds
        ]
        self._numbers = itertools.count()
        self._asked: dict[Request, tuple[bytes, tuple[int, int]]] = {}
        self._known: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def _message(self, request: Request) -> bytes:
        number, halves = next(self._numbers), self._halves[request.kind]
        name = identity(self._protocol, self._index, number).encode()
        which = number % len(halves)
        self._asked[request] = (name, (request.kind, which))
        return name.join(halves[which])

    def _judge(self, request: Request, reply: Reply) -> str:
        name, key = self._asked.pop(request)
        if reply.fault:
            return reply.fault
        if self._protocol == "http":
            named, answer = b"\r\nx-request-id: " + name + b"\r\n" in reply.head, reply.body
        else:
            named, answer = reply.body.count(name) == 1, reply.body.replace(name, b"")
        if not named:
            return "the reply bears another request's id"
        known_answer, known_body = self._known.setdefault(key, (answer, reply.body))
        if answer == known_answer:
            return ""
        ours, known = self._vector(reply.body), self._vector(known_body)
        if ours.shape != known.shape:
            return "the answer is no vector of this model"
        cosine = float(ours @ known / (np.linalg.norm(ours) * np.linalg.norm(known)))
        return "" if cosine >= _MIN_COSINE else "the answer is another text's"

    def _vector(self, body: bytes) -> NDArray[np.float64]:
        if self._protocol == "http":
            return np.asarray(json.loads(body)[0], np.float64)
        raw = dict(fields_in(body)).get(_RAW_OUTPUT, b"")
        return np.frombuffer(raw if isinstance(raw, bytes) else b"", "<f4").astype(np.float64)


if __name__ == "__main__":
    main(AccountingGenerator)
