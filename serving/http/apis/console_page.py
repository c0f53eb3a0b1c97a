"""The console: the page at `/` and its files, each by its exact name.

The files hold no data and need no key. The page requests its data from the public API routes.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

from bertserve.serving.http.exchange import NOT_MODIFIED, HttpReply
from bertserve.serving.http.routes import Docs, Router

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpRequest

router = Router("Operations")

_FOLDER = Path(__file__).parents[2] / "web"
_PAGE = "index.html"
_TYPES: Mapping[str, bytes] = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
ASSETS = (
    "api.js",
    "console.css",
    "console.js",
    "dom.js",
    "draw.js",
    "icon.svg",
    "panels.js",
    "request.js",
    "tasks.js",
    "timing.js",
    "vectors.js",
)
"""The page's files, each served as `/console/NAME`."""

# Behind a proxy that strips a prefix, the page's relative addresses need the slash that this script adds.
_SLASH = re.findall(rb"<script>(.*)</script>", (_FOLDER / _PAGE).read_bytes())[0]
_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src 'self' 'sha256-{b64encode(hashlib.sha256(_SLASH).digest()).decode()}'",
        *(f"{kind}-src 'self'" for kind in ("style", "img", "connect")),
        *(f"{kind} 'none'" for kind in ("base-uri", "form-action", "frame-ancestors")),
        # Makes browsers block innerHTML and similar sinks.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEAD = (
    f"content-security-policy: {_POLICY}\r\n"
    "x-content-type-options: nosniff\r\nreferrer-policy: no-referrer\r\ncache-control: no-cache\r\n"
).encode()


def _add(name: str, path: str, docs: Docs | None, summary: str) -> None:
    body = (_FOLDER / name).read_bytes()
    entity = f'"{hashlib.sha256(body).hexdigest()[:32]}"'.encode()
    reply = HttpReply(body, content_type=_TYPES[Path(name).suffix], head=b"etag: %b\r\n" % entity + _HEAD)
    unchanged = HttpReply(body, NOT_MODIFIED, reply.content_type, reply.head)

    @router.get(path, docs, summary=summary, public=True)
    async def serve(_: AppContext, http: HttpRequest) -> HttpReply:
        # The tag matches also in a list of tags, or if a proxy has made it weak.
        return unchanged if entity in http.headers.get(b"if-none-match", b"") else reply


_add(
    _PAGE,
    "/",
    Docs(takes_headers=["If-None-Match"], gives_headers=["ETag"]),
    "Console: try the models and watch the server.",
)
for _name in ASSETS:
    _add(_name, f"/console/{_name}", None, "Console asset.")
