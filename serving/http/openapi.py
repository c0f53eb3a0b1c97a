"""The OpenAPI document, made by FastAPI with the types that decode requests, and its page `/docs`.

FastAPI is imported when one of them is first asked for, in a thread: it takes a third of the time in which a process
starts, and 14 MB.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.http.examples import reply_to
from bertserve.serving.http.exchange import HttpReply, HttpRequest, json_reply
from bertserve.serving.http.faults import IN_BODY
from bertserve.serving.http.routes import Router
from bertserve.serving.inference.served_models import COMPUTE_TYPES
from bertserve.serving.net.requests import MAX_HEADER_BYTES
from bertserve.serving.oip.service import SERVER_NAME, SERVER_VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

    from bertserve.serving.http.app_context import AppContext, Endpoint
    from bertserve.serving.http.faults import ErrorFormat
    from bertserve.serving.http.routes import Docs, Route

_JSON, _OCTETS = "application/json", "application/octet-stream"
_BYTES = {"schema": {"type": "string", "format": "binary"}}
_ABOUT_EXAMPLES = "Vectors in example replies are cut to eight components."
_BREAKS = "a field is unsupported, misspelled, of the wrong type or outside its limits; the message names it"
_BAD_REQUEST, _NO_KEY = 400, 401
_KEY = "key"
_ASSETS = {"swagger-ui-bundle.js": b"text/javascript", "swagger-ui.css": b"text/css"}

_ALIAS = "x-alias-of"
"""Key in an operation that another one describes: the path of the other one."""

_BACK = b"""<p style="margin: 0; padding: 12px 20px; font: 15px sans-serif"><a href="./">Console</a></p>"""
_HEAD = b"""<style>
:root { color-scheme: light dark }
.swagger-ui .opblock-body { overflow-x: auto }
.dark-mode .swagger-ui .header-col { color: inherit }
</style>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();
const once = (tags) =>
  tags.map((tag) => tag.update("operations", (all) => all.filterNot((one) => one.hasIn(["operation", "%b"]))))
    .filter((tag) => tag.get("operations").size);
