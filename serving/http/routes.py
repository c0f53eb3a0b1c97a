"""Route declarations, and the table that finds the route of a request.

An endpoint is a function of `AppContext` and `HttpRequest` that returns an `HttpReply` or raises a `BertserveError`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from bertserve.serving.http.app_context import AppContext, Endpoint
from bertserve.serving.http.faults import OWN
from bertserve.serving.inference.ranking import rankers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from bertserve.serving.http.exchange import HttpReply, HttpRequest
    from bertserve.serving.http.faults import ErrorFormat

Models: TypeAlias = Callable[[AppContext], Sequence[str]]

_BELOW_MODEL = "/models/{model}"
_PARAMETER = re.compile(r"{(\w+)}")

_REMEMBERED = 256
"""Maximum cached matches of paths with parameters, mostly model names."""


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


@dataclass(slots=True, frozen=True)
class Route:
    """A route of the application.

    Attributes:
        docs: Its entry in the document; None if it is not listed.
        infers: Whether it runs inference.
        public: Whether it needs no API key even if the server has keys.
        of_core: Whether only the core process can answer it.
    """

    method: str
    path: str
    endpoint: Endpoint
    docs: Docs | None
    tag: str
    summary: str
    infers: bool = False
    public: bool = False
    of_core: bool = False

    @property
    def methods(self) -> Sequence[str]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


class Router:
    """The routes of one protocol. Decorators add routes; the first line of a docstring is the summary.

    Attributes:
        errors: What the protocol calls its errors.
        below: Beginning of paths whose errors are the protocol's, even if they have no route; "" if there are none.
    """

    def __init__(self, tag: str, errors: ErrorFormat = OWN, below: str = "") -> None:
        self.tag = tag
        self.errors = errors
        self.below = below
        self.routes: list[Route] = []

    def get(
        self,
        path: str,
        docs: Docs | None = None,
        *,
        summary: str = "",
        public: bool = False,
        of_core: bool = False,
    ) -> Callable[[Endpoint], Endpoint]:
        return self._route("GET", path, docs, summary, public=public, of_core=of_core)

    def post(
        self, path: str, docs: Docs | None = None, *, summary: str = "", infers: bool = False, of_core: bool = False
    ) -> Callable[[Endpoint], Endpoint]:
        return self._route("POST", path, docs, summary, infers=infers, of_core=of_core)

    def infer(
        self,
        path: str,
        task: str,
        takes: Any,  # noqa: ANN401  types, as all in `Docs`
        gives: Any,  # noqa: ANN401
        example: Any,  # noqa: ANN401
    ) -> Callable[[Endpoint], Endpoint]:
        """`path` for the task's only or default model, and `/models/{model}/path`; both run inference."""
        return self.named("POST", path, Docs(takes, gives, example, of_task(task)), infers=True)

    def named(
        self, method: str, path: str, docs: Docs | None = None, *, infers: bool = False
    ) -> Callable[[Endpoint], Endpoint]:
        """The route `path` for the only or default model, and `/models/{model}/path`."""

        def add(endpoint: Endpoint) -> Endpoint:
            self._route(method, path, docs, infers=infers)(endpoint)
            below = f"{_summary(endpoint)[:-1]}, with a named model."
            return self._route(method, _BELOW_MODEL + path, docs, below, infers=infers)(endpoint)

        return add

    def _route(
        self, method: str, path: str, docs: Docs | None, summary: str = "", *, of_core: bool = False, **flags: bool
    ) -> Callable[[Endpoint], Endpoint]:
        def add(endpoint: Endpoint) -> Endpoint:
            answers = _of_core(method, path, endpoint) if of_core else endpoint
            words = summary or _summary(endpoint)
            self.routes.append(Route(method, path, answers, docs, self.tag, words, of_core=of_core, **flags))
            return endpoint

        return add


class RouteTable:
    """Finds routes by method and path. A path without parameters comes before those with some."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._fixed: dict[tuple[str, str], Route] = {}
        self._patterns: list[tuple[re.Pattern[str], Route]] = []
        self._remembered: dict[tuple[str, str], tuple[Route, dict[str, str]]] = {}
        for route in routes:
            if "{" in route.path:
                self._patterns.append((re.compile(_PARAMETER.sub(r"(?P<\1>[^/]+)", route.path)), route))
            else:
                self._fixed |= {(method, route.path): route for method in route.methods}

    def find(self, request: HttpRequest) -> Route | None:
        """The route of a request, if any; sets `request.parameters` to the path parameters."""
        key = (request.method, request.path)
        route = self._fixed.get(key)
        if route is not None:
            return route
        match = self._remembered.get(key) or self._search(key)
        if match is None:
            return None
        route, request.parameters = match
        return route

    def methods(self, path: str) -> Sequence[str]:
        """The methods of a path, sorted; none if it has no route."""
        fixed = [method for method, known in self._fixed if known == path]
        return sorted({*fixed, *(method for route, _ in self._matches(path) for method in route.methods)})

    def _search(self, key: tuple[str, str]) -> tuple[Route, dict[str, str]] | None:
        method, path = key
        for match in self._matches(path):
            if method in match[0].methods:
                if len(self._remembered) >= _REMEMBERED:
                    self._remembered.clear()
                self._remembered[key] = match
                return match
        return None

    def _matches(self, path: str) -> Iterator[tuple[Route, dict[str, str]]]:
        """The routes with parameters that match a path, and the values of their parameters."""
        if path.isprintable():
            for pattern, route in self._patterns:
                if (match := pattern.fullmatch(path)) is not None:
                    yield route, match.groupdict()


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


def _summary(endpoint: Endpoint) -> str:
    return (endpoint.__doc__ or "").partition("\n")[0]
