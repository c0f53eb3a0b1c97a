"""An HTTP exchange: the request as endpoints see it, the reply, and the reply for an error."""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec.inspect import ListType, LiteralType, StructType, Type, VarTupleType, type_info

from bertserve.serving.errors import (
    BertserveError,
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    NotReady,
    Unauthenticated,
    UnsupportedMediaType,
)
from bertserve.serving.fields.rule import Ignored, members_of, obey_rule
from bertserve.serving.http.faults import error_body, status_of
from bertserve.serving.http.malformed import malformed
from bertserve.serving.inference.requests import priority_of
from bertserve.serving.net.buffers import FREE_BYTES, BufferShare
from bertserve.serving.net.requests import COMPRESSIONS, inflate, inflated, is_zlib, words
from bertserve.serving.records import DEFAULT_PRIORITY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bertserve.serving.inference.requests import InferRequest, Outcome, RequestTrace
    from bertserve.serving.tasks.base import A

M = TypeVar("M", bound=msgspec.Struct)

JSON = b"application/json"
OCTETS = b"application/octet-stream"
NOT_MODIFIED = 304

NO_ROUTE = "?"
"""Route in traces for paths that are not served."""

_UNCOUNTED_BYTES = 131_072
_COUNTED_BYTES = 65_536
_MAX_ELEMENTS = 100_000
_MAX_NUMBERS = 1_000_000
"""Limits of a JSON body: the most inputs that any setting allows, and 4 MiB of token ids."""
_COMMA, _QUOTE, _ZERO, _NINE = b',"09'

_INLINE_BYTES = FREE_BYTES
"""Largest body that is decompressed on the event loop (about 50 us) and needs no buffer space."""

_CODINGS = {**COMPRESSIONS, b"x-gzip": COMPRESSIONS[b"gzip"]}
_NO_CODING = {b"", b"identity"}

_TIMEOUT = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")
_DIGIT = re.compile(rb"[0-9]")

# Messages of msgspec that repeat nothing received.
_PATH = re.compile(r" - at `([^`]*)`$")
_EXPECTED = re.compile(r"Expected `[^`]+`(?: (?:of length|with)[^`]*)?(?:, got `[^`]+`)?(?= - at|$)")
_FIELD = re.compile(r"Object missing required field `([A-Za-z0-9_.-]{1,64})`")
_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")
_NAMES: set[str] = set()
"""Field names of all messages."""
_MISSING = re.compile(r"Object missing required field `\w+`")
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ANY_JSON = msgspec.json.Decoder()


