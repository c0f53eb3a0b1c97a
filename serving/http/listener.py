"""An HTTP port: opens, closes and drains."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serving.errors import MalformedRequest, NotReady
from serving.http.connection import HttpConnection
from serving.http.exchange import error_reply
from serving.http.port import HttpPort
from serving.net.listener import Listener
from serving.net.requests import request_id

if TYPE_CHECKING:
    import socket

    from serving.errors import BertserveError
    from serving.http.app import App
    from serving.net.buffers import BufferBudget
    from serving.net.connection_limiter import ConnectionLimiter
    from serving.security.tls import Tls
    from serving.settings import Settings

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


class HttpListener(Listener):
    def __init__(
        self,
        app: App,
        opened: socket.socket,
        settings: Settings,
        *,
        budget: BufferBudget,
        tls: Tls | None = None,
        limiter: ConnectionLimiter | None = None,
        hosts: frozenset[str] | None = None,
    ) -> None:
        """As `Listener`; `hosts` are the names that it goes by, as `known_hosts` has them."""
        self._port: HttpPort[HttpConnection] = HttpPort(
            app, settings, "http" if tls is None else "https", budget, hosts
        )
        self._record_error = app.context.record_error
        super().__init__(
            *(opened, self._open_connection, tls, "http/1.1"),
            ports=[self._port],
            limiter=limiter,
            refusal=_REFUSAL,
            plain=self._refuse_plain,
        )

    def _refuse_plain(self) -> bytes:
        """Records a client that speaks no TLS; returns what it is told."""
        error, identity = MalformedRequest(_PLAIN), request_id(None)
        self._record_error(error, identity, "http", "")
        return _last_reply(b"400 Bad Request", error, identity)

    def close(self) -> None:
        """Accepts no more. What is under way or on its way is answered as the last of its connection."""
        super().close()
        asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self._drain)

    def _drain(self) -> None:
        """Again and again: some connections are still being opened, or have sent what is yet to be read."""
        self._port.drain()
        if not self.is_empty:
            asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self._drain)

    def _open_connection(self) -> asyncio.Protocol:
        return HttpConnection(self._port)

    def refuse_uploads(self, error: BertserveError) -> None:
        for connection in list(self._port.connections):
            connection.refuse_upload(error)
