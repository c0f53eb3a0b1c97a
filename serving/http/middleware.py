"""Checks before all routes: API keys, allowed hosts and CORS."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from bertserve.serving.http.app_context import refuse
from bertserve.serving.http.asgi import AsgiReply, head_of, headers_of
from bertserve.serving.http.exchange import HttpReply
from bertserve.serving.security.keys import refusal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from bertserve.serving.errors import Unauthenticated
    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.security.keys import ApiKeys
    from bertserve.serving.settings import Settings

_PREFLIGHT = HttpReply(
    b"",
    content_type=b"text/plain; charset=utf-8",
    head=b"access-control-allow-methods: GET, HEAD, POST\r\n"
    b"access-control-allow-headers: *, authorization\r\n"  # the only name that `*` does not include
    b"access-control-max-age: 600\r\n",
)


def unauthenticated(
    keys: ApiKeys, public: Collection[str], method: str, path: str, headers: Mapping[bytes, bytes]
) -> Unauthenticated | None:
    """The rejection of a request without a required API key; None if it carries one or needs none."""
    authorization = headers.get(b"authorization")
    if keys.allow(authorization) or (path in public and method != "POST" and not announces_body(headers)):
        return None
    return refusal(authorization)


def known_hosts(settings: Settings, address: str, keys: ApiKeys | None) -> frozenset[str] | None:
    """The allowed host names of a port at an address besides loopback; empty if none are set; None if all are allowed.

    A page whose name resolves to 127.0.0.1 has the same origin as a server there, so the browser lets it do what the
    console does (DNS rebinding). Only the Host header tells them apart.
    """
    names = settings.host_names
    if "*" in names or not (names or (keys is None and is_loopback(address))):
        return None
    return names


def is_known_host(host: bytes, names: Collection[str]) -> bool:
    """Whether a valid Host is an allowed name, `localhost` or a loopback address, with any port.

    Without names, two more kinds are allowed: an empty Host, which no browser sends, and a single label, such as that
    of an nginx upstream or a container. A single label is in no domain that an attacker could own.
    """
    name = host.decode("latin-1").lower()
    name = name[: name.index("]") + 1] if name.startswith("[") else name.partition(":")[0].removesuffix(".")
    if name in names or name == "localhost" or is_loopback(name.strip("[]")):
        return True
    return not names and "." not in name and (not name or name[0].isalpha())


def is_loopback(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def announces_body(headers: Mapping[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def is_preflight(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether this is a CORS preflight request, which carries no key."""
    return method == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers


class Authentication:
    """Rejects requests without an API key, before anything reveals whether the route exists."""

    def __init__(self, app: ASGIApp, context: AppContext, keys: ApiKeys, public: Collection[str]) -> None:
        self._app = app
        self._context = context
        self._keys = keys
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = None
        if scope["type"] == "http":
            error = unauthenticated(self._keys, self._public, scope["method"], scope["path"], headers_of(scope))
        if error is None:
            await self._app(scope, receive, send)
            return
        request = head_of(scope)
        await AsgiReply(self._context, refuse(error, request), request)(scope, receive, send)


class Preflights:
    """Answers CORS preflight requests, the same on every path."""

    def __init__(self, app: ASGIApp, context: AppContext) -> None:
        self._app = app
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_preflight(scope["method"], headers_of(scope)):
            await AsgiReply(self._context, _PREFLIGHT, head_of(scope))(scope, receive, send)
        else:
            await self._app(scope, receive, send)