class JsonDecoder(Generic[M]):
    """Decodes one type of message.

    Most bodies have no unread fields and are decoded at once. If that fails, the body is decoded again as plain JSON,
    for the rule of `serving.fields`.
    """

    def __init__(self, kind: type[M]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._kind = kind
        _NAMES.update(field.encode_name for field in msgspec.structs.fields(kind))

    def decode(self, data: bytes | memoryview, request: HttpRequest | None = None) -> M:
        """The message in `data`. Of duplicate keys the last one wins.

        Args:
            data: JSON, possibly invalid.
            request: Collects the ignored fields.

        Raises:
            MalformedRequest: Not JSON, or not UTF-8.
            InvalidRequest: JSON of another shape, or with a rejected field.
        """
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            return self._by_rule(data, request, error)
        except _NOT_JSON as error:
            raise malformed(data, _NAMES) from error

    async def decode_in_turn(
        self, data: bytes | memoryview, large_body_lock: asyncio.Lock, request: HttpRequest | None = None
    ) -> M:
        """As `decode`, for messages that may be large.

        Raises:
            InvalidRequest: Also for more elements than the limit.
        """
        if len(data) <= _UNCOUNTED_BYTES:
            return self.decode(data, request)
        await _check_elements(data, large_body_lock)
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            async with large_body_lock:
                return await asyncio.to_thread(self._by_rule, data, request, error)
        except _NOT_JSON as error:
            async with large_body_lock:
                raise await asyncio.to_thread(malformed, data, _NAMES) from error

    def _by_rule(self, data: bytes | memoryview, request: HttpRequest | None, refusal: msgspec.ValidationError) -> M:
        """Decodes the message without the fields that the rule drops, or raises the reason for its rejection."""
        try:
            message = _ANY_JSON.decode(data)
        except msgspec.ValidationError as error:
            raise InvalidRequest("a number in the body is out of range") from error
        except _NOT_JSON as error:
            raise malformed(data, _NAMES) from error
        ignored = Ignored()
        if not obey_rule(message, self._kind, ignored):
            raise self._refused(str(refusal)) from refusal
        try:
            decoded = msgspec.convert(message, self._kind)
        except msgspec.ValidationError as error:
            raise self._refused(str(error)) from error
        if request is not None and ignored:
            request.pass_over(ignored)
        return decoded

    def _refused(self, text: str) -> InvalidRequest:
        path, named = _PATH.search(text), _FIELD.match(text)
        steps = [step[1] for step in _STEP.finditer(path[1])] if path else []
        return InvalidRequest(self._explain(text), param=steps[0] if steps else named[1] if named else None)

    def _explain(self, text: str) -> str:
        """The library's message if it repeats nothing received, else one of ours."""
        path = _PATH.search(text)
        where = f" (at `{path[1]}`)" if path else ""
        for pattern in (_EXPECTED, _MISSING):
            if match := pattern.match(text):
                return match[0][0].lower() + match[0][1:] + where
        kinds = _kinds_at(self._kind, path[1] if path else "$")
        allowed = [value for kind in kinds if isinstance(kind, LiteralType) for value in kind.values]
        return f"invalid value{where}; allowed: {', '.join(map(str, allowed))}"


def _kinds_at(message: type, path: str) -> Sequence[Type]:
    """The types that a value may have at a path of a message. The path is written as msgspec writes it."""
    kinds = members_of(type_info(message))
    for field in (match[1] for match in _STEP.finditer(path)):
        below: list[Type] = []
        for kind in kinds:
            if isinstance(kind, StructType) and field is not None:
                below += [own.type for own in kind.fields if own.encode_name == field]
                if field == kind.tag_field:
                    below.append(LiteralType((kind.tag,)))
            elif isinstance(kind, ListType | VarTupleType) and field is None:
                below.append(kind.item_type)
        kinds = [member for kind in below for member in members_of(kind)]
    return kinds


async def _check_elements(data: bytes | memoryview, large_body_lock: asyncio.Lock) -> None:
    """Rejects a body that would decode into hundreds of thousands of objects.

    Decoding holds the GIL, so a thread would not help: 4 MiB of `[],` took 0.2 s and 150 MB. Each comma outside of a
    string counts as an element. Numbers have a higher limit: they cost a sixth of lists, and honest requests have many.
    Bodies are scanned one at a time, one piece per turn of the event loop.
    """
    async with large_body_lock:
        quoted = escaped = elements = numbers = 0
        for at in range(0, len(data), _COUNTED_BYTES):
            piece = bytes(data[at : at + _COUNTED_BYTES])
            if escaped or b"\\" in piece:
                piece, escaped = _unescaped(piece, escaped)
            letters = np.frombuffer(piece, np.uint8)
            quotes = letters == _QUOTE
            outside = (np.cumsum(quotes, dtype=np.uint8) + quoted) & 1 == 0
            commas = outside & (letters == _COMMA)
            behind_digits = int(np.count_nonzero(commas[1:] & (letters[:-1] >= _ZERO) & (letters[:-1] <= _NINE)))
            quoted = (quoted + int(np.count_nonzero(quotes))) & 1
            numbers += behind_digits
            elements += int(np.count_nonzero(commas)) - behind_digits
            if elements > _MAX_ELEMENTS or numbers > _MAX_NUMBERS:
                raise InvalidRequest(
                    f"the body has more than {_MAX_ELEMENTS} texts and lists, or more than {_MAX_NUMBERS} numbers;"
                    " send fewer per request"
                )
            await asyncio.sleep(0)


def _unescaped(piece: bytes, escaped: int) -> tuple[bytes, int]:
    """JSON without backslashes and escaped characters, and whether its end escapes the next piece."""
    piece = (b"\\" * escaped + piece).replace(b"\\\\", b"")
    return piece.replace(b'\\"', b""), int(piece.endswith(b"\\"))


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

    def timeout_ms(self) -> float | None:
        """The value of `X-Request-Timeout-Ms`.

        Raises:
            InvalidRequest: It is not a positive number.
        """
        value = self.headers.get(b"x-request-timeout-ms")
        if value is None:
            return None
        if not _TIMEOUT.fullmatch(value) or float(value) <= 0:
            raise InvalidRequest("the header X-Request-Timeout-Ms must be milliseconds, above 0 and up to 999999999")
        return float(value)

    def priority(self) -> int:
        """The value of `X-Request-Priority`.

        Raises:
            InvalidRequest: It is not a priority.
        """
        value = self.headers.get(b"x-request-priority")
        if value is None:
            return DEFAULT_PRIORITY
        return priority_of(int(value) if _DIGIT.fullmatch(value) else None, "the header X-Request-Priority")

    def stamp(self, request: InferRequest[A]) -> InferRequest[A]:
        """Adds the arrival, id and trace of this request, and the deadline and priority of its headers.

        Raises:
            InvalidRequest: A header is invalid.
        """
        priority = self.priority() if request.priority is None else None
        return request.stamp(self.arrival, self.request_id, self.trace, self.timeout_ms(), priority)

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
        if len(self.body) > _UNCOUNTED_BYTES:
            return await decoder.decode_in_turn(self.body, large_body_lock, self)
        return decoder.decode(self.body, self)

    def pass_over(self, ignored: Ignored) -> None:
        """Records ignored fields, for the reply to name them."""
        if self.ignored is None:
            self.ignored = ignored
        else:
            self.ignored.update(ignored)


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
