"""What one connection may take of a turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from bertserve.serving.http.app import App
from bertserve.serving.http.connection import HttpConnection
from bertserve.serving.http.port import HttpPort
from bertserve.serving.net.buffers import BufferBudget
from bertserve.serving.settings import Settings
from tests.support.grpc_peer import Wire
from tests.support.http_app import ready_api

KIB = 1 << 10
HEAD = b"POST /nothing HTTP/1.1\r\nHost: test\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


class Taken(Wire):
    """A transport whose client takes everything at once."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever kept."""


@pytest.mark.parametrize(
    ("sent", "least", "most"),
    [
        (CHUNKED + b"1000\r\n%b\r\n" % bytes(4096) * 50, 32 * KIB, 34 * KIB),
        (CHUNKED + b"1\r\na\r\n" * 20_000, 2 * KIB, 6 * KIB),
        (b"GET /nothing HTTP/1.1\r\nHost: test\r\n\r\n" * 2000, 2 * KIB, 2 * KIB),
        (HEAD + b"Content-Length: 200000\r\n\r\n" + bytes(150_000), 150_000, 151_000),
    ],
    ids=["chunks", "small chunks", "requests ahead", "a length"],
)
def test_a_turn_parses_so_much(sent: bytes, least: int, most: int) -> None:
    """Less where it is the framing of small chunks, no further than a request that waits, and a plain body at once."""

    async def parsed() -> int:
        settings = Settings.load([], {})
        port = HttpPort(App(ready_api(settings), [], documented=False), settings, BufferBudget.of(settings))
        connection = HttpConnection(port)
        connection.connection_made(Taken())
        connection.data_received(sent)
        left = len(connection._rest)
        connection.connection_lost(None)
        return len(sent) - left

    assert least <= asyncio.run(parsed()) <= most
