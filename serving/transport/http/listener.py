"""An HTTP port: opens, closes and drains."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from typing import TYPE_CHECKING

from uvicorn.config import Config
from uvicorn.server import ServerState

from serving.transport.http.protocol import LimitedProtocol, Limits
from serving.transport.ports import BACKLOG

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from serving.errors import BertserveError
    from serving.settings import Settings


class HttpListener:
    """One port and its connections."""

    def __init__(
        self,
        app: ASGIApp,
        opened: socket.socket,
        settings: Settings,
        *,
        closing: Callable[[], bool],
        record_error: Callable[[BertserveError], None],
    ) -> None:
        """Prepares; nothing is accepted before `start`.

        Args:
            app: The ASGI application.
            opened: A listening socket; owned from here on.
            settings: Limits.
            closing: Whether replies should ask clients to close their connections.
            record_error: Told of each request refused before the application sees it.
        """
        self._config = Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            ws="none",
        )
        self._limits = Limits.of(settings)
        self._keep_alive_s = settings.keep_alive_s
        self._closing = closing
        self._record_error = record_error
        self._socket = opened
        self._state = ServerState()
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
        self._config.load()
        self._tick()
        self._server = await loop.create_server(self._connection, sock=self._socket, backlog=BACKLOG)

    def close(self) -> None:
        """Accepts no more; closes what is idle; what is under way goes on and is the last of its connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()

    async def drained(self) -> None:
        """Waits until the last connection is gone."""
        while self._state.connections:  # noqa: ASYNC110  once in a lifetime, and uvicorn's set has no event
            await asyncio.sleep(0.01)
        if self._clock is not None:
            self._clock.cancel()

    def _connection(self) -> LimitedProtocol:
        return LimitedProtocol(
            config=self._config,
            server_state=self._state,
            app_state={},
            _loop=asyncio.get_running_loop(),
            limits=self._limits,
            closing=self._closing,
            record_error=self._record_error,
        )

    def _tick(self) -> None:
        """Once a second: the Date header, and the connections that have been idle for too long."""
        now = asyncio.get_running_loop().time()
        for connection in list(self._state.connections):
            if isinstance(connection, LimitedProtocol):
                connection.close_if_idle(now, self._keep_alive_s)
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tick)
