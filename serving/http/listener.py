"""An HTTP port: opens, closes and drains."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from typing import TYPE_CHECKING

from serving.errors import MalformedRequest, NotReady
from serving.http.connection import HttpConnection, HttpPort, Limits
from serving.http.exchange import error_reply
from serving.net.acceptor import Acceptor
from serving.net.requests import request_id
from serving.unawaited import guarded

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

    from serving.errors import BertserveError
    from serving.http.app import App
    from serving.net.acceptor import Closable, Places
    from serving.net.buffers import BufferBudget
    from serving.security.tls import Tls
    from serving.settings import Settings

TICK_S = 1.0

_ON_THE_WAY_S = 0.25
"""How long requests may have been on their way when the port closes; connections without one are closed then. HTTP/1.1
has no means to tell a client of that, so one that asks at that moment loses its request (RFC 9112, 9.5): the lame duck
is there for all clients to be told before."""


def _last_reply(status: bytes, error: BertserveError, identity: str = "") -> bytes:
    """An error as the bytes of a reply, behind which the connection ends."""
    reply = error_reply("", error, identity)
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
    return head % (status, reply.content_type, len(reply.body), reply.head, reply.body)


_REFUSAL = _last_reply(
    b"503 Service Unavailable", NotReady("all connections of the server are taken; try again", retry_after_s=1)
)
"""What a connection is told for which there is no place."""

_PLAIN = "a plain HTTP request was sent to a port that speaks TLS; use https://"


class HttpListener:
    """One port and its connections."""

    def __init__(
        self,
        app: App,
        opened: socket.socket,
        settings: Settings,
        *,
        budget: BufferBudget,
        tls: Tls | None = None,
        places: Places | None = None,
        hosts: frozenset[str] | None = None,
    ) -> None:
        """Prepares; nothing is accepted before `start`.

        Args:
            app: What it serves.
            opened: A listening socket; owned from here on.
            settings: Limits.
            budget: What its connections may hold, together with those of other ports.
            tls: What connections are secured with.
            places: How many connections there may be.
            hosts: Names that it goes by, as `known_hosts` has them.
        """
        self._port = HttpPort(app, Limits.of(settings), "http" if tls is None else "https", budget, hosts)
        self._record_error = app.api.record_error
        self._keep_alive_s = settings.keep_alive_s
        self._acceptor = Acceptor(
            opened, self._open, tls, "http/1.1", places=places, refusal=_REFUSAL, plain=self._refuse_plain
        )
        if places is not None:
            places.follow(self._connections)
        self._clock: asyncio.TimerHandle | None = None

    def _refuse_plain(self) -> bytes:
        """Records a client that speaks no TLS; returns what it is told."""
        error, identity = MalformedRequest(_PLAIN), request_id(None)
        self._record_error(error, identity, "http", "")
        return _last_reply(b"400 Bad Request", error, identity)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._acceptor.address

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._port.connections)

    async def start(self) -> None:
        """Accepts connections."""
        self._tick()
        await self._acceptor.start()

    async def renew(self) -> None:
        """Other certificates, as `Acceptor.renew`."""
        await self._acceptor.renew()

    def close(self) -> None:
        """Accepts no more. What is under way or on its way is answered as the last of its connection."""
        self._acceptor.close()
        asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self._close_idle)

    def _close_idle(self) -> None:
        """Again and again: some connections are still being opened, or have sent what is yet to be read."""
        for connection in list(self._port.connections):
            guarded(connection.abort, connection.end_when_idle)
        if self._port.connections or self._acceptor.opening:
            asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self._close_idle)

    def refuse_uploads(self, error: BertserveError) -> None:
        """Those that are still on their way."""
        for connection in list(self._port.connections):
            connection.refuse_upload(error)

    async def drained(self) -> None:
        """Waits until the last connection is gone."""
        while self._port.connections or self._acceptor.opening:  # noqa: ASYNC110  once in a lifetime
            await asyncio.sleep(0.01)
        if self._clock is not None:
            self._clock.cancel()

    def _connections(self) -> Iterable[Closable]:
        return self._port.connections

    def _open(self) -> asyncio.Protocol:
        return HttpConnection(self._port)

    def _tick(self) -> None:
        """Once a second: the Date header, and the connections that have been idle for too long."""
        loop = asyncio.get_running_loop()
        self._clock = loop.call_later(TICK_S, self._tick)
        self._port.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        now = loop.time()
        for connection in list(self._port.connections):
            guarded(connection.abort, connection.close_if_idle, now, self._keep_alive_s)
