"""The head of a reply, and which part of the body is sent. All layers use this for their replies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.http.exchange import NOT_MODIFIED, ignored_head

if TYPE_CHECKING:
    from bertserve.serving.http.exchange import HttpReply, HttpRequest
    from bertserve.serving.security.origins import Origins

_EXPOSED = (
    b"server-timing, retry-after, retry-after-ms, x-request-id, x-compute-tokens, x-truncated-tokens, "
    b"x-compute-type, x-compute-time, x-compute-characters, x-total-time, x-tokenization-time, x-queue-time, "
    b"x-inference-time, inference-header-content-length, www-authenticate, x-ignored-fields, x-cache, "
    b"etag, allow, accept-encoding, content-encoding, preference-applied, x-computed"
)
"""Headers that CORS does not expose to scripts by default."""


def sends_body(request: HttpRequest, reply: HttpReply) -> bool:
    """Whether the body is sent: not to HEAD, nor with a status without a body (RFC 9110, 9.3.2, 15.4.5)."""
    return request.method != "HEAD" and reply.status != NOT_MODIFIED


def head_lines(origins: Origins | None, request: HttpRequest, reply: HttpReply, *, states_length: bool = True) -> bytes:
    """The header lines, except those of the connection."""
    identity = request.request_id.encode()
    kind, length, head = reply.content_type, len(reply.body), reply.head
    if states_length:
        lines = b"content-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b" % (kind, length, identity, head)
    else:
        lines = b"content-type: %b\r\nx-request-id: %b\r\n%b" % (kind, identity, head)
    if request.ignored is not None and reply.error is None:
        lines += ignored_head(request.ignored)
    if origins:
        lines += _cors_lines(origins, request.headers.get(b"origin"))
    return lines


def _cors_lines(origins: Origins, origin: bytes | None) -> bytes:
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