const listed = { wrapSelectors: { taggedOperations: (found) => (...given) => once(found(...given)) } };
</script>
""" % _ALIAS.encode()
"""Fixes for Swagger UI: its dark colors omit header names and must be switched on by the page, and its tables are too
wide for a phone. The script lists an endpoint once, whatever its paths.
"""

_BUNDLE = b"SwaggerUIBundle({"
_LISTED_ONCE = _BUNDLE + b" plugins: [() => ({ statePlugins: { spec: listed } })],"

# Examples are in the schemas: Swagger UI would send an `example` beside them with every request.
_PARAMETERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {
        "description": "Request ID, used in the reply, in errors and in the log. Generated if absent.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=@-]{1,128}$"},
    },
    "X-Request-Timeout-Ms": {
        "description": "Deadline of the request in milliseconds. Later answers become 504.",
        "schema": {"type": "string", "pattern": "^[0-9]{1,9}(\\.[0-9]{1,6})?$", "examples": ["1000"]},
    },
    "X-Request-Priority": {
        "description": "Priority: 1 (highest) to 3, or 4 for bulk work. 0 means the default, 2.",
        "schema": {"type": "integer", "enum": [0, 1, 2, 3, 4]},
    },
    "traceparent": {
        "description": "Trace of the request (W3C Trace Context), if the server exports traces.",
        "schema": {"type": "string"},
    },
    "Inference-Header-Content-Length": {
        "description": "Size of the JSON in bytes if binary tensors follow it. Without this header, the whole body is"
        " JSON. 0: the body is raw data of the model's only input, one text or one row of token IDs.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "Prefer": {
        "description": "`return=minimal` omits the cost tables.",
        "schema": {"type": "string", "examples": ["return=minimal"]},
    },
    "If-None-Match": {
        "description": "`ETag` of the cached page. The reply is 304 if it is unchanged.",
        "schema": {"type": "string"},
    },
}
_INFERRING = ("X-Request-Timeout-Ms", "X-Request-Priority", "traceparent")


def _header(description: str, kind: str = "string") -> dict[str, Any]:
    return {"description": description, "schema": {"type": kind}}


_ID_HEADER = {"X-Request-Id": _header("Request ID.")}
_BODY_HEADERS = {
    "X-Ignored-Fields": _header(
        "Unknown fields of the body that were ignored: up to eight names, separated by commas, and `+` with the"
        " number of others. Absent if there are none."
    )
}
_OUTCOME_HEADERS = {
    "Server-Timing": _header("Duration of `tokenize`, `queue` and `compute`, and the `total`, in milliseconds."),
    "X-Compute-Type": _header(
        f"Compute type: {', '.join(map('`{}`'.format, COMPUTE_TYPES[:-1]))} or `{COMPUTE_TYPES[-1]}`."
    ),
    "X-Compute-Tokens": _header("Tokens computed, including special tokens.", "integer"),
    "X-Truncated-Tokens": _header("Tokens removed by truncation.", "integer"),
    "X-Cache": _header("`hit` if the answer came from the cache. Absent otherwise."),
}
_TEI_HEADERS = {
    "X-Compute-Characters": _header("Characters in the texts.", "integer"),
    "X-Total-Time": _header("Total time in whole milliseconds, same as X-Compute-Time.", "integer"),
    "X-Compute-Time": _header("Total time in whole milliseconds, same as X-Total-Time.", "integer"),
    "X-Tokenization-Time": _header("Tokenization time in whole milliseconds.", "integer"),
    "X-Queue-Time": _header("Queue time in whole milliseconds.", "integer"),
    "X-Inference-Time": _header("Inference time in whole milliseconds.", "integer"),
}
_MORE_HEADERS = {
    "Inference-Header-Content-Length": _header("Size of the JSON in bytes if binary tensors follow it.", "integer"),
    "Content-Encoding": _header("`gzip` or `deflate`, if the request accepts only that one."),
    "Preference-Applied": _header("`return=minimal`, if the request preferred it."),
    "ETag": _header("Tag of the page, for `If-None-Match`."),
}
_RETRY_HEADERS = {
    "Retry-After": _header("Seconds to wait before a retry.", "integer"),
    "Retry-After-Ms": _header("Milliseconds to wait before a retry, with jitter.", "integer"),
}
_ERROR_HEADERS = {
    _NO_KEY: {"WWW-Authenticate": _header("`Bearer`.")},
    405: {"Allow": _header("Methods of this path.")},
    415: {"Accept-Encoding": _header("Supported encodings of the body.")},
    429: _RETRY_HEADERS,
    503: _RETRY_HEADERS
    | {
        "X-Computed": _header(
            "`none` if nothing was computed, so that another replica can be tried at once. Absent otherwise."
        )
    },
}


async def document(
    routes: Iterable[Route], errors_of: Mapping[str, ErrorFormat], context: AppContext, public: Collection[str]
) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the routes that a loaded model answers, or that need no model.

    Args:
        routes: All routes.
        errors_of: What is called an error, by path.
        context: What the models and limits are read from.
        public: Paths that need no API key.
    """
    listed = [(route, route.docs) for route in routes if route.docs is not None]
    listed = [(route, docs) for route, docs in listed if docs.models is None or docs.models(context)]
    made = await asyncio.to_thread(_described, [route for route, _ in listed])
    shown = _shown(listed[::-1], context)  # of equal routes, the one with the topmost decorator
    types = [kind for route, docs in listed for kind in (*_taken(docs), docs.gives, errors_of[route.path].body) if kind]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, types), schemas, strict=True))
    for component in components.values():
        if component.get("additionalProperties") is False:  # a request message
            _by_rule(component)
    for route, docs in listed:
        keyed = context.keys is not None and (route.path not in public or docs.takes is not None)
        entry = made["paths"][route.path][route.method.lower()]
        entry["parameters"] = _parameters(route, docs, context)
        entry |= _beside(route, shown[route.method, route.endpoint])
        example = docs.example(context) if callable(docs.example) else docs.example
        if docs.takes is not None:
            entry["requestBody"] = _body(docs, schema_of, example)
        errors = errors_of[route.path]
        causes = _causes(route, docs, errors, context, keyed=keyed)
        entry["responses"] = {"200": _done(route, docs, schema_of)} | _refusals(docs, schema_of, errors, causes)
        if docs.gives is not None:
            reply = await _reply(route, docs, context, example)
            if reply is not None:
                entry["responses"]["200"]["content"][_JSON]["example"] = reply
        if keyed:
            entry["security"] = [{_KEY: []}]
    made["components"] = {"schemas": components}
    if context.keys is not None:
        made["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return made


def _shown(listed: Sequence[tuple[Route, Docs]], context: AppContext) -> dict[tuple[str, Endpoint], list[Route]]:
    """The routes of each endpoint; `/docs` lists the first one.

    The first one has the fewest parameters: a model's name only if several models answer, and no version.
    """

    def parameters(route: Route, docs: Docs) -> tuple[bool, int]:
        several = docs.models is not None and len(docs.models(context)) > 1
        return several and "{model}" not in route.path, route.path.count("{")

    found: defaultdict[tuple[str, Endpoint], list[Route]] = defaultdict(list)
    for route, _ in sorted(listed, key=lambda entry: parameters(*entry)):
        found[route.method, route.endpoint].append(route)
    return found


def _beside(route: Route, routes: Sequence[Route]) -> dict[str, str]:
    first, *others = routes
    if route is not first:
        return {_ALIAS: first.path}
    return {"description": "\n".join(f"- Also `{other.path}`: {other.summary}" for other in others)} if others else {}


def _described(routes: Iterable[Route]) -> dict[str, Any]:
    """The routes as FastAPI describes them; without HEAD, which it would list as an operation of its own."""
    from fastapi.openapi.utils import get_openapi  # noqa: PLC0415  see the module
    from fastapi.routing import APIRoute  # noqa: PLC0415  likewise

    return get_openapi(
        title=SERVER_NAME,
        version=SERVER_VERSION,
        description=f"Low-latency BERT inference. The [console](./) tries the models. {_ABOUT_EXAMPLES}",
        servers=[{"url": "./"}],  # relative to this document: a proxy may strip a prefix
        routes=[
            APIRoute(
                route.path,
                lambda: None,
                methods=[route.method],
                operation_id=_operation_id(route),
                tags=[route.tag],
                summary=route.summary,
                response_model=None,
            )
            for route in routes
        ],
    )


def _operation_id(route: Route) -> str:
    words = [word.strip("{}") for word in route.path.replace("-", "_").split("/") if word]
    return "_".join([route.method.lower(), *words])


def _by_rule(schema: dict[str, Any]) -> None:
    """Adapts a message's schema to the rule for fields: null omits a field, and unknown fields are allowed."""
    del schema["additionalProperties"]
    for name in schema["properties"].keys() - set(schema.get("required", ())):
        field = schema["properties"][name]
        choices = (
            field["anyOf"] if field.keys() <= {"anyOf", "default"} and "anyOf" in field else [_without_default(field)]
        )
        if {"type": "null"} not in choices:
            default = {"default": field["default"]} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [*choices, {"type": "null"}], **default}


