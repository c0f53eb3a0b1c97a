"""An HTTP port: opens, closes and drains."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from typing import TYPE_CHECKING

from serving.transport.http.protocol import HttpConnection, Limits, Port
from serving.transport.ports import BACKLOG

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from serving.errors import BertserveError
    from serving.settings import Settings
    from serving.transport.http.routing import Routes


class HttpListener:
    """One port and its connections."""

    def __init__(
        self,
        routes: Routes,
        opened: socket.socket,
        settings: Settings,
        *,
        closing: Callable[[], bool],
        record_error: Callable[[BertserveError], None],
    ) -> None:
        """Prepares; nothing is accepted before `start`.

        Args:
            routes: What it serves.
            opened: A listening socket; owned from here on.
            settings: Limits.
            closing: Whether replies should ask clients to close their connections.
            record_error: Told of each error reply.
        """
        self._port = Port(routes, Limits.of(settings), closing, record_error)
        self._keep_alive_s = settings.keep_alive_s
        self._socket = opened
        self._server: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Accepts connections."""
        loop = asyncio.get_running_loop()
        self._tick()
        self._server = await loop.create_server(lambda: HttpConnection(self._port), sock=self._socket, backlog=BACKLOG)

    def close(self) -> None:
        """Accepts no more; closes what is idle; what is under way goes on and is the last of its connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._port.connections):
            connection.end_when_idle()

    async def drained(self) -> None:
        """Waits until the last connection is gone."""
        while self._port.connections:  # noqa: ASYNC110  once in a lifetime
            await asyncio.sleep(0.01)
        if self._clock is not None:
            self._clock.cancel()

    def _tick(self) -> None:
        """Once a second: the Date header, and the connections that have been idle for too long."""
        now = asyncio.get_running_loop().time()
        for connection in list(self._port.connections):
            connection.close_if_idle(now, self._keep_alive_s)
        self._port.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tick)
