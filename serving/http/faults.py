"""HTTP errors: each protocol has its own body and some statuses, which its router names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from bertserve.serving.errors import (
    BertserveError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotNamed,
    NotReady,
    Unauthenticated,
    UnsupportedMediaType,
    WrongTask,
)
from bertserve.serving.http.exchange import HttpReply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

IN_BODY = "in `model`"


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """What a protocol calls its errors.

    Attributes:
        body: Type of the body.
        write: Makes the body from an error, its message and the request's id.
        invalid_status: Status of a request that breaks the schema.
        wrong_task_status: Status of a request for a model of another task.
        model_named: Where a request names the model; `{path}` is the request's path.
        empty: What must not be empty, for the document; "" if it says nothing of that.
    """

    body: type[msgspec.Struct]
    write: Callable[[BertserveError, str, str], msgspec.Struct]
    invalid_status: int = InvalidRequest.http_status
    wrong_task_status: int = WrongTask.http_status
    model_named: str = "in the path: POST /models/NAME{path}"
    empty: str = ""

    def reply(self, error: BertserveError, path: str, identity: str) -> HttpReply:
        message, status, head = error.message, error.http_status, b""
        if isinstance(error, ModelNotNamed):
            message += " " + self.model_named.format(path=path)
        if status == InvalidRequest.http_status:
            status = self.invalid_status
        elif isinstance(error, WrongTask):
            status = self.wrong_task_status
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
        return HttpReply(msgspec.json.encode(self.write(error, message, identity)), status, head=head, error=error)


def word_of(words: Mapping[type[BertserveError], str], error: BertserveError) -> str:
    """The word of a protocol for an error: that of the first class to which it belongs."""
    return next(word for kind, word in words.items() if isinstance(error, kind))


class Detail(msgspec.Struct):
    """An error's details: a machine-readable reason and a message for people."""

    reason: str
    message: str
    request_id: str


class OwnError(msgspec.Struct):
    """An error of this server's own routes."""

    error: Detail


OWN = ErrorFormat(OwnError, lambda error, message, identity: OwnError(Detail(error.reason, message, identity)))
