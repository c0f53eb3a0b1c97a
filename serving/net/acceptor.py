"""A listening socket and the connections it accepts, over TLS where that is switched on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serving.net.ports import BACKLOG

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from serving.security.tls import Tls


class Acceptor:
    """One port; it owns the listening socket, and accepts nothing before `start`."""

    def __init__(
        self, opened: socket.socket, connection: Callable[[], asyncio.Protocol], tls: Tls | None, protocol: str
    ) -> None:
        self._socket = opened
        self._connection = connection
        self._tls = tls
        self._protocol = protocol
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        self._server = await self._serve(self._socket, self._context())

    async def renew(self) -> None:
        """Reads the certificates again, for new connections; those that are open go on.

        A used context cannot forget an authority or a session, so another server with a new context takes over the
        port.

        Raises:
            CredentialsError: They cannot be used; nothing changes.
        """
        before = self._server
        if before is None:
            return
        context = self._context()
        self._socket = self._socket.dup()
        self._server = await self._serve(self._socket, context)
        before.close()

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _context(self) -> ssl.SSLContext | None:
        return None if self._tls is None else self._tls.context(self._protocol)

    async def _serve(self, opened: socket.socket, context: ssl.SSLContext | None) -> asyncio.Server:
        tls = self._tls
        return await asyncio.get_running_loop().create_server(
            self._connection,
            sock=opened,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=None if tls is None else tls.handshake_s,
            ssl_shutdown_timeout=None if tls is None else tls.goodbye_s,
        )
