"""The ASGI application with the HTTP routes of a port, for our own connections and other ASGI servers."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException

from bertserve.serving.errors import BertserveError, InvalidRequest, MethodNotAllowed, route_not_found
from bertserve.serving.http.apis import cohere, console_page, huggingface, oip, openai, operations, tei
from bertserve.serving.http.app_context import refuse
from bertserve.serving.http.asgi import AsgiReply, head_of, read_request
from bertserve.serving.http.exchange import NO_ROUTE
from bertserve.serving.http.middleware import Authentication, Preflights
from bertserve.serving.http.near_paths import KnownPaths
from bertserve.serving.http.openapi import docs_router, document
from bertserve.serving.http.routes import Router, methods_of
from bertserve.serving.oip.service import SERVER_NAME, SERVER_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.responses import Response

    from bertserve.serving.http.app_context import AppContext
    from bertserve.serving.http.exchange import HttpReply, HttpRequest

PROTOCOLS = (
    *(tei.router, huggingface.router, openai.router, cohere.router, oip.router),
    *(operations.router, console_page.router),
)


class App(FastAPI):
    """The FastAPI application with our routes.

    Attributes:
        public: Paths that need no API key.
        probes: Public paths that accept any `Host`, because kubelets and load balancers call an IP address.
        origins: Origins that may call from a browser; None if CORS is off.
    """

    def __init__(self, context: AppContext, routers: Sequence[Router] = PROTOCOLS, *, documented: bool = True) -> None:
        super().__init__(
            title=SERVER_NAME,
            version=SERVER_VERSION,
            openapi_url=None,
            redirect_slashes=False,
            exception_handlers={404: self._refuse_unmatched, 405: self._refuse_unmatched, BertserveError: self._refuse},
        )
        self.context = context
        documentation = [docs_router(self.described)] if documented else []
        routes = [route for router in (*routers, *documentation) for route in router.routes]
        self.router.routes.extend(routes)
        self._help = "see /docs" if documented else f"available: {', '.join(route.path for route in routes)}"
        self._known = KnownPaths(route.path for route in routes)
        self.public = frozenset(route.path for route in routes if route.public)
        self._paths = frozenset(route.path for route in routes if "{" not in route.path)
        self.probes = self.public - {route.path for route in console_page.router.routes}
        self.origins = context.settings.allowed_origins or None
        if context.keys is not None:
            self.add_middleware(Authentication, context=context, keys=context.keys, public=self.public)
        if self.origins:
            self.add_middleware(Preflights, context=context)

    def route_of(self, path: str) -> str:
        """The route's name in traces, for a request that is rejected before routing."""
        return path if path in self._paths else NO_ROUTE

    async def described(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = await document(self.routes, self.context, self.public)
        return self.openapi_schema

    async def _refuse_unmatched(self, request: Request, error: Exception) -> Response:
        """Answers a request without a route through `answer`, so that it is counted and traced."""
        http = await read_request(request, self.context.settings.body_limit_bytes)

        async def refuse_route(_: AppContext, __: HttpRequest) -> HttpReply:
            # Starlette's router reports the methods of the first matching route only, but a path may have several
            # routes.
            if isinstance(error, HTTPException) and error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                methods = ", ".join(methods_of(self.routes, request.scope))
                raise MethodNotAllowed(f"method not allowed; allowed: {methods}", allowed=methods)
            raise self._unknown(http.path)

        return AsgiReply(self.context, await self.context.answer(refuse_route, NO_ROUTE, http), http)

    def _unknown(self, path: str) -> InvalidRequest:
        repository = self.context.repository
        models = {*self.context.v2.names, *(model.name for model in repository.models)}
        if self._known.names_no_model(path, models):
            return repository.unknown()
        meant = " or ".join(self._known.near(path, models))
        return route_not_found(path, f"unknown path; {f'did you mean {meant}?' if meant else self._help}")

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Answers an error raised outside of an endpoint, such as a body that is too large."""
        if not isinstance(error, BertserveError):
            raise error
        http = head_of(request.scope)
        return AsgiReply(self.context, refuse(error, http), http)
