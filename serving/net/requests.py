"""What requests of both ports bring: header fields, an id, a priority, perhaps a compressed body."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from serving.errors import (
    BertserveError,
    BodyTooLarge,
    BuffersFull,
    MalformedRequest,
    setting_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RecordError = Callable[[BertserveError, str, str, str], None]
"""Called with each error that a client gets, the id of its request, the protocol, and the model or an empty name."""

COMPRESSIONS: Mapping[bytes, int] = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
"""Encodings of bodies, as zlib's `wbits`; `deflate` is zlib's format, as HTTP and gRPC mean it."""

_SINGLE = frozenset(
    {
        *(b"access-control-request-method", b"authorization", b"content-length", b"content-type", b"origin"),
        *(b"endpoint-load-metrics-format", b"inference-header-content-length", b"sec-fetch-site"),
        *(b"x-request-priority", b"x-request-timeout-ms"),
    }
)
"""Fields that are read here and are no lists. A second line that repeats the first counts for nothing; another value is
refused, as nobody knows which one a proxy before this server has looked at.

All others are joined, as lists (RFC 9110, 5.3). Two lines of `traceparent` so become a value that is none, as W3C's
Trace Context wants it, and two of `x-request-id` are replaced.
"""

_ONE_LINE = frozenset({b"host"})
"""Those that are refused even where both lines agree (RFC 9112, 3.2)."""

_SEPARATORS: Mapping[bytes, bytes] = {b"cookie": b"; "}

_MAX_MEMBERS = 1000
"""Of a gzip file: empty ones would bring nothing and take time."""

_HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_serial = itertools.count(1)
_process = os.urandom(6).hex()


def combined(name: bytes, first: bytes, second: bytes) -> bytes:
    """The value of a field, by its lower-case name, that comes on one line more.

    Raises:
        MalformedRequest: It may come only once.
    """
    if name in _ONE_LINE or (name in _SINGLE and first != second):
        raise MalformedRequest(f"more than one header {name.decode().title()}; send it once")
    return joined(name, first, second)


def joined(name: bytes, first: bytes, second: bytes) -> bytes:
    """The same where nothing is refused: two values of a field that has one make a value that is none."""
    return first if name in _SINGLE and first == second else first + _SEPARATORS.get(name, b", ") + second


def gathered(fields: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Fields by name; those that come more than once are `joined`."""
    values = dict(fields)
    if len(values) < len(fields):
        values.clear()
        for name, value in fields:
            values[name] = joined(name, values[name], value) if name in values else value
    return values


def words(value: bytes) -> list[bytes]:
    """The members of a list of words, in lower case."""
    return [word.strip(b" \t") for word in value.lower().split(b",")]


def request_id(wanted: bytes | None) -> str:
    """The client's id where it is harmless in a log, else one of our own."""
    if wanted is not None and _HARMLESS.fullmatch(wanted):
        return wanted.decode("ascii")
    return f"{_process}-{next(_serial):x}"


def is_zlib(data: bytes) -> bool:
    """Whether it begins as zlib's format does (RFC 1950, 2.2); what deflate alone begins with is never the same."""
    return len(data) > 1 and data[0] & 0x8F == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0


def inflated(data: bytes, wbits: int, limit: int) -> bytes:
    """Decompresses a body; never makes more than one byte beyond the limit.

    A gzip file may have several members (RFC 1952, 2.2).

    Raises:
        MalformedRequest: It is not of its encoding, ends too early or goes on behind its end.
        BodyTooLarge: It grows beyond the limit.
    """
    pieces: list[bytes] = []
    left = limit
    for _ in range(_MAX_MEMBERS):
        stream = zlib.decompressobj(wbits)
        try:
            piece = stream.decompress(data, left + 1)
        except zlib.error:
            raise MalformedRequest("the body is not compressed as its encoding says") from None
        left -= len(piece)
        if left < 0:
            raise BodyTooLarge(f"the body exceeds {limit} bytes once decompressed{setting_of(limit)}")
        pieces.append(piece)
        data = stream.unused_data
        if not stream.eof or (data and wbits != COMPRESSIONS[b"gzip"]):
            raise MalformedRequest("the compressed body ends too early, or something follows it")
        if not data:
            return b"".join(pieces)
    raise MalformedRequest(f"the body has more than {_MAX_MEMBERS} gzip members; send fewer, larger ones")


async def inflate(
    large_body_lock: asyncio.Lock, grow: Callable[[int], bool], data: bytes, wbits: int, limit: int
) -> bytes:
    """Decompresses a body as `inflated`, in a thread, in its turn: small bodies could make many large ones at once.

    Args:
        large_body_lock: Held by the one that grows, until the thread ends, which goes on where the client leaves.
        grow: Counts so many bytes more, or less; whether there is room. It is asked for as much as the body may become.
        data: The body.
        wbits: As zlib has it.
        limit: Bytes that it may grow to.

    Raises:
        BuffersFull: There is no room.
    """
    await large_body_lock.acquire()
    if not grow(limit):
        large_body_lock.release()
        raise BuffersFull
    running = asyncio.get_running_loop().run_in_executor(None, inflated, data, wbits, limit)
    running.add_done_callback(lambda _: large_body_lock.release())
    body = await asyncio.shield(running)
    grow(len(body) - limit)
    return body
