"""The OpenAPI document: FastAPI's, with the very types that requests are decoded with, and its page `/docs`."""

from __future__ import annotations

import copy
from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi

from serving.http.exchange import HttpReply, HttpRequest, json_reply
from serving.http.faults import TeiError, error_type
from serving.http.routes import ApiRoute, HotRoute, Router
from serving.oip.service import SERVER_NAME, SERVER_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from starlette.routing import BaseRoute

    from serving.http.api import Api
    from serving.http.routes import Docs

_JSON, _OCTETS = "application/json", "application/octet-stream"
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_ANYWHERE = (400, 404, 405, 408, 413, 415, 431, 500, 503)
"""The errors of any route: of the connection, of the server."""

_INFERRING = (422, 429, 504)
"""And of those that take a body."""

_WRONG_TASK = 424
_NO_KEY = 401
_KEY = "key"
_ASSETS = {"swagger-ui-bundle.js": b"text/javascript", "swagger-ui.css": b"text/css"}

_PARAMETERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "What the request is called in the reply, in errors and in the log; one is made if need be.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
    },
    "X-Request-Timeout-Ms": {
        "description": "Milliseconds after which the answer is useless: 504.",
        "schema": {"type": "string", "pattern": "^[0-9]{1,9}(\\.[0-9]{1,6})?$"},
        "example": "1000",
    },
    "X-Request-Priority": {
        "description": "1 goes before 2, and 2 before 3; 0 is the default, 2.",
        "schema": {"type": "integer", "enum": [0, 1, 2, 3]},
    },
}


def _header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


_ID_HEADER = {"X-Request-Id": _header("The request's id.")}
_OUTCOME_HEADERS = {
    "Server-Timing": _header("Milliseconds of the stages `tokenize`, `queue` and `compute`, and of all, `total`."),
    "X-Compute-Tokens": _header("Tokens computed, special tokens included.", "integer"),
    "X-Truncated-Tokens": _header("Tokens cut off.", "integer"),
}
_RETRY_HEADERS = {
    "Retry-After": _header("Seconds after which to try again.", "integer"),
    "Retry-After-Ms": _header("The same in milliseconds, different for each client.", "integer"),
}
_ERROR_HEADERS = {
    _NO_KEY: {"WWW-Authenticate": _header("`Bearer`.")},
    405: {"Allow": _header("The methods that the path takes.")},
    415: {"Accept-Encoding": _header("The encodings of bodies that are read.")},
    429: _RETRY_HEADERS,
    503: _RETRY_HEADERS,
}


def document(routes: Iterable[BaseRoute], api: Api, public: Collection[str]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes that a model here answers, and of those that need no model.

    Args:
        routes: The application's routes.
        api: What their endpoints work with.
        public: Paths that need no API key.
    """
    listed = [(route, route.docs) for route in routes if isinstance(route, ApiRoute) and route.docs is not None]
    listed = [(route, docs) for route, docs in listed if docs.models is None or docs.models(api)]
    made = get_openapi(
        title=SERVER_NAME,
        version=SERVER_VERSION,
        description="Low-latency BERT inference.",
        routes=[_without_head(route) for route, _ in listed],
    )
    types = [kind for route, docs in listed for kind in (docs.takes, docs.gives, error_type(route.path)) if kind]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    for route, docs in listed:
        keyed = api.keys is not None and (route.path not in public or docs.takes is not None)
        entry = made["paths"][route.path][route.method.lower()]
        entry["parameters"] = _parameters(route, docs, api)
        if docs.takes is not None:
            entry["requestBody"] = _body(docs, schema_of, api)
        entry["responses"] = _responses(route, docs, schema_of, keyed=keyed)
        if keyed:
            entry["security"] = [{_KEY: []}]
    made["components"] = {"schemas": components}
    if api.keys is not None:
        made["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return made


def _without_head(route: ApiRoute) -> ApiRoute:
    """FastAPI would list GET's answer to HEAD as an operation of its own."""
    shown = copy.copy(route)
    shown.methods = {route.method}
    return shown


def _parameters(route: ApiRoute, docs: Docs, api: Api) -> list[dict[str, Any]]:
    values: dict[str, Sequence[str]] = {"model": docs.models(api) if docs.models else (), "version": api.v2.versions}
    parts = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": list(values[name])}}
        for name in (part[1:-1] for part in route.path.split("/") if part.startswith("{"))
    ]
    headers = _PARAMETERS if isinstance(route, HotRoute) else ["X-Request-Id"]
    return [*parts, *[{"name": name, "in": "header", **_PARAMETERS[name]} for name in headers]]


def _body(docs: Docs, schema_of: dict[str, Any], api: Api) -> dict[str, Any]:
    example = docs.example(api) if callable(docs.example) else docs.example
    content: dict[str, Any] = {_JSON: {"schema": schema_of[repr(docs.takes)], "example": example}}
    if docs.binary:
        content[_OCTETS] = _BYTES
    return {"required": not docs.body_optional, "content": content}


def _responses(route: ApiRoute, docs: Docs, schema_of: dict[str, Any], *, keyed: bool) -> dict[str, Any]:
    more = _OUTCOME_HEADERS if isinstance(route, HotRoute) else {}
    done: dict[str, Any] = {"description": "Done.", "headers": _ID_HEADER | more}
    if docs.gives is not None:
        done["content"] = {_JSON: {"schema": schema_of[repr(docs.gives)]}}
        if docs.binary:
            done["content"][_OCTETS] = _BYTES
    family = error_type(route.path)
    statuses = {*_ANYWHERE, *docs.statuses, *(_INFERRING if docs.takes is not None else ())}
    statuses |= {status for status, answers in ((_NO_KEY, keyed), (_WRONG_TASK, family is TeiError)) if answers}
    fault = schema_of[repr(family)]
    responses = {"200": done}
    for status in sorted(statuses):
        # Probes and readiness answer their own state with an error's status.
        own = status in docs.statuses and docs.gives is not None and family is not TeiError
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "headers": _ID_HEADER | _ERROR_HEADERS.get(status, {}),
            "content": {_JSON: {"schema": {"anyOf": [fault, schema_of[repr(docs.gives)]]} if own else fault}},
        }
    return responses


def docs_router(openapi: Callable[[], dict[str, Any]]) -> Router:
    """`/docs`, `/openapi.json` and the page's assets, all from this server."""
    router = Router("Documentation")
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=SERVER_NAME,
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
        swagger_favicon_url="data:,",
    )
    folder = files("fastapi_swagger") / "resources"

    @router.get("/docs")
    async def docs(_: Api, __: HttpRequest) -> HttpReply:
        return HttpReply(bytes(page.body), content_type=b"text/html; charset=utf-8")

    @router.get("/openapi.json")
    async def schema(_: Api, __: HttpRequest) -> HttpReply:
        return json_reply(openapi())

    def asset(name: str, kind: bytes) -> None:
        @router.get(f"/docs/{name}")
        async def serve(_: Api, __: HttpRequest) -> HttpReply:
            return HttpReply((folder / name).read_bytes(), content_type=kind)

    for name, kind in _ASSETS.items():
        asset(name, kind)
    return router
