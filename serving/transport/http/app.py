"""The HTTP application: routes made of operations, on FastAPI's router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from serving.errors import BertserveError, MethodNotAllowed, RouteNotFound
from serving.transport.http.documentation import docs_operations, document
from serving.transport.http.exchange import Endpoint, Handler, HttpReply, HttpRequest, Operation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastapi import APIRouter
    from starlette.types import ASGIApp, Receive, Scope, Send

_NOT_ALLOWED = 405


class _Routing:
    """Finds the endpoint: fixed paths in a table, the others by the router.

    Unknown paths and methods are answered in the shape of the path's protocol.
    """

    def __init__(self, router: APIRouter, record_error: Callable[[BertserveError], None]) -> None:
        self._router = router
        self._fixed = {
            (method, route.path): route.app
            for route in router.routes
            if isinstance(route, Route) and "{" not in route.path
            for method in route.methods or ()
        }
        self._record_error = record_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fixed = self._fixed.get((scope["method"], scope["path"]))
        if fixed is not None:
            await fixed(scope, receive, send)
            return
        scope["app"] = self  # makes Starlette's router raise its refusals instead of answering them in its own way
        try:
            await self._router(scope, receive, send)
        except HTTPException as refusal:
            await Endpoint(_refusing(refusal), self._record_error)(scope, receive, send)


def _refusing(refusal: HTTPException) -> Handler:
    """The router's refusal as a handler that raises ours."""

    async def refuse(_: HttpRequest) -> HttpReply:
        if refusal.status_code == _NOT_ALLOWED:
            allowed = (refusal.headers or {}).get("Allow", "")
            raise MethodNotAllowed(f"the path takes {allowed}; /docs lists what each does", allowed=allowed)
        raise RouteNotFound("no such path; /docs lists them")

    return refuse


def build_app(
    operations: Sequence[Operation], version: str, record_error: Callable[[BertserveError], None], *, docs: bool = True
) -> ASGIApp:
    """An application of these operations, the busiest first.

    Args:
        operations: What it serves.
        version: The server's, for the documentation.
        record_error: Told of each error reply.
        docs: Serve `/docs` too.
    """
    # FastAPI's own middleware is left out: every exchange has its one boundary in `Endpoint` already.
    router = FastAPI(openapi_url=None, docs_url=None, redoc_url=None).router
    pages = docs_operations(document(operations, version)) if docs else []
    router.routes[:] = [
        Route(op.path, Endpoint(op.handler, record_error), methods=[op.method]) for op in (*operations, *pages)
    ]
    router.redirect_slashes = False
    return _Routing(router, record_error)
