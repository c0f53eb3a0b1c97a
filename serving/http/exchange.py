"""One HTTP exchange: the request as handlers see it, their reply, and the boundary around them.

A handler is a function from `HttpRequest` to `HttpReply` that raises `BertserveError`. `answer` is HTTP's
boundary: nothing but a listed error leaves it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from serving.errors import (
    BertserveError,
    ClientGone,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    RouteNotFound,
    Unauthenticated,
    UnsupportedMediaType,
)
from serving.http.faults import error_body, status_of
from serving.logs import fields
from serving.net.requests import COMPRESSIONS, inflated, priority_of
from serving.records import DEFAULT_PRIORITY, RequestTrace

if TYPE_CHECKING:
    from serving.net.observer import RequestObserver
    from serving.net.requests import RecordError
    from serving.records import Outcome

log = logging.getLogger("bertserve.http")

JSON = b"application/json"
OCTETS = b"application/octet-stream"

_TIMEOUT = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")
_DIGIT = re.compile(rb"[0-9]")


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
        trace: What is noted of the request for the access log and for spans; None where both are off.
    """

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    request_id: str
    arrival: float
    parameters: dict[str, str] = {}
    trace: RequestTrace | None = None

    def header(self, name: bytes) -> bytes | None:
        """The first header of that lower-case name."""
        return self.headers.get(name)

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

    async def inflate(self, limit: int) -> None:
        """Decompresses the body, as its Content-Encoding says.

        Args:
            limit: Bytes that it may grow to.

        Raises:
            UnsupportedMediaType: An encoding that is not read.
            MalformedRequest: The body is not of its encoding, ends before its end or goes on behind it.
            BodyTooLarge: It grows beyond the limit.
        """
        given = self.headers[b"content-encoding"].strip().lower()
        if given in {b"", b"identity"}:
            return
        if given not in COMPRESSIONS:
            raise UnsupportedMediaType("bodies are read as they are, or compressed with gzip or deflate")
        self.body = await asyncio.to_thread(inflated, self.body, COMPRESSIONS[given], limit)

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
    """What goes back: a whole body, never a stream.

    Attributes:
        head: More lines of the head, each with its end.
    """

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    head: bytes = b""


Handler = Callable[[HttpRequest], Awaitable[HttpReply]]


@dataclass(slots=True, frozen=True)
class Operation:
    """A route and what the documentation says of it.

    Attributes:
        request: Type of the JSON body, if there is one.
        reply: Type of the JSON reply, if it is JSON.
        example: A request that works.
        values: Of the parts of the path that have names: which values lead somewhere.
        statuses: Further ones that it answers.
        binary: Whether tensors may stand behind the JSON, both ways.
        body_optional: Whether the body may be left out.
        open: Whether it needs no API key where the server has some.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    request: Any = None
    reply: Any = None
    example: Any = None
    values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    statuses: Sequence[int] = ()
    binary: bool = False
    body_optional: bool = False
    open: bool = False


_OUTCOME = (
    b"server-timing: tokenize;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f\r\n"
    b"x-compute-tokens: %d\r\nx-truncated-tokens: %d\r\n"
)


def outcome_head(outcome: Outcome[Any]) -> bytes:
    """The stage times (Server-Timing: milliseconds with three decimals) and the token counts."""
    times = outcome.timings
    return _OUTCOME % (
        times.tokenize_us / 1e3,
        times.queue_us / 1e3,
        times.compute_us / 1e3,
        times.total_us / 1e3,
        outcome.tokens,
        outcome.truncated_tokens,
    )


def error_reply(path: str, error: BertserveError, identity: str) -> HttpReply:
    """The reply that an error becomes on a path."""
    head = b""
    if (after_ms := error.retry_after_ms) is not None:
        seconds = max(1, math.ceil(error.retry_after_s or 0))
        head = b"retry-after: %d\r\nretry-after-ms: %d\r\n" % (seconds, after_ms)
    if isinstance(error, MethodNotAllowed):
        head += b"allow: %b\r\n" % error.allowed.encode()
    if isinstance(error, UnsupportedMediaType):
        head += b"accept-encoding: gzip, deflate\r\n"
    if isinstance(error, Unauthenticated):
        head += b"www-authenticate: Bearer\r\n"
    return HttpReply(error_body(path, error, identity), status_of(path, error), head=head)


async def answer(
    request: HttpRequest,
    find: Callable[[HttpRequest], Handler],
    record_error: RecordError,
    body_limit: int,
    observer: RequestObserver | None = None,
) -> HttpReply | None:
    """Runs the handler of a request; None where its client has gone.

    Args:
        request: The request.
        find: Gives its handler, or raises.
        record_error: Told of each error.
        body_limit: Bytes that a compressed body may grow to.
        observer: Traces the request.
    """
    if observer is not None:
        request.trace = _trace_of(request, observer)
    error: BertserveError | None = None
    reply: HttpReply | None = None
    try:
        handler = find(request)
        if request.body and b"content-encoding" in request.headers:
            await request.inflate(body_limit)
        reply = await handler(request)
    except BertserveError as refusal:
        error = refusal
        reply = error_reply(request.path, error, request.request_id)
    except asyncio.CancelledError:
        # Only the end of the client's connection cancels an exchange: there is nobody to answer.
        error = ClientGone("the client closed the connection")
    except Exception:  # the HTTP boundary
        log.exception("a request failed", extra=fields(request_id=request.request_id))
        error = InternalError("internal error; the server's log has the details under this request id")
        reply = error_reply(request.path, error, request.request_id)
    if error is not None:
        record_error(error, request.request_id)
    if observer is not None and request.trace is not None:
        _note_reply(request.trace, request, reply, error)
        observer.end(request.trace)
    return reply


def _trace_of(request: HttpRequest, observer: RequestObserver) -> RequestTrace:
    headers = request.headers
    return observer.begin(
        *("http", request.method, "?", request.request_id, request.arrival, len(request.body)),
        traceparent=headers.get(b"traceparent"),
        tracestate=headers.get(b"tracestate"),
    )


def _note_reply(
    trace: RequestTrace, request: HttpRequest, reply: HttpReply | None, error: BertserveError | None
) -> None:
    if error is not None:
        trace.failed(error.reason, error.http_status, error.http_status)
    if reply is not None:
        trace.status, trace.bytes_out = reply.status, len(reply.body)
    if not isinstance(error, RouteNotFound | MethodNotAllowed):
        names = {value: f"{{{name}}}" for name, value in request.parameters.items()}
        trace.route = "/".join([names.get(part, part) for part in request.path.split("/")])