def _without_default(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != "default"}


def _parameters(route: Route, docs: Docs, context: AppContext) -> list[dict[str, Any]]:
    values: dict[str, Sequence[str]] = {
        "model": docs.models(context) if docs.models else (),
        "version": context.v2.versions,
    }
    schemas = {name: {"type": "string", "enum": list(known)} for name, known in values.items()}
    parts = [
        {"name": name, "in": "path", "required": True, "schema": schemas.get(name, {"type": "string"})}
        for name in (part[1:-1] for part in route.path.split("/") if part.startswith("{"))
    ]
    headers = ["X-Request-Id", *(_INFERRING if route.infers else ()), *docs.takes_headers]
    return [*parts, *[{"name": name, "in": "header", **_PARAMETERS[name]} for name in headers]]


def _taken(docs: Docs) -> Sequence[Any]:
    return docs.takes if isinstance(docs.takes, tuple) else (docs.takes,)


def _body(docs: Docs, schema_of: dict[str, Any], example: object) -> dict[str, Any]:
    schemas = [schema_of[repr(kind)] for kind in _taken(docs)]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content: dict[str, Any] = {_JSON: {"schema": schema, "example": example}}
    if docs.binary:
        content[_OCTETS] = _BYTES
    compressed = "Uncompressed, or with the `Content-Encoding` `gzip` or `deflate`."
    return {"description": compressed, "required": not docs.body_optional, "content": content}


async def _reply(route: Route, docs: Docs, context: AppContext, example: object) -> Any:  # noqa: ANN401  any JSON
    """An example of a route's reply, to the route's example request if it has one."""
    if docs.reply is not None:
        return docs.reply
    names = docs.models(context) if docs.models else [""]
    parameters = {"model": names[0]} if "{model}" in route.path else {}
    if "{version}" in route.path:
        parameters["version"] = context.v2.view(names[0]).model.version
    body = b"" if docs.takes is None else msgspec.json.encode(example)
    return await reply_to(route, route.path.format(**parameters), parameters, body, context)


def _done(route: Route, docs: Docs, schema_of: dict[str, Any]) -> dict[str, Any]:
    more = _OUTCOME_HEADERS if route.infers else {}
    if more and route.tag == "TEI":
        more = more | _TEI_HEADERS
    named = {name: _MORE_HEADERS[name] for name in docs.gives_headers}
    if docs.takes is not None:
        more = more | _BODY_HEADERS
    done: dict[str, Any] = {"description": "Done.", "headers": _ID_HEADER | more | named}
    if docs.gives is not None:
        done["content"] = {_JSON: {"schema": schema_of[repr(docs.gives)]}}
        if docs.binary:
            done["content"][_OCTETS] = _BYTES
    return done


