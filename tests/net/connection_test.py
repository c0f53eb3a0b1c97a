"""What a connection does whatever is spoken on it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.net.connection import Connection, Port
from bertserve.serving.net.lingering_close import TAKEN_BYTES
from bertserve.serving.settings import Settings
from tests.support.grpc_peer import Wire
from tests.support.virtual_time import virtually

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 10


class Words(Connection["Port[Words]"]):
    """Takes words of four bytes, two in a turn."""

    _PIECE_BYTES = 4

    def __init__(self, port: Port[Words]) -> None:
        super().__init__(port)
        self.words: list[bytes] = []
        self.connection_made(Wire())

    @property
    def wire(self) -> Wire:
        assert isinstance(self._transport, Wire)
        return self._transport

    def receive(self, data: bytes) -> None:
        self.words.append(data)

    def read_on(self) -> None:
        data, self._rest = bytes(self._rest[:8]), self._rest[8:]
        self.words += [data[at : at + 4] for at in range(0, len(data), 4)]
        if self._rest:
            self._pause()
            self._read_on_next_turn()
        elif self._paused:
            self._resume()


def opened() -> Words:
    settings = Settings.load([], {})
    port: Port[Words] = Port(settings, BufferBudget.of(settings))
    port.body_timeout_s = LIMIT_S
    return Words(port)


def ticks(connection: Words, taken: int) -> Iterator[int]:
    """Seconds that pass while a client takes so many bytes in each, until the connection is over."""
    for second in range(1, 100):
        connection.wire.buffered = max(0, connection.wire.buffered - taken)
        connection.tick(1.0)
        if connection.wire.closed:
            return
        yield second


@virtually
async def test_what_is_received_is_read_in_turns() -> None:
    """What comes meanwhile waits behind it, and what comes later is read at once."""
    connection = opened()
    connection.data_received(b"one.two.tri.four")
    connection.data_received(b"five")
    assert (connection.words, len(connection._rest)) == ([b"one.", b"two."], 12)
    for _ in range(3):
        await asyncio.sleep(0)
    connection.data_received(b"six.")
    assert connection.words == [b"one.", b"two.", b"tri.", b"four", b"five", b"six."]


@virtually
async def test_a_client_that_takes_nothing_is_gone() -> None:
    """Not before its time is over, and at the first tick after that; one that takes some has all the time it needs."""
    gone, slow, back = opened(), opened(), opened()
    for connection in (gone, slow, back):
        connection.wire.buffered = 50 * TAKEN_BYTES
        connection.pause_writing()
    assert list(ticks(gone, 0))[-1] == LIMIT_S
    assert list(ticks(slow, TAKEN_BYTES // 5))[-1] == 99
    assert list(ticks(back, TAKEN_BYTES // 20))[-1] == LIMIT_S
    back = opened()
    back.pause_writing()
    back.resume_writing()
    assert list(ticks(back, 0))[-1] == 99


@virtually
async def test_one_that_lingers_is_idle_once_its_client_has_everything() -> None:
    """So that another one may have its place."""
    connection = opened()
    connection.wire.buffered = 1
    connection.linger(5.0)
    assert connection.idle_since() is None
    connection.wire.buffered = 0
    assert connection.idle_since() is not None
    connection.connection_lost(None)
