"""Cross-origin requests: which pages' scripts a browser lets talk to this server (the Fetch standard's CORS).

Never with credentials: what a browser keeps for this server, such as a client's certificate, is not lent to pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.http.exchange import HttpReply
from serving.http.routing import Routes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from serving.http.exchange import Handler, HttpRequest
    from serving.settings import Settings

ANY = "*"

_EXPOSED = (
    "server-timing, retry-after, retry-after-ms, x-request-id, x-compute-tokens, x-truncated-tokens, "
    "x-compute-type, x-compute-time, x-compute-characters, x-total-time, x-tokenization-time, x-queue-time, "
    "x-inference-time, inference-header-content-length, www-authenticate"
)
_LINES = (
    b"vary: origin\r\naccess-control-allow-origin: %b\r\naccess-control-expose-headers: " + _EXPOSED.encode() + b"\r\n"
)
_PREFLIGHT = (
    b"access-control-allow-methods: GET, HEAD, POST\r\n"
    b"access-control-allow-headers: *, authorization\r\n"  # the one name that the asterisk does not stand for
    b"access-control-max-age: 600\r\n"
)


class Cors:
    """The origins that are let in."""

    def __init__(self, origins: Sequence[str]) -> None:
        """Prepares what replies say.

        Args:
            origins: As browsers write them, or `*`.
        """
        self._lines = {origin.encode(): _LINES % origin.encode() for origin in origins}
        self._others = _LINES % ANY.encode() if ANY in origins else b"vary: origin\r\n"

    @classmethod
    def of(cls, settings: Settings) -> Cors | None:
        """What the settings name, if they do."""
        return cls(settings.cors_origins.split(",")) if settings.cors_origins else None

    def head(self, headers: Mapping[bytes, bytes]) -> bytes:
        """What a reply to a request with these headers says."""
        return self._lines.get(headers.get(b"origin", b""), self._others)


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser asks, without a key and before the request proper, whether it may send that."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


class CorsRoutes(Routes):
    """Routes that also answer preflights, on every path alike, so that none tells what there is."""

    def find(self, request: HttpRequest) -> Handler:
        """As `Routes.find`."""
        return _allowed if is_preflight(request.method, request.headers) else super().find(request)


async def _allowed(_: HttpRequest) -> HttpReply:
    return HttpReply(b"", content_type=b"text/plain", head=_PREFLIGHT)
