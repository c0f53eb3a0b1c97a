"""HTTP error replies: each protocol family has its own body and some statuses.

/v2        {"error": "text"}                                           Triton, KServe; a schema violation is 400
/v1        {"error": {"message", "type", "param", "code"}, "detail"}   OpenAI, `/embeddings`; a schema violation is 400
TEI, /     {"error": "text", "error_type": "Validation"}               a wrong model type is 424
Cohere     {"id", "message", "detail"}                                 /v1/embed, /v1/rerank, /v2/embed, /v2/rerank
all else   {"error": {"reason", "message", "request_id"}}

`detail` repeats the message for clients of Jina and Voyage, which read no other field.
A route of a named model, `/models/{name}/...`, belongs to the family of the route after the name.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.errors import (
    BertserveError,
    BuffersFull,
    EmptyInput,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotNamed,
    NotReady,
    Overloaded,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
    WrongTask,
)
from bertserve.serving.http.exchange import HttpReply

if TYPE_CHECKING:
    from collections.abc import Mapping

TEI_PATHS = frozenset(
    {
        *("/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity"),
        *("/tokenize", "/decode", "/info", "/health"),
        *("/", "/ping", "/invocations", "/vertex"),
    }
)
_OF_ANY_TASK = frozenset({"/", "/invocations", "/vertex"})
COHERE_PATHS = frozenset({"/v1/embed", "/v2/embed", "/v1/rerank", "/v2/rerank"})

_NAMED = "/models/"
_SCHEMA = 422
_BAD_REQUEST = 400
_TEI_STATUS: Mapping[type[BertserveError], int] = {WrongTask: 424}
_TEI_TYPES: Mapping[type[BertserveError], str] = {
    EmptyInput: "Empty",
    WrongTask: "Backend",
    InvalidRequest: "Validation",
    Overloaded: "Overloaded",
    BuffersFull: "Overloaded",
    Unavailable: "Unhealthy",
    BertserveError: "Backend",
}
_OPENAI_TYPES: Mapping[type[BertserveError], str] = {
    InvalidRequest: "invalid_request_error",
    Overloaded: "rate_limit_error",
    BertserveError: "server_error",
}


class V2Error(msgspec.Struct):
    """An error of the Open Inference Protocol v2."""

    error: str


class TeiError(msgspec.Struct):
    """An error of text-embeddings-inference."""

    error: str
    error_type: str


class CohereError(msgspec.Struct):
    """An error of Cohere's API; `id` is the request's id."""

    id: str
    message: str
    detail: str


class OpenAiDetail(msgspec.Struct):
    """An error's details: `param` is the field, if there is one; `code` is this server's reason."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAiError(msgspec.Struct):
    """An error of OpenAI's API."""

    error: OpenAiDetail
    detail: str


class Detail(msgspec.Struct):
    """An error's details: a machine-readable reason and a message for people."""

    reason: str
    message: str
    request_id: str


class OwnError(msgspec.Struct):
    """An error of this server's own routes."""

    error: Detail


def error_type(path: str) -> type[msgspec.Struct]:
    path = _plain(path)
    if path in TEI_PATHS:
        return TeiError
    if path in COHERE_PATHS:
        return CohereError
    if path == "/v2" or path.startswith("/v2/"):
        return V2Error
    return OpenAiError if path.startswith("/v1/") or path == "/embeddings" else OwnError


def status_of(path: str, error: BertserveError) -> int:
    family = error_type(path)
    if family is TeiError:
        return _TEI_STATUS.get(type(error), error.http_status)
    if family in (V2Error, OpenAiError) and error.http_status == _SCHEMA:
        return _BAD_REQUEST
    return error.http_status


def error_body(path: str, error: BertserveError, identity: str) -> bytes:
    family = error_type(path)
    message = error.message
    if isinstance(error, ModelNotNamed):
        in_path = f"in the path: POST /models/NAME{'' if path in _OF_ANY_TASK else path}"
        message += f" {'in `model`' if family in (OpenAiError, CohereError) else in_path}"
    body: Any = OwnError(Detail(error.reason, message, identity))
    if family is V2Error:
        body = V2Error(message)
    elif family is TeiError:
        body = TeiError(message, _first(_TEI_TYPES, error))
    elif family is CohereError:
        body = CohereError(identity, message, message)
    elif family is OpenAiError:
        param = error.param if isinstance(error, InvalidRequest) else None
        body = OpenAiError(OpenAiDetail(message, _first(_OPENAI_TYPES, error), param, error.reason), message)
    return msgspec.json.encode(body)


def _plain(path: str) -> str:
    """The path without the model's name."""
    if not path.startswith(_NAMED):
        return path
    return path[path.find("/", len(_NAMED)) :] if "/" in path[len(_NAMED) :] else "/"


def _first(table: Mapping[type[BertserveError], str], error: BertserveError) -> str:
    return next(name for kind, name in table.items() if isinstance(error, kind))


def error_reply(path: str, error: BertserveError, identity: str) -> HttpReply:
    head = b""
    if (after_ms := error.retry_after_ms) is not None:
        seconds = max(1, math.ceil(error.retry_after_s or 0))
        head = b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (seconds, after_ms)
    if isinstance(error, NotReady) and not error.begun:
        head += b"x-computed: none\r\n"
    if isinstance(error, MethodNotAllowed):
        head += b"allow: %b\r\n" % error.allowed.encode()
    if isinstance(error, UnsupportedMediaType):
        head += b"accept-encoding: gzip, deflate\r\n"
    if isinstance(error, Unauthenticated):
        head += b"www-authenticate: Bearer\r\n"
    return HttpReply(error_body(path, error, identity), status_of(path, error), head=head, error=error)
