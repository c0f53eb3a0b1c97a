"""One HTTP exchange: the request as handlers see it, their reply, and the boundary around them.

A handler is a function from `HttpRequest` to `HttpReply` that raises `BertserveError`; `Endpoint` makes an
ASGI application of it. This is HTTP's boundary: nothing but a listed error leaves it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serving.errors import (
    BertserveError,
    ClientGone,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    UnsupportedMediaType,
)
from serving.transport.http.faults import error_body, status_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from serving.records import Outcome

log = logging.getLogger("bertserve.http")

JSON = b"application/json"

REPLY = "bertserve.reply"
"""Extension of the ASGI scope: a coroutine function (status, headers, body) that sends a whole reply."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TIMEOUT = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")
_serial = itertools.count(1)
_process = os.urandom(6).hex()

Headers = list[tuple[bytes, bytes]]


def request_id(given: bytes | None) -> str:
    """The client's id where it is harmless in a log, else one of our own."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{_process}-{next(_serial):x}"


@dataclass(slots=True)
class HttpRequest:
    """A request whose body has been read whole.

    Attributes:
        scope: ASGI's connection scope.
        body: The body.
        request_id: Ours or the client's.
        arrival: When it was complete, on the clock `time.perf_counter`.
    """

    scope: Scope
    body: bytes
    request_id: str
    arrival: float

    def header(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def path_parameter(self, name: str) -> str | None:
        """A part of the path."""
        value = self.scope["path_params"].get(name)
        return None if value is None else str(value)

    def timeout_ms(self) -> float | None:
        """`X-Request-Timeout-Ms`.

        Raises:
            InvalidRequest: It is not a positive number.
        """
        given = self.header(b"x-request-timeout-ms")
        if given is None:
            return None
        if not _TIMEOUT.fullmatch(given) or float(given) <= 0:
            raise InvalidRequest("the header X-Request-Timeout-Ms must be a positive number of milliseconds")
        return float(given)

    def refuse_encoding(self) -> None:
        """Refuses a compressed body: what it would grow to is not known before it is read.

        Raises:
            UnsupportedMediaType: By its Content-Encoding.
        """
        if (self.header(b"content-encoding") or b"identity").strip().lower() != b"identity":
            raise UnsupportedMediaType("compressed bodies are not read; send the body without Content-Encoding")

    def require_json(self) -> None:
        """Refuses a body that does not say it is JSON.

        Raises:
            UnsupportedMediaType: By its Content-Type.
        """
        given = (self.header(b"content-type") or b"").split(b";")[0].strip().lower()
        if given != JSON and not (given.startswith(b"application/") and given.endswith(b"+json")):
            raise UnsupportedMediaType("the Content-Type must be application/json")


@dataclass(slots=True)
class HttpReply:
    """What goes back: a whole body, never a stream."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = field(default_factory=list)


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


@dataclass(slots=True, frozen=True)
class Operation:
    """A route and what the documentation says of it.

    Attributes:
        request: Type of the JSON body, if there is one.
        reply: Type of the JSON reply, if it is JSON.
        example: A request that works.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    request: Any = None
    reply: Any = None
    example: Any = None


def outcome_headers(outcome: Outcome[Any]) -> Headers:
    """The stage times (Server-Timing: milliseconds with three decimals) and the token counts."""
    times = outcome.timings
    timing = (
        f"tokenize;dur={times.tokenize_us / 1e3:.3f}, queue;dur={times.queue_us / 1e3:.3f},"
        f" compute;dur={times.compute_us / 1e3:.3f}, total;dur={times.total_us / 1e3:.3f}"
    )
    return [
        (b"server-timing", timing.encode()),
        (b"x-compute-tokens", b"%d" % outcome.tokens),
        (b"x-truncated-tokens", b"%d" % outcome.truncated_tokens),
    ]


def error_reply(path: str, error: BertserveError, identity: str) -> HttpReply:
    """The reply that an error becomes on a path."""
    headers: Headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    return HttpReply(error_body(path, error, identity), status_of(path, error), headers=headers)


class Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, handler: Handler, record_error: Callable[[BertserveError], None]) -> None:
        self._handler = handler
        self._record_error = record_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body, runs the handler, sends its reply or its error."""
        headers = scope["headers"]
        identity = request_id(next((value for name, value in headers if name == b"x-request-id"), None))
        try:
            body = await _read(receive)
            if body is None:
                return
            request = HttpRequest(scope, body, identity, time.perf_counter())
            if body:
                request.refuse_encoding()
            reply = await self._handler(request)
        except BertserveError as error:
            self._record_error(error)
            reply = error_reply(scope["path"], error, identity)
        except asyncio.CancelledError:
            # Only the end of the client's connection cancels an exchange: there is nobody to answer.
            self._record_error(ClientGone("the client closed the connection"))
            return
        except Exception:  # the HTTP boundary
            log.exception("request %s failed", identity)
            failure = InternalError("internal error; the server's log has the details under this request id")
            self._record_error(failure)
            reply = error_reply(scope["path"], failure, identity)
        await _send(scope, send, reply, identity)


async def _read(receive: Receive) -> bytes | None:
    message = await receive()
    if message["type"] != "http.request":
        return None
    body: bytes = message["body"]
    if not message["more_body"]:
        return body
    parts = [body]
    while message["more_body"]:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message["body"])
    return b"".join(parts)


async def _send(scope: Scope, send: Send, reply: HttpReply, identity: str) -> None:
    headers = [
        (b"content-type", reply.content_type),
        (b"content-length", b"%d" % len(reply.body)),
        (b"x-request-id", identity.encode()),
        *reply.headers,
    ]
    whole = scope.get("extensions", {}).get(REPLY)
    if whole is not None:
        await whole(reply.status, headers, reply.body)
        return
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})
