"""One lane of an engine process, as the server sees it: its batches, its answers, and whether it hangs."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

from serving.engine.process.wire import FrameReader, Kind, pack_run, unpack_result
from serving.errors import BertserveError, EngineFault, EngineLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.base import Done
    from serving.records import Batch, BatchOutput

log = logging.getLogger("bertserve.engine")


class RemoteLane(asyncio.Protocol):
    """One lane's socket: batches go out one after another, and their answers come back in that order.

    `patience_s` says how long the lane may work on a batch, in seconds, before it is suspected to hang; `ended` is
    called when the socket has closed, before the lane's requests fail.
    """

    def __init__(self, patience_s: Callable[[Batch], float], ended: Callable[[], None]) -> None:
        self._patience_s = patience_s
        self._ended = ended
        self._frames = FrameReader()
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._pending: deque[tuple[int, Batch, Done]] = deque()
        self._since = 0.0
        self._suspect = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.WriteTransport", transport)

    @property
    def busy(self) -> bool:
        return bool(self._pending)

    def submit(self, batch: Batch, done: Done) -> None:
        self._number += 1
        if not self._pending:
            self._since = self._loop.time()
        self._pending.append((self._number, batch, done))
        self.transport.write(pack_run(self._number, batch))

    def hangs(self) -> bool:
        """Whether the batch that the lane works on was overdue at the last look and still is.

        Once is not enough: this loop may have been stalled itself, and the answer may lie in the socket.
        """
        overdue = 0
        if self._pending:
            number, batch, _ = self._pending[0]
            if self._loop.time() - self._since >= self._patience_s(batch):
                overdue = number
        suspect, self._suspect = self._suspect, overdue
        return overdue > 0 and overdue == suspect

    def data_received(self, data: bytes) -> None:
        for kind, number, payload in self._frames.feed(data):
            if self._pending and number == self._pending[0][0]:
                self._finish(_result(kind, payload))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  how it ended does not matter
        self._ended()
        while self._pending:
            self._finish(EngineLost("the engine ended while it worked on this request; try again", retry_after_s=1))

    def _finish(self, outcome: BatchOutput | BertserveError) -> None:
        _, _, done = self._pending.popleft()
        if self._pending:
            self._since = self._loop.time()
        done(outcome)


def _result(kind: Kind, payload: bytes) -> BatchOutput | BertserveError:
    if kind is Kind.RESULT:
        return unpack_result(payload)
    log.error("engine fault: %s", payload.decode("utf-8", "replace"))
    return EngineFault("the engine failed on this input")
