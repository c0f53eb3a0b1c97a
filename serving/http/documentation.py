"""The OpenAPI document, made from the very types that requests are decoded with, and its page `/docs`."""

from __future__ import annotations

from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html

from serving.http.exchange import HttpReply, Operation
from serving.http.faults import TeiError, error_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.http.exchange import HttpRequest

UNLISTED = ""
"""The tag of operations that the document leaves out: pages, and routes that no model here answers."""

_JSON, _OCTETS = "application/json", "application/octet-stream"
_ANYWHERE = (400, 404, 405, 408, 413, 415, 431, 500, 503)
"""The errors of any route: of the connection, of the server."""

_INFERRING = (422, 429, 504)
"""And of those that take a body."""

_WRONG_TASK = 424
_NO_KEY = 401
_KEY = "key"
_ASSETS = {"swagger-ui-bundle.js": b"text/javascript", "swagger-ui.css": b"text/css"}


def document(operations: Sequence[Operation], version: str, *, keyed: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes.

    Args:
        operations: The routes.
        version: Of the server.
        keyed: Whether those that are not open need an API key.
    """
    operations = [op for op in operations if op.tag != UNLISTED]
    types = [kind for op in operations for kind in (op.request, op.reply, error_type(op.path)) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip([repr(kind) for kind in types], schemas, strict=True))
    paths: dict[str, Any] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op, schema_of, keyed=keyed and not op.open)
    parts: dict[str, Any] = {"schemas": components}
    if keyed:
        parts["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "bertserve", "version": version, "description": "Low-latency BERT inference."},
        "paths": paths,
        "components": parts,
    }


def _identity(op: Operation) -> str:
    words = [word.strip("{}") for word in op.path.replace("-", "_").split("/") if word]
    return "_".join([op.method.lower(), *words])


def _operation(op: Operation, schema_of: dict[str, Any], *, keyed: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"operationId": _identity(op), "summary": op.summary, "tags": [op.tag]}
    names = [part[1:-1] for part in op.path.split("/") if part.startswith("{")]
    entry["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": list(op.values[name])}}
        for name in names
    ]
    if op.request is not None:
        entry["requestBody"] = _body(op, schema_of)
    entry["responses"] = _responses(op, schema_of, (_NO_KEY,) if keyed else ())
    if keyed:
        entry["security"] = [{_KEY: []}]
    return entry


def _body(op: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {_JSON: {"schema": schema_of[repr(op.request)], "example": op.example}}
    if op.binary:
        content[_OCTETS] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": not op.body_optional, "content": content}


def _responses(op: Operation, schema_of: dict[str, Any], more: Sequence[int]) -> dict[str, Any]:
    done: dict[str, Any] = {"description": "Done."}
    if op.reply is not None:
        done["content"] = {_JSON: {"schema": schema_of[repr(op.reply)]}}
        if op.binary:
            done["content"][_OCTETS] = {"schema": {"type": "string", "format": "binary"}}
    family = error_type(op.path)
    statuses = {*_ANYWHERE, *more, *op.statuses, *(_INFERRING if op.request is not None else ())}
    if family is TeiError:
        statuses.add(_WRONG_TASK)
    fault = {_JSON: {"schema": schema_of[repr(family)]}}
    responses = {"200": done}
    for status in sorted(statuses):
        # Probes and readiness answer their own state with an error's status.
        own = status in op.statuses and op.reply is not None and family is not TeiError
        content = {_JSON: {"schema": {"anyOf": [fault[_JSON]["schema"], schema_of[repr(op.reply)]]}}} if own else fault
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    return responses


def docs_operations(openapi: dict[str, Any]) -> list[Operation]:
    """`/docs`, `/openapi.json` and the page's assets, all from this server."""
    page = bytes(
        get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="bertserve",
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="data:,",
        ).body
    )
    encoded = msgspec.json.encode(openapi)
    folder = files("fastapi_swagger") / "resources"

    async def docs(_: HttpRequest) -> HttpReply:
        return HttpReply(page, content_type=b"text/html; charset=utf-8")

    async def schema(_: HttpRequest) -> HttpReply:
        return HttpReply(encoded)

    def asset(name: str, kind: bytes) -> Operation:
        async def serve(_: HttpRequest) -> HttpReply:
            return HttpReply((folder / name).read_bytes(), content_type=kind)

        return Operation("GET", f"/docs/{name}", serve, "An asset of the page.", UNLISTED)

    return [
        Operation("GET", "/docs", docs, "This documentation.", UNLISTED),
        Operation("GET", "/openapi.json", schema, "The OpenAPI document.", UNLISTED),
        *[asset(name, kind) for name, kind in _ASSETS.items()],
    ]
