"""A port's connections before they are open."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest
import uvloop

from bertserve.serving.net.connection_limiter import ConnectionLimiter
from bertserve.serving.net.listener import Listener
from bertserve.serving.security.tls import Tls
from tests.support.certificates import Certificates

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TURNS = 20
"""Turns of the event loop, in which the handshake begins."""

RESETS = struct.pack("ii", 1, 0)
"""SO_LINGER with which a socket that is closed resets its connection."""


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETS)
    client.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_a_client_that_leaves_during_the_handshake_is_not_told_as_idle(
    tmp_path: Path, leave: Callable[[socket.socket], None]
) -> None:
    """From the moment on in which its descriptor is closed: in a front, nothing has that descriptor any more."""
    certificates = Certificates(tmp_path)
    tls = Tls(certificates.cert, certificates.key, None, 5, 5)
    limiter = ConnectionLimiter(1, clock=lambda: time.monotonic() + 1)

    async def leaves() -> None:
        listener = Listener(None, asyncio.Protocol, tls, "http/1.1", ports=[], limiter=limiter)
        await listener.start()
        with socket.create_server(("127.0.0.1", 0)) as listening:
            client = socket.create_connection(listening.getsockname())
            opened, _ = listening.accept()
        opened.setblocking(False)
        released = asyncio.Event()
        listener.adopt(opened, released.set)
        client.send(b"\x16\x03\x01")
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert limiter.idle()
        leave(client)
        while not listener.is_empty:
            assert all(one.descriptor >= 0 for _, one in limiter.idle())
            await asyncio.sleep(0)
        assert released.is_set()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(leaves())
