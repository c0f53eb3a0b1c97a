"""One HTTP exchange: the request as handlers see it, their reply, and the boundary around them.

A handler is a function from `HttpRequest` to `HttpReply` that raises `BertserveError`. `answer` is HTTP's
boundary: nothing but a listed error leaves it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from serving.errors import (
    BertserveError,
    ClientGone,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    UnsupportedMediaType,
)
from serving.records import DEFAULT_PRIORITY
from serving.transport.http.faults import error_body, status_of
from serving.transport.priority import priority_of

if TYPE_CHECKING:
    from serving.records import Outcome

log = logging.getLogger("bertserve.http")

JSON = b"application/json"

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TIMEOUT = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")
_DIGIT = re.compile(rb"[0-9]")
_serial = itertools.count(1)
_process = os.urandom(6).hex()

Headers = list[tuple[bytes, bytes]]


def request_id(given: bytes | None) -> str:
    """The client's id where it is harmless in a log, else one of our own."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{_process}-{next(_serial):x}"


class HttpRequest(msgspec.Struct):
    """A request whose body has been read whole.

    Attributes:
        method: In capitals.
        path: Decoded, without the query.
        headers: By lower-case name; of several lines of one name, the first.
        body: The body.
        request_id: Ours or the client's.
        arrival: When it was complete, on the clock `time.perf_counter`.
        parameters: The parts of the path that its route names.
    """

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    request_id: str
    arrival: float
    parameters: dict[str, str] = {}

    def header(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        return self.headers.get(name)

    def path_parameter(self, name: str) -> str | None:
        """A part of the path."""
        return self.parameters.get(name)

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

    def priority(self) -> int:
        """`X-Request-Priority`.

        Raises:
            InvalidRequest: It is no class of requests.
        """
        given = self.headers.get(b"x-request-priority")
        if given is None:
            return DEFAULT_PRIORITY
        return priority_of(int(given) if _DIGIT.fullmatch(given) else None, "the header X-Request-Priority")

    def refuse_encoding(self) -> None:
        """Refuses a compressed body: what it would grow to is not known before it is read.

        Raises:
            UnsupportedMediaType: By its Content-Encoding.
        """
        given = self.headers.get(b"content-encoding")
        if given is not None and given.strip().lower() not in {b"", b"identity"}:
            raise UnsupportedMediaType("compressed bodies are not read; send the body without Content-Encoding")

    def require_json(self) -> None:
        """Refuses a body that does not say it is JSON.

        Raises:
            UnsupportedMediaType: By its Content-Type.
        """
        given = self.headers.get(b"content-type", b"")
        if given == JSON:
            return
        given = given.split(b";")[0].strip().lower()
        if given != JSON and not (given.startswith(b"application/") and given.endswith(b"+json")):
            raise UnsupportedMediaType("the Content-Type must be application/json")


class HttpReply(msgspec.Struct):
    """What goes back: a whole body, never a stream."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = []


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
    if (after_ms := error.retry_after_ms) is not None:
        seconds = max(1, math.ceil(error.retry_after_s or 0))
        headers += [(b"retry-after", b"%d" % seconds), (b"retry-after-ms", b"%d" % after_ms)]
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    return HttpReply(error_body(path, error, identity), status_of(path, error), headers=headers)


async def answer(
    request: HttpRequest, find: Callable[[HttpRequest], Handler], record_error: Callable[[BertserveError], None]
) -> HttpReply | None:
    """Runs the handler of a request; None where its client has gone.

    Args:
        request: The request.
        find: Gives its handler, or raises.
        record_error: Told of each error.
    """
    error: BertserveError
    try:
        handler = find(request)
        if request.body:
            request.refuse_encoding()
        return await handler(request)
    except BertserveError as refusal:
        error = refusal
    except asyncio.CancelledError:
        # Only the end of the client's connection cancels an exchange: there is nobody to answer.
        record_error(ClientGone("the client closed the connection"))
        return None
    except Exception:  # the HTTP boundary
        log.exception("request %s failed", request.request_id)
        error = InternalError("internal error; the server's log has the details under this request id")
    record_error(error)
    return error_reply(request.path, error, request.request_id)
