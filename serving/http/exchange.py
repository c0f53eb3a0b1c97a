"""An HTTP exchange: the request as endpoints see it, and the reply."""

from __future__ import annotations

import re
import zlib
from typing import TYPE_CHECKING, Any

import msgspec

from bertserve.serving.errors import BertserveError, BodyTooLarge, InvalidRequest, UnsupportedMediaType
from bertserve.serving.inference.requests import priority_of
from bertserve.serving.net.buffers import FREE_BYTES, BufferShare
from bertserve.serving.net.requests import COMPRESSIONS, inflate, inflated, is_zlib, words
from bertserve.serving.records import DEFAULT_PRIORITY

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from bertserve.serving.fields.rule import Ignored
    from bertserve.serving.http.decoding import JsonDecoder, M
    from bertserve.serving.inference.requests import InferRequest, Outcome, RequestTrace
    from bertserve.serving.tasks.base import A

JSON = b"application/json"
OCTETS = b"application/octet-stream"
NOT_MODIFIED = 304

NO_ROUTE = "?"
"""Route in traces for paths that are not served."""

_INLINE_BYTES = FREE_BYTES
"""Largest body that is decompressed on the event loop (about 50 us) and needs no buffer space."""

_CODINGS = {**COMPRESSIONS, b"x-gzip": COMPRESSIONS[b"gzip"]}
_NO_CODING = {b"", b"identity"}

_TIMEOUT = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")


class HttpRequest(msgspec.Struct):
    """A request with its whole body.

    Attributes:
        method: In upper case.
        path: Decoded, without the query.
        headers: By lower-case name; repeated headers are joined, see `serving.net.requests.combined`.
        request_id: The client's, or a generated one.
        arrival: Time when the request was complete, on the clock `time.perf_counter`.
        share: Its connection's share of the buffer budget; None if another server holds the connection.
        held: Bytes of the share that this request holds.
        parameters: Path parameters of its route.
        trace: Its trace until the reply is sent; None without an observer.
        ended: Whether its outcome is recorded.
        route: Its route in traces if it is rejected before routing.
        http_1_0: Whether it came over HTTP/1.0.
        ignored: The ignored fields; None if there are none.
        rejection: Why its head or its framing is rejected, if it is.
    """

    method: str
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    request_id: str
    arrival: float
    share: BufferShare | None = None
    held: int = 0
    parameters: Mapping[str, str] = {}
    trace: RequestTrace | None = None
    ended: bool = False
    route: str = NO_ROUTE
    http_1_0: bool = False
    ignored: Ignored | None = None
    rejection: BertserveError | None = None

    def stamp(self, request: InferRequest[A]) -> InferRequest[A]:
        """Adds the arrival, id and trace of this request, and the deadline and priority of its headers.

        Raises:
            InvalidRequest: A header is invalid.
        """
        wanted, timeout = self.headers.get(b"x-request-priority"), self.headers.get(b"x-request-timeout-ms")
        priority = None
        if request.priority is None:
            priority = DEFAULT_PRIORITY if wanted is None else _priority(wanted)
        timeout_ms = None if timeout is None else _timeout_ms(timeout)
        return request.stamp(self.arrival, self.request_id, self.trace, timeout_ms, priority)

    async def inflate(self, limit: int, large_body_lock: asyncio.Lock) -> None:
        """Decompresses the body by its Content-Encoding: small results at once, others in a thread.

        Raises:
            UnsupportedMediaType: An unsupported encoding.
            MalformedRequest: The body is not in its encoding, ends too early, or has trailing bytes.
            BodyTooLarge: It grows beyond the limit.
            BuffersFull: The buffer budget is spent.
        """
        named = [coding for coding in words(self.headers[b"content-encoding"]) if coding not in _NO_CODING]
        codings = [_CODINGS[coding] for coding in named if coding in _CODINGS]
        # Each encoding may grow to the limit. Applying one twice only serves nested decompression bombs.
        if len(set(codings)) < len(named):
            raise UnsupportedMediaType("unsupported Content-Encoding; use gzip or deflate, each at most once")
        grown = 0
        for coding in reversed(codings):  # the header lists them in the order of application
            held = self.held
            await self._inflate(coding, limit, large_body_lock)
            grown, before = self.held - held, grown
            self._grow(-before)

    async def _inflate(self, wbits: int, limit: int, large_body_lock: asyncio.Lock) -> None:
        if wbits == zlib.MAX_WBITS and not is_zlib(self.body):
            wbits = -zlib.MAX_WBITS  # some clients send raw deflate (RFC 9110, 8.4.1.2)
        if limit > _INLINE_BYTES:
            try:
                self.body = inflated(self.body, wbits, _INLINE_BYTES)
            except BodyTooLarge:
                self.body = await inflate(large_body_lock, self._grow, self.body, wbits, limit)
        else:
            self.body = inflated(self.body, wbits, limit)

    def _grow(self, size: int) -> bool:
        """Adds a number of bytes, perhaps negative, to the body's buffer space; False if the budget is spent."""
        if self.share is not None:
            if size <= 0:
                self.share.give(-size)
            elif not self.share.take(size):
                return False
        self.held += size
        return True

    async def json(self, decoder: JsonDecoder[M], large_body_lock: asyncio.Lock) -> M:
        """The message in the body; see `JsonDecoder.decode_in_turn`.

        Raises:
            UnsupportedMediaType: The Content-Type is not JSON.
        """
        content_type = self.headers.get(b"content-type", b"")
        if content_type != JSON:
            kind = content_type.split(b";")[0].strip().lower()
            if kind != JSON and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
                raise UnsupportedMediaType("the Content-Type must be application/json")
        return await decoder.decode_in_turn(self.body, large_body_lock, self)

    def pass_over(self, ignored: Ignored) -> None:
        """Records ignored fields, for the reply to name them."""
        if self.ignored is None:
            self.ignored = ignored
        else:
            self.ignored.update(ignored)


