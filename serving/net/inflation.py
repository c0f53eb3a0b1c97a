"""Compressed bodies and messages: decompressed within a limit."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from serving.errors import BodyTooLarge, MalformedRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOWS: Mapping[bytes, int] = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
"""The encodings that are read, as zlib's `wbits`; `deflate` is zlib's format, as HTTP and gRPC mean it."""


def inflated(data: bytes, window: int, limit: int) -> bytes:
    """What a compressed body holds; never more than a byte beyond the limit is made of it.

    Args:
        data: The body.
        window: zlib's `wbits` of its encoding.
        limit: Bytes that it may grow to.

    Raises:
        MalformedRequest: It is not of its encoding, ends before its end or goes on behind it.
        BodyTooLarge: It grows beyond the limit.
    """
    stream = zlib.decompressobj(window)
    try:
        body = stream.decompress(data, limit + 1)
    except zlib.error:
        raise MalformedRequest("the body is not compressed as its encoding says") from None
    if len(body) > limit:
        raise BodyTooLarge(f"the body exceeds {limit} bytes once decompressed")
    if not stream.eof or stream.unused_data:
        raise MalformedRequest("the compressed body ends too early, or something follows it")
    return body
