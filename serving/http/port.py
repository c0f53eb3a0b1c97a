"""The shared state of an HTTP port's connections: the application, its hot routes and the request limits."""

from __future__ import annotations

from email.utils import formatdate
from typing import TYPE_CHECKING

from bertserve.serving.http.routes import HotRoute
from bertserve.serving.net.buffers import FREE_BYTES
from bertserve.serving.net.connection import C, Port

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.routing import BaseRoute

    from bertserve.serving.http.app import App
    from bertserve.serving.http.exchange import HttpRequest
    from bertserve.serving.net.buffers import BufferBudget
    from bertserve.serving.settings import Settings

_REMEMBERED = 256
"""Maximum cached matches of paths with parameters, mostly model names."""

_ANY_TAIL = "{}"
"""Key of the routes that end in a parameter."""


class HotRoutes:
    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._fixed: dict[tuple[str, str], HotRoute] = {}
        self._by_tail: dict[str, list[HotRoute]] = {}
        self._remembered: dict[tuple[str, str], tuple[HotRoute, dict[str, str]]] = {}
        for route in routes:
            if isinstance(route, HotRoute):
                if "{" in route.path:
                    tail = _tail(route.path)
                    self._by_tail.setdefault(_ANY_TAIL if "{" in tail else tail, []).append(route)
                else:
                    self._fixed[route.method, route.path] = route

    def find(self, request: HttpRequest) -> HotRoute | None:
        """The hot route of a request, if any; sets `request.parameters` to the path parameters."""
        key = (request.method, request.path)
        route = self._fixed.get(key)
        if route is not None:
            return route
        match = self._remembered.get(key) or self._search(key)
        if match is None:
            return None
        route, request.parameters = match
        return route

    def _search(self, key: tuple[str, str]) -> tuple[HotRoute, dict[str, str]] | None:
        method, path = key
        for route in (*self._by_tail.get(_tail(path), ()), *self._by_tail.get(_ANY_TAIL, ())):
            match = route.path_regex.match(path)
            if match is not None and method == route.method and path.isprintable():
                if len(self._remembered) >= _REMEMBERED:
                    self._remembered.clear()
                self._remembered[key] = route, match.groupdict()
                return self._remembered[key]
        return None


def _tail(path: str) -> str:
    return path.rpartition("/")[2]


class HttpPort(Port[C]):
    """The shared state of a port's connections.

    Attributes:
        scheme: `http` or `https`.
        hosts: Allowed host names, as `is_known_host` takes them; None for any.
        hot: The routes that bypass ASGI.
        free_bytes: Bytes of a body that need no buffer space.
        date: The Date header, a whole line.
    """

    def __init__(
        self, app: App, settings: Settings, scheme: str, budget: BufferBudget, hosts: frozenset[str] | None = None
    ) -> None:
        super().__init__(settings, budget)
        self.app = app
        self.scheme = scheme
        self.hosts = hosts
        self.hot = HotRoutes(app.routes)
        self.free_bytes = min(FREE_BYTES, settings.body_limit_bytes)
        self.date = b""

    def tick(self, seconds: float) -> None:
        """Also renews the Date header."""
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        super().tick(seconds)
