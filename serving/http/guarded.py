"""HTTP connections of a port that asks for an API key, or that browsers may call from other pages than its own.

A class of its own, so that a port that does neither pays for neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from serving.http.connection import HttpConnection
from serving.http.cors import is_preflight
from serving.security.keys import refusal

if TYPE_CHECKING:
    from serving.http.connection import Port
    from serving.http.cors import Cors
    from serving.http.exchange import HttpReply, HttpRequest
    from serving.security.keys import ApiKeys


class GuardedConnection(HttpConnection):
    """One connection."""

    def __init__(self, port: Port, keys: ApiKeys | None, cors: Cors | None) -> None:
        """Waits for its transport."""
        super().__init__(port)
        self._keys = keys
        self._cors = cors

    def on_headers_complete(self) -> None:
        """Looks for a key before a byte of the body is kept, and before anything says whether there is such a route."""
        if self._keys is not None:
            authorization = self._headers.get(b"authorization")
            if not self._keys.allow(authorization) and not self._is_open():
                raise self._violated(refusal(authorization))
        super().on_headers_complete()

    def _is_open(self) -> bool:
        """Whether a request is answered without a key: everybody may ask it, and it brings nothing to keep."""
        headers = self._headers
        if b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0":
            return False
        if self._cors is not None and is_preflight(self._parser.get_method().decode(), headers):
            return True
        return self._path(self._url) in self._port.routes.open

    def _more_head(self) -> bytes:
        return b"" if self._cors is None else self._cors.head(self._headers)

    def _write(self, request: HttpRequest, reply: HttpReply, *, keep_alive: bool) -> None:
        if self._cors is not None:
            reply = msgspec.structs.replace(reply, head=reply.head + self._cors.head(request.headers))
        super()._write(request, reply, keep_alive=keep_alive)
