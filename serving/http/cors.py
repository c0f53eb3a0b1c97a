"""CORS: preflight requests, and the headers of replies for pages of other origins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.http.exchange import HttpReply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.serving.security.origins import Origins

PREFLIGHT = HttpReply(
    b"",
    content_type=b"text/plain; charset=utf-8",
    head=b"access-control-allow-methods: GET, HEAD, POST\r\n"
    b"access-control-allow-headers: *, authorization\r\n"  # the only name that `*` does not include
    b"access-control-max-age: 600\r\n",
)
"""The reply to a preflight request, the same on every path."""

_EXPOSED = (
    b"server-timing, retry-after, retry-after-ms, x-request-id, x-compute-tokens, x-truncated-tokens, "
    b"x-compute-type, x-compute-time, x-compute-characters, x-total-time, x-tokenization-time, x-queue-time, "
    b"x-inference-time, inference-header-content-length, www-authenticate, x-ignored-fields, x-cache, "
    b"etag, allow, accept-encoding, content-encoding, preference-applied, x-computed"
)
"""Headers that CORS does not expose to scripts by default."""


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether this is a CORS preflight request, which carries no key."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


def cors_lines(origins: Origins, origin: bytes | None) -> bytes:
    """The CORS headers for an origin, if any origin is allowed.

    Credentials are never allowed: a browser's credentials for this server, such as a client certificate, must not be
    available to pages.
    """
    if origins.any:
        origin = b"*"
    elif origin is None or not origins.allow(origin):
        return b"vary: origin\r\n"
    return b"vary: origin\r\naccess-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\n" % (
        *(origin, _EXPOSED),
    )
