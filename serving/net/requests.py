"""Parts of requests on both ports: header fields, request id, and compressed bodies."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from bertserve.serving.errors import (
    BertserveError,
    BodyTooLarge,
    BuffersFull,
    MalformedRequest,
    setting_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RecordError = Callable[[BertserveError, str, str, str], None]
"""Called with each error that a client receives, the request's id, the protocol, and the model's name or ""."""

MAX_HEADER_BYTES = 16_384
"""Maximum size of a request's line and headers."""

MAX_HEADERS = 100

COMPRESSIONS: Mapping[bytes, int] = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
"""Body encodings as zlib's `wbits`. `deflate` is the zlib format, as in HTTP and gRPC."""

_SINGLE = frozenset(
    {
        *(b"access-control-request-method", b"authorization", b"content-length", b"content-type", b"origin"),
        *(b"inference-header-content-length", b"sec-fetch-site", b"x-request-priority", b"x-request-timeout-ms"),
    }
)
"""Single-valued fields that the server reads. A second line with the same value is ignored. Another value is rejected,
because a proxy before this server may have used either one.

All other fields are joined as lists (RFC 9110, 5.3). Two lines of `traceparent` thereby become an invalid value, as
W3C's Trace Context requires. Two of `x-request-id` are replaced by a generated id.
"""

_ONE_LINE = frozenset({b"host"})
"""Fields that are rejected even if both lines agree (RFC 9112, 3.2)."""

_MAX_MEMBERS = 1000
"""Maximum members of a gzip file: empty members cost time and carry no data."""

_HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_serial = itertools.count(1)
_process = os.urandom(6).hex()


def combine(name: bytes, first: bytes, second: bytes) -> bytes:
    """The value of a field that has another line, by its lower-case name.

    Raises:
        MalformedRequest: The field must not be repeated.
    """
    if name in _ONE_LINE or (name in _SINGLE and first != second):
        raise MalformedRequest(f"the header {name.decode().title()} occurs more than once; send it once")
    return join(name, first, second)


def join(name: bytes, first: bytes, second: bytes) -> bytes:
    """As `combine`, without rejection: two different values of a single-valued field become an invalid value."""
    return first if name in _SINGLE and first == second else first + b", " + second


def gather_fields(fields: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Fields by name; repeated fields are `join`."""
    values = dict(fields)
    if len(values) < len(fields):
        values.clear()
        for name, value in fields:
            values[name] = join(name, values[name], value) if name in values else value
    return values


def words(value: bytes) -> list[bytes]:
    """The members of a comma-separated list, in lower case."""
    return [word.strip(b" \t") for word in value.lower().split(b",")]


def request_id(wanted: bytes | None) -> str:
    """The client's id if it is safe in a log, else a generated one."""
    if wanted is not None and _HARMLESS.fullmatch(wanted):
        return wanted.decode("ascii")
    return f"{_process}-{next(_serial):x}"


def is_zlib(data: bytes) -> bool:
    """Whether the data has a zlib header (RFC 1950, 2.2). Raw deflate data never starts like that."""
    return len(data) > 1 and data[0] & 0x8F == zlib.DEFLATED and int.from_bytes(data[:2], "big") % 31 == 0


def inflated(data: bytes, wbits: int, limit: int) -> bytes:
    """Decompresses a body, and never produces more than one byte beyond the limit.

    A gzip file may have several members (RFC 1952, 2.2).

    Raises:
        MalformedRequest: The body is not in its encoding, ends too early, or has trailing bytes.
        BodyTooLarge: It grows beyond the limit.
    """
    pieces: list[bytes] = []
    left = limit
    for _ in range(_MAX_MEMBERS):
        stream = zlib.decompressobj(wbits)
        try:
            piece = stream.decompress(data, left + 1)
        except zlib.error:
            raise MalformedRequest("the body does not match its compression") from None
        left -= len(piece)
        if left < 0:
            raise BodyTooLarge(f"the body exceeds {limit} bytes once decompressed{setting_of(limit)}")
        pieces.append(piece)
        data = stream.unused_data
        if not stream.eof or (data and wbits != COMPRESSIONS[b"gzip"]):
            raise MalformedRequest("the compressed body is truncated or has trailing bytes")
        if not data:
            return b"".join(pieces)
    raise MalformedRequest(f"the body has more than {_MAX_MEMBERS} gzip members; send fewer, larger ones")


async def inflate(
    large_body_lock: asyncio.Lock, grow: Callable[[int], bool], data: bytes, wbits: int, limit: int
) -> bytes:
    """Decompresses a body as `inflated`, in a thread, one at a time: many small bodies could grow large.

    Args:
        large_body_lock: Held until the thread ends, even if the client leaves.
        grow: Reserves or, for a negative size, releases bytes; False if none are left. It is first asked for `limit`
            bytes.
        data: The body.
        wbits: The encoding, in zlib's terms.
        limit: Maximum size of the result, in bytes.

    Raises:
        BuffersFull: The buffer budget is spent.
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
