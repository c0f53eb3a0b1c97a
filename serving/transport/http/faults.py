"""Errors as HTTP writes them: each protocol family has a body of its own, and a few statuses.

/v2        {"error": "text"}                                Triton, KServe; breaking the schema is 400
/v1        {"error": {"message", "type", "param", "code"}}  OpenAI
TEI's      {"error": "text", "error_type": "Validation"}    an empty list is 400, a wrong model type 424
all else   {"error": {"reason", "message", "request_id"}}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from serving.errors import (
    BertserveError,
    EmptyInput,
    InvalidRequest,
    Overloaded,
    RouteNotFound,
    Unavailable,
    WrongTask,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

TEI_PATHS = frozenset({"/embed", "/predict", "/rerank"})

_SCHEMA = 422
_BAD_REQUEST = 400
_TEI_STATUS: Mapping[type[BertserveError], int] = {EmptyInput: 400, WrongTask: 424}
_TEI_TYPES: Mapping[type[BertserveError], str] = {
    EmptyInput: "Empty",
    WrongTask: "Backend",
    InvalidRequest: "Validation",
    Overloaded: "Overloaded",
    Unavailable: "Unhealthy",
    BertserveError: "Backend",
}
_OPENAI_TYPES: Mapping[type[BertserveError], str] = {
    InvalidRequest: "invalid_request_error",
    Overloaded: "rate_limit_error",
    BertserveError: "server_error",
}


def status_of(path: str, error: BertserveError) -> int:
    """The HTTP status of an error on a path."""
    if path in TEI_PATHS:
        return _TEI_STATUS.get(type(error), error.http_status)
    if _is_v2(path) and error.http_status == _SCHEMA:
        return _BAD_REQUEST
    return error.http_status


def error_body(path: str, error: BertserveError, identity: str) -> bytes:
    """The JSON body of an error on a path."""
    if _is_v2(path):
        return orjson.dumps({"error": error.message})
    if path in TEI_PATHS:
        return orjson.dumps({"error": error.message, "error_type": _first(_TEI_TYPES, error)})
    if path.startswith("/v1/") and not isinstance(error, RouteNotFound):
        kind = _first(_OPENAI_TYPES, error)
        return orjson.dumps({"error": {"message": error.message, "type": kind, "param": None, "code": error.reason}})
    return orjson.dumps({"error": {"reason": error.reason, "message": error.message, "request_id": identity}})


def _is_v2(path: str) -> bool:
    return path == "/v2" or path.startswith("/v2/")


def _first(table: Mapping[type[BertserveError], str], error: BertserveError) -> str:
    return next(name for kind, name in table.items() if isinstance(error, kind))
