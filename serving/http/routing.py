"""Which handler answers a path: fixed paths in a table, the others by FastAPI's router."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.routing import Match, Route

from serving.errors import MethodNotAllowed, RouteNotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from serving.http.exchange import Handler, HttpRequest, Operation


_REMEMBERED = 256
"""Paths with parts that vary, models' names mostly."""


class _Endpoint:
    """Lets the router hold a handler; it is asked which route matches and never runs one."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class Routes:
    """The operations of one port.

    Attributes:
        open: The paths of those that need no API key.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Builds the table.

        Args:
            operations: What is served; where two paths match, the first wins.
        """
        self.open = frozenset(op.path for op in operations if op.open)
        self._router = FastAPI(openapi_url=None, docs_url=None, redoc_url=None).router
        self._router.routes[:] = [Route(op.path, _Endpoint(op.handler), methods=[op.method]) for op in operations]
        self._fixed: dict[tuple[str, str], Handler] = {
            (method, route.path): route.app.handler
            for route in reversed(self._router.routes)
            if isinstance(route, Route) and isinstance(route.app, _Endpoint) and "{" not in route.path
            for method in route.methods or ()
        }
        self._found: dict[tuple[str, str], tuple[Handler, dict[str, str]]] = {}
        self._tails: dict[str, list[Route]] = {}
        for route in self._router.routes:
            if isinstance(route, Route) and "{" in route.path and "{" not in route.path.rpartition("/")[2]:
                self._tails.setdefault(route.path.rpartition("/")[2], []).append(route)

    def find(self, request: HttpRequest) -> Handler:
        """The handler of a request's method and path; what its path carries goes into `request.parameters`.

        Raises:
            RouteNotFound: No such path.
            MethodNotAllowed: The path takes other methods.
        """
        key = (request.method, request.path)
        if (handler := self._fixed.get(key)) is not None:
            return handler
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _REMEMBERED:
                self._found.clear()
            found = self._found[key] = self._search(request)
        handler, request.parameters = found
        return handler

    def _search(self, request: HttpRequest) -> tuple[Handler, dict[str, str]]:
        scope: dict[str, Any] = {"type": "http", "method": request.method, "path": request.path}
        allowed: set[str] = set()
        # The router's patterns end in `$`, which a line's end satisfies too.
        printable = request.path.isprintable()
        # Those whose path ends as this one does come first: mostly the answer is among the first two of them.
        likely = self._tails.get(request.path.rpartition("/")[2], ())
        for route in itertools.chain(likely, self._router.routes) if printable else ():
            match, found = route.matches(scope)
            if match is Match.FULL and isinstance(found["endpoint"], _Endpoint):
                return found["endpoint"].handler, found["path_params"]
            if match is Match.PARTIAL and isinstance(route, Route):
                allowed |= route.methods or set()
        if allowed:
            methods = ", ".join(sorted(allowed))
            raise MethodNotAllowed(f"the path takes {methods}; /docs lists what each does", allowed=methods)
        raise RouteNotFound("no such path; /docs lists them")
