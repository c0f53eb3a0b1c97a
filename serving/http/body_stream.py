"""The stream of a request body between the connection that receives it and the endpoint that reads it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.errors import BertserveError

WINDOW_BYTES = 262_144
"""Bytes of a stream that may be buffered or in processing. At the limit the connection stops reading (backpressure)."""


class ReceivedBody:
    """A body that is read while it arrives.

    Attributes:
        ended: Whether the whole body has arrived.
        held: Bytes that have arrived and are not processed. The next `read` marks those of the last one as processed.
        total: Bytes that have arrived.
        taken: Bytes that were read.
    """

    def __init__(self, on_room: Callable[[], None]) -> None:
        """Calls `on_room` when a full stream has space again."""
        self._on_room = on_room
        self._pieces: deque[bytes] = deque()
        self._error: BertserveError | None = None
        self._arrived = asyncio.Event()
        self.ended = False
        self.held = self.total = self.taken = 0

    @property
    def full(self) -> bool:
        return self.held >= WINDOW_BYTES

    def feed(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.held += len(piece)
        self.total += len(piece)
        self._arrived.set()

    def end(self) -> None:
        self.ended = True
        self._arrived.set()

    def fail(self, error: BertserveError) -> None:
        self._error = error
        self._arrived.set()

    async def read(self) -> bytes:
        """All buffered bytes; empty at the end. Raises the error of `fail` if there is one."""
        was_full, self.held = self.full, sum(map(len, self._pieces))
        if was_full and not self.full:
            self._on_room()
        while not (self._pieces or self.ended or self._error):
            self._arrived.clear()
            await self._arrived.wait()
        if self._error is not None:
            raise self._error
        data = b"".join(self._pieces)
        self.taken += len(data)
        self._pieces.clear()
        return data
