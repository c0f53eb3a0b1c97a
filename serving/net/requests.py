"""What requests of both ports bring: an id, a priority, perhaps a compressed body."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from serving.errors import BertserveError, BodyTooLarge, BuffersFull, InvalidRequest, MalformedRequest
from serving.records import BULK, DEFAULT_PRIORITY, PRIORITIES

if TYPE_CHECKING:
    from collections.abc import Mapping

RecordError = Callable[[BertserveError, str], None]
"""Called with each error that a client gets, and the id of its request."""

COMPRESSIONS: Mapping[bytes, int] = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
"""Encodings of bodies, as zlib's `wbits`; `deflate` is zlib's format, as HTTP and gRPC mean it."""

_HARMLESS = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_serial = itertools.count(1)
_process = os.urandom(6).hex()


def request_id(wanted: bytes | None) -> str:
    """The client's id where it is harmless in a log, else one of our own."""
    if wanted is not None and _HARMLESS.fullmatch(wanted):
        return wanted.decode("ascii")
    return f"{_process}-{next(_serial):x}"


def priority_of(value: object, name: str) -> int:
    """The priority that a request asks for: 1 goes before 2, and 2 before 3; 4 is bulk work, 0 Triton's default, 2.

    `name` is that of the header or parameter, for the error. Raises `InvalidRequest` for anything else.
    """
    if value == 0 and not isinstance(value, bool | float):
        return DEFAULT_PRIORITY
    if isinstance(value, int) and not isinstance(value, bool) and value in PRIORITIES:
        return value
    raise InvalidRequest(f"{name} must be 0 for the default, 1 (first) to 3 (last), or {BULK} for bulk work")


def inflated(data: bytes, wbits: int, limit: int) -> bytes:
    """Decompresses a body; never makes more than one byte beyond the limit.

    Raises:
        MalformedRequest: It is not of its encoding, ends too early or goes on behind its end.
        BodyTooLarge: It grows beyond the limit.
    """
    stream = zlib.decompressobj(wbits)
    try:
        body = stream.decompress(data, limit + 1)
    except zlib.error:
        raise MalformedRequest("the body is not compressed as its encoding says") from None
    if len(body) > limit:
        raise BodyTooLarge(f"the body exceeds {limit} bytes once decompressed")
    if not stream.eof or stream.unused_data:
        raise MalformedRequest("the compressed body ends too early, or something follows it")
    return body


async def inflate(turn: asyncio.Lock, grow: Callable[[int], bool], data: bytes, wbits: int, limit: int) -> bytes:
    """Decompresses a body as `inflated`, in a thread, in its turn: small bodies could make many large ones at once.

    Args:
        turn: Held by the one that grows. It ends with the thread, which goes on where the client leaves meanwhile.
        grow: Counts so many bytes more, or less; whether there is room. It is asked for as much as the body may become.
        data: The body.
        wbits: As zlib has it.
        limit: Bytes that it may grow to.

    Raises:
        BuffersFull: There is no room.
    """
    await turn.acquire()
    if not grow(limit):
        turn.release()
        raise BuffersFull
    running = asyncio.get_running_loop().run_in_executor(None, inflated, data, wbits, limit)
    running.add_done_callback(lambda _: turn.release())
    body = await asyncio.shield(running)
    grow(len(body) - limit)
    return body
