"""Route declarations, and which routes the connection calls directly.

An endpoint is a function of `AppContext` and `HttpRequest` that returns an `HttpReply` or raises a `BertserveError`.
Any ASGI server reaches it through the FastAPI application. Our own connection calls the endpoints of hot routes
directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match

from bertserve.serving.http.app_context import AppContext, Endpoint
from bertserve.serving.http.asgi import AsgiReply, read_request
from bertserve.serving.inference.ranking import rankers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.routing import BaseRoute
    from starlette.types import Scope

    from bertserve.serving.http.exchange import HttpReply, HttpRequest

Models: TypeAlias = Callable[[AppContext], Sequence[str]]

_BELOW_MODEL = "/models/{model}"


@dataclass(slots=True, frozen=True)
class Docs:
    """A route's entry in the OpenAPI document.

    Attributes:
        takes: Type of the JSON body, if there is one; a tuple for several types.
        gives: Type of the JSON reply, if it is JSON.
        example: A working request, or a function that returns one.
        models: The models that answer; the route is not listed if there are none. None: it needs no model.
        statuses: Causes of statuses specific to the route.
        reply: An example reply, if the endpoint cannot produce one.
        takes_headers: Optional request headers besides those of every route.
        gives_headers: Reply headers besides those of every route.
        binary: Whether binary tensors may follow the JSON, in both directions.
    """

    takes: Any = None
    gives: Any = None
    example: Any = None
    models: Models | None = None
    statuses: Mapping[int, str] = field(default_factory=dict)
    reply: Any = None
    takes_headers: Sequence[str] = ()
    gives_headers: Sequence[str] = ()
    binary: bool = False
    body_optional: bool = False


class ApiRoute(APIRoute):
    """A route of the application.

    Attributes:
        direct: Its endpoint, as our own connection calls it.
        docs: Its entry in the document; None if it is not listed.
        public: Whether it needs no API key even if the server has keys.
        of_core: Whether only the core process can answer it.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        docs: Docs | None,
        *,
        tag: str,
        summary: str,
        public: bool,
        of_core: bool = False,
    ) -> None:
        if of_core:
            endpoint = _of_core(method, path, endpoint)

        async def over_asgi(request: Request) -> Response:
            context: AppContext = request.app.context
            http = await read_request(request, context.settings.body_limit_bytes)
            http.parameters = request.path_params
            return AsgiReply(context, await context.answer(endpoint, path, http), http)

        words = [word.strip("{}") for word in path.replace("-", "_").split("/") if word]
        super().__init__(
            path,
            over_asgi,
            methods=["GET", "HEAD"] if method == "GET" else [method],
            operation_id="_".join([method.lower(), *words]),
            tags=[tag],
            summary=summary,
            response_class=Response,
            response_model=None,
            include_in_schema=docs is not None,
        )
        self.method = method
        self.direct = endpoint
        self.docs = docs
        self.public = public
        self.of_core = of_core

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # The pattern ends in `$`, which also matches before a trailing newline.
        return super().matches(scope) if scope["path"].isprintable() else (Match.NONE, {})


class HotRoute(ApiRoute):
    """A route that our own connection answers without ASGI: it calls `direct` with the parsed request."""


class Router:
    """The routes of one protocol. Decorators add routes; the first line of a docstring is the summary."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.routes: list[ApiRoute] = []

    def get(
        self,
        path: str,
        docs: Docs | None = None,
        *,
        summary: str = "",
        public: bool = False,
        of_core: bool = False,
    ) -> Callable[[Endpoint], Endpoint]:
        return self._route(ApiRoute, "GET", path, docs, summary, public=public, of_core=of_core)

    def post(self, path: str, docs: Docs | None = None, *, of_core: bool = False) -> Callable[[Endpoint], Endpoint]:
        return self._route(ApiRoute, "POST", path, docs, of_core=of_core)

    def hot(self, path: str, docs: Docs, *, summary: str = "") -> Callable[[Endpoint], Endpoint]:
        """A POST route that runs inference."""
        return self._route(HotRoute, "POST", path, docs, summary)

    def infer(
        self,
        path: str,
        task: str,
        takes: Any,  # noqa: ANN401  types, as all in `Docs`
        gives: Any,  # noqa: ANN401
        example: Any,  # noqa: ANN401
    ) -> Callable[[Endpoint], Endpoint]:
        """A hot `path` for the task's only or default model, and `/models/{model}/path`."""
        return self.named("POST", path, Docs(takes, gives, example, of_task(task)), kind=HotRoute)

    def named(
        self, method: str, path: str, docs: Docs | None = None, *, kind: type[ApiRoute] = ApiRoute
    ) -> Callable[[Endpoint], Endpoint]:
        """The route `path` for the only or default model, and `/models/{model}/path`."""

        def add(endpoint: Endpoint) -> Endpoint:
            self._route(kind, method, path, docs)(endpoint)
            below = f"{_summary(endpoint)[:-1]}, with a named model."
            return self._route(kind, method, _BELOW_MODEL + path, docs, below)(endpoint)

        return add

    def _route(
        self,
        kind: type[ApiRoute],
        method: str,
        path: str,
        docs: Docs | None,
        summary: str = "",
        *,
        public: bool = False,
        of_core: bool = False,
    ) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            words = summary or _summary(endpoint)
            route = kind(method, path, endpoint, docs, tag=self.tag, summary=words, public=public, of_core=of_core)
            self.routes.append(route)
            return endpoint

        return add


def _of_core(method: str, path: str, endpoint: Endpoint) -> Endpoint:
    """An endpoint that a front passes on to the core process."""

    async def answer(context: AppContext, http: HttpRequest) -> HttpReply:
        if context.core is not None:
            return await context.core.call_http(method, path, http)
        return await endpoint(context, http)

    return answer


def of_task(task: str) -> Models:
    return lambda context: [model.name for model in context.repository.of_task(task)]


def ranking_models(context: AppContext) -> list[str]:
    return rankers(context.repository)


def all_models(context: AppContext) -> list[str]:
    return [model.name for model in context.repository.models]


def v2_names(context: AppContext) -> list[str]:
    return context.v2.names


def methods_of(routes: Iterable[BaseRoute], scope: Scope) -> list[str]:
    """The methods of the routes that match the path but not the request's method."""
    allowed: set[str] = set()
    for route in routes:
        if isinstance(route, APIRoute) and route.matches(scope)[0] is Match.PARTIAL:
            allowed |= route.methods or set()
    return sorted(allowed)


def _summary(endpoint: Endpoint) -> str:
    return (endpoint.__doc__ or "").partition("\n")[0]
