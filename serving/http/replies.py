"""The head of a reply, and which part of the body is sent, for the replies of all layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bertserve.serving.http.cors import cors_lines
from bertserve.serving.http.exchange import NOT_MODIFIED, ignored_head

if TYPE_CHECKING:
    from bertserve.serving.http.exchange import HttpReply, HttpRequest
    from bertserve.serving.security.origins import Origins


def sends_body(request: HttpRequest, reply: HttpReply) -> bool:
    """Whether the body is sent: not to HEAD, nor with a status without a body (RFC 9110, 9.3.2, 15.4.5)."""
    return request.method != "HEAD" and reply.status != NOT_MODIFIED


def head_lines(origins: Origins | None, request: HttpRequest, reply: HttpReply) -> bytes:
    """The header lines, except those of the connection."""
    lines = b"content-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b" % (
        *(reply.content_type, len(reply.body), request.request_id.encode(), reply.head),
    )
    if request.ignored is not None and reply.error is None:
        lines += ignored_head(request.ignored)
    if origins:
        lines += cors_lines(origins, request.headers.get(b"origin"))
    return lines