def _malformed(route: Route, docs: Docs, errors: ErrorFormat) -> str:
    causes = {
        "the body is not UTF-8 JSON": docs.takes is not None,
        _BREAKS: docs.takes is not None and errors.invalid_status == _BAD_REQUEST,
        f"{errors.empty} is empty": route.infers and errors.empty,
        "several models match and none is named": route.infers and "{model}" not in route.path,
        "the model is for another task": route.infers and errors.wrong_task_status == _BAD_REQUEST,
    }
    return "; or ".join(["The request is not HTTP/1.1", *[cause for cause, may_be in causes.items() if may_be]]) + "."


def _causes(route: Route, docs: Docs, errors: ErrorFormat, context: AppContext, *, keyed: bool) -> dict[int, str]:
    """Why a request of a route is rejected, by status."""
    settings, takes = context.settings, docs.takes is not None
    inferring, named = takes and not docs.body_optional, "{model}" in route.path
    when = {
        400: _malformed(route, docs, errors),
        405: "The method is not allowed; `Allow` lists the allowed ones.",
        408: "The headers or the body did not arrive in time.",
        413: f"The body exceeds {settings.body_limit_bytes:,} bytes, as sent or decompressed.",
        415: "The `Content-Type` or `Content-Encoding` of the body is not supported.",
        421: "The host is not allowed.",
        431: f"The headers exceed {MAX_HEADER_BYTES:,} bytes, or there are too many.",
        500: "Internal error, or the engine failed on this input. Search the log for the request ID.",
        503: "The server is starting, draining or restarting its engine, or its buffers are full. Try again later.",
    }
    if keyed:
        when[_NO_KEY] = "The API key is missing or invalid."
    if named:
        when[404] = f"The model{' or version' if '{version}' in route.path else ''} does not exist."
    elif takes and errors.model_named == IN_BODY:
        when[404] = "Several models serve the task, and `model` names none of them."
    if takes and errors.invalid_status != _BAD_REQUEST:
        when[errors.invalid_status] = f"{_BREAKS[0].upper()}{_BREAKS[1:]}."
    if takes and errors.wrong_task_status != _BAD_REQUEST:
        when[errors.wrong_task_status] = "The model is for another task."
    if inferring:
        when[429] = "The server is overloaded: the queue is full, or the answer would be late. Try again later."
        when[504] = "The deadline has passed, or cannot be met."
    return when | {status: f"{said} {when.get(status, '')}".strip() for status, said in docs.statuses.items()}


def _refusals(docs: Docs, schema_of: dict[str, Any], errors: ErrorFormat, causes: Mapping[int, str]) -> dict[str, Any]:
    fault = schema_of[repr(errors.body)]
    responses = {}
    for status in sorted(causes):
        # Probes and readiness report their state with an error status.
        own = status in docs.statuses and docs.gives is not None
        responses[str(status)] = {
            "description": causes[status],
            "headers": _ID_HEADER | _ERROR_HEADERS.get(status, {}),
            "content": {_JSON: {"schema": {"anyOf": [fault, schema_of[repr(docs.gives)]]} if own else fault}},
        }
    return responses


@cache
def _asset(name: str) -> bytes:
    return (files("fastapi_swagger") / "resources" / name).read_bytes()


@cache
def _page() -> bytes:
    from fastapi.openapi.docs import get_swagger_ui_html  # noqa: PLC0415  see the module

    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=SERVER_NAME,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"defaultModelsExpandDepth": 0},
    )
    body = bytes(page.body).replace(_BUNDLE, _LISTED_ONCE, 1)
    return body.replace(b"</head>", _HEAD + b"</head>", 1).replace(b"<body>", b"<body>\n" + _BACK, 1)


def docs_router(openapi: Callable[[], Awaitable[dict[str, Any]]]) -> Router:
    """The routes `/docs`, `/openapi.json` and the page's assets, all served locally."""
    router = Router("Documentation")

    @router.get("/docs")
    async def docs(_: AppContext, __: HttpRequest) -> HttpReply:
        return HttpReply(await asyncio.to_thread(_page), content_type=b"text/html; charset=utf-8")

    @router.get("/openapi.json")
    async def schema(_: AppContext, __: HttpRequest) -> HttpReply:
        return json_reply(await openapi())

    def asset(name: str, kind: bytes) -> None:
        @router.get(f"/docs/{name}")
        async def serve(_: AppContext, __: HttpRequest) -> HttpReply:
            # The first read is a megabyte from a disk, and may be slow on a network file system.
            return HttpReply(await asyncio.to_thread(_asset, name), content_type=kind)

    for name, kind in _ASSETS.items():
        asset(name, kind)
    return router
