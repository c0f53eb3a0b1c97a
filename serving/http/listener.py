"""An HTTP port: opens, closes and drains."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from bertserve.serving.errors import MalformedRequest, NotReady
from bertserve.serving.http.connection import HttpConnection
from bertserve.serving.http.faults import OWN
from bertserve.serving.http.port import HttpPort
from bertserve.serving.net.listener import Listener
from bertserve.serving.net.requests import request_id

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from bertserve.serving.errors import BertserveError
    from bertserve.serving.http.app import App
    from bertserve.serving.net.buffers import BufferBudget
    from bertserve.serving.net.connection_limiter import ConnectionLimiter
    from bertserve.serving.security.tls import Tls
    from bertserve.serving.settings import Settings

_ON_THE_WAY_S = 0.25
"""Seconds that requests may be in transit when the port closes. Connections without a request are closed then. HTTP/1.1
cannot announce this, so a client that sends at that moment loses its request (RFC 9112, 9.5). The lame-duck time exists
so that clients learn of the shutdown before.
"""


def _last_reply(status: bytes, error: BertserveError, identity: str = "") -> bytes:
    """The bytes of an error reply after which the connection ends."""
    reply = OWN.reply(error, "", identity)
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
    return head % (status, reply.content_type, len(reply.body), reply.head, reply.body)


_REFUSAL = _last_reply(
    b"503 Service Unavailable", NotReady("all connections are in use (--max-connections); try again", retry_after_s=1)
)
"""Reply to a connection beyond the limit of connections."""

_PLAIN = "plain HTTP request on a TLS port; use https://"


class HttpListener(Listener):
    def __init__(
        self,
        app: App,
        opened: socket.socket | None,
        settings: Settings,
        *,
        budget: BufferBudget,
        limiter: ConnectionLimiter,
        tls: Tls | None = None,
        hosts: frozenset[str] | None = None,
        place: Callable[[socket.socket, Callable[[], None]], bool] = lambda *_: False,
    ) -> None:
        """As `Listener`; `hosts` are the allowed host names, as `known_hosts` returns them."""
        self._port: HttpPort[HttpConnection] = HttpPort(app, settings, budget, hosts)
        self._record_error = app.context.record_error
        super().__init__(
            *(opened, self._open_connection, tls, "http/1.1"),
            ports=[self._port],
            limiter=limiter,
            refusal=_REFUSAL,
            plain=self._refuse_plain,
            place=place,
        )

    def _refuse_plain(self) -> bytes:
        """Records a client that sends plain HTTP to a TLS port; returns the reply."""
        error, identity = MalformedRequest(_PLAIN), request_id(None)
        self._record_error(error, identity, "http", "")
        return _last_reply(b"400 Bad Request", error, identity)

    def close(self) -> None:
        """Stops accepting. Requests in flight or in transit are answered as the last ones of their connections."""
        super().close()
        asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self._drain)

    def _drain(self) -> None:
        """Drains repeatedly, because connections may still be opening or hold unread requests."""
        self._port.drain()
        if not self.is_empty:
            asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self._drain)

    def _open_connection(self) -> asyncio.Protocol:
        return HttpConnection(self._port)