def _timeout_ms(value: bytes) -> float:
    if not _TIMEOUT.fullmatch(value) or float(value) <= 0:
        raise InvalidRequest("the header X-Request-Timeout-Ms must be milliseconds, above 0 and up to 999999999")
    return float(value)


def _priority(value: bytes) -> int:
    is_digit = len(value) == 1 and value.isdigit()
    return priority_of(int(value) if is_digit else None, "the header X-Request-Priority")


class HttpReply(msgspec.Struct, frozen=True):
    """A reply.

    Attributes:
        head: Additional header lines, each with its line end.
        error: The error that the request is rejected with, if any.
    """

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    head: bytes = b""
    error: BertserveError | None = None


def json_reply(message: Any, status: int = 200, head: bytes = b"") -> HttpReply:  # noqa: ANN401  what msgspec writes
    return HttpReply(msgspec.json.encode(message), status, head=head)


_OUTCOME = (
    b"server-timing: tokenize;dur=%.3f, queue;dur=%.3f, compute;dur=%.3f, total;dur=%.3f\r\n"
    b"x-compute-type: %b\r\nx-compute-tokens: %d\r\nx-truncated-tokens: %d\r\n"
)


_CACHED = b"x-cache: hit\r\n"


def outcome_head(outcome: Outcome[Any]) -> bytes:
    """The stage times (Server-Timing: milliseconds with three decimals), the compute type and the token counts."""
    times = outcome.timings
    head = _OUTCOME % (
        times.tokenize_us / 1e3,
        times.queue_us / 1e3,
        times.compute_us / 1e3,
        times.total_us / 1e3,
        outcome.compute_type.encode(),
        outcome.tokens,
        outcome.truncated_tokens,
    )
    return head + _CACHED if outcome.cached else head


def ignored_head(ignored: Ignored) -> bytes:
    """Names the ignored fields. No other part of a request is repeated."""
    return b"x-ignored-fields: %b\r\n" % str(ignored).encode("ascii")
