"""The core's side of a front."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from array import array
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import uvloop

from serving.fronts.core import Core, FrontLink
from serving.fronts.wire import pack_run
from serving.records import EncodedText, ModelIndex

MIB = 1 << 20
TURNS = 100
"""Turns of the event loop, of which a few are enough to read a frame."""

MANY = 100
"""Answers of a MiB each: more than may wait, and than a socket holds."""


class AtOnce:
    """A dispatcher that answers at once, each text with a row of one MiB."""

    def __init__(self) -> None:
        self.costs = [None]
        self.admission = SimpleNamespace(permit=lambda *_: SimpleNamespace(release=lambda: None))
        self.started = 0
        self.rows: list[weakref.ref[np.ndarray]] = []

    def start(self, _: object, texts: list[EncodedText], answered: Any) -> Any:
        self.started += 1
        answered.set_result(None)
        items = [SimpleNamespace(text=text) for text in texts]
        rows = [(np.zeros(MIB // 4, np.float32),)] * len(texts)
        self.rows.append(weakref.ref(rows[0][0]))
        return SimpleNamespace(
            future=answered,
            model=0,
            items=items,
            result=lambda: rows,
            queue_us=0.0,
            compute_us=0.0,
            submitted=0.0,
            cached=False,
        )

    def hold(self) -> None: ...

    def release(self) -> None: ...

    def end(self, _: object) -> None: ...


async def turns(count: int = TURNS) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def front_that_does_not_read() -> None:
    loop, dispatcher = asyncio.get_running_loop(), AtOnce()
    core = SimpleNamespace(
        dispatcher=dispatcher, cache=None, padded=set(), is_present=lambda _: True, tell_crowded=lambda: None
    )
    ours, front = socket.socketpair()
    ours.setblocking(False)
    transport, _ = await loop.create_connection(lambda: FrontLink(cast("Core", core)), sock=ours)
    with front:
        for number in range(MANY):
            front.sendall(pack_run(number, ModelIndex(0), [EncodedText(array("i", [1]))], 0.0, None, 1))
            await turns()
        held = dispatcher.started
        assert 1 < held < MANY // 2
        front.setblocking(False)
        received = bytearray()
        while len(received) < MANY * MIB:
            received += await loop.sock_recv(front, MIB)
        assert dispatcher.started == MANY
        assert not any(row() is not None for row in dispatcher.rows[:-1])
        transport.close()
        await turns()


def test_a_front_that_takes_no_answers_starts_no_more_requests() -> None:
    """What it has sent is answered once it takes them, and freed without the garbage collector."""
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(front_that_does_not_read())
    finally:
        gc.enable()
