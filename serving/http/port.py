"""What the connections of one HTTP port share: the application, its hot routes and the limits of requests."""

from __future__ import annotations

from email.utils import formatdate
from typing import TYPE_CHECKING

from serving.errors import Limit
from serving.http.routes import HotRoute, UploadRoute
from serving.net.buffers import FREE_BYTES
from serving.net.connection import C, Port

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.routing import BaseRoute

    from serving.http.app import App
    from serving.http.exchange import HttpRequest
    from serving.net.buffers import BufferBudget
    from serving.settings import Settings

_FORM_BYTES = 65_536
"""What a form may have beside the file in it."""

_REMEMBERED = 256
"""Paths with parts that vary, models' names mostly."""

_ANY_TAIL = "{}"
"""Stands for the last parts of routes that end in a name."""


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
        """The route, if it is a hot one; the parts of the path go into `request.parameters`."""
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
    """What the connections of one port share.

    Attributes:
        scheme: `http` or `https`.
        hosts: Names that it goes by, as `is_known_host` takes them; None for any.
        hot: The routes that are answered past ASGI.
        uploads: Paths of POSTs that are answered while their bodies arrive.
        upload_bytes: Of the body of an upload.
        free_bytes: Of any other body that need no room.
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
        self.uploads: frozenset[str] = frozenset()
        if app.context.jobs is not None:
            self.uploads = frozenset(route.path for route in app.routes if isinstance(route, UploadRoute))
        self.upload_bytes = Limit((settings.batch_file_mb << 20) + _FORM_BYTES, "--batch-file-mb")
        self.free_bytes = min(FREE_BYTES, settings.body_limit_bytes)
        self.date = b""

    def tick(self, seconds: float) -> None:
        """Makes the Date header anew, too."""
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        super().tick(seconds)
