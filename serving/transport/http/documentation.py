"""The OpenAPI document, made from the very types that requests are decoded with, and its page `/docs`."""

from __future__ import annotations

from http import HTTPStatus
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.openapi.docs import get_swagger_ui_html

from serving.transport.http.exchange import HttpReply, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.transport.http.exchange import HttpRequest

UNLISTED = ""
"""The tag of operations that the document leaves out: pages, and routes that no model here answers."""

_ERRORS = (400, 404, 405, 408, 413, 415, 422, 429, 431, 500, 503, 504)
_ASSETS = {"swagger-ui-bundle.js": b"text/javascript", "swagger-ui.css": b"text/css"}


def document(operations: Sequence[Operation], version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    operations = [op for op in operations if op.tag != UNLISTED]
    types = [kind for op in operations for kind in (op.request, op.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip([repr(kind) for kind in types], schemas, strict=True))
    paths: dict[str, Any] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "bertserve", "version": version, "description": "Low-latency BERT inference."},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(op: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Done."}
    if op.reply is not None:
        answer["content"] = {"application/json": {"schema": schema_of[repr(op.reply)]}}
    responses = {"200": answer}
    entry: dict[str, Any] = {"summary": op.summary, "tags": [op.tag], "responses": responses}
    names = [part[1:-1] for part in op.path.split("/") if part.startswith("{")]
    entry["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
    ]
    if op.request is not None:
        content = {"schema": schema_of[repr(op.request)], "example": op.example}
        entry["requestBody"] = {"required": True, "content": {"application/json": content}}
        responses |= {str(status): {"description": HTTPStatus(status).phrase} for status in _ERRORS}
    return entry


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
