"""HTTP/2 frames (RFC 9113) as bytes, valid or invalid, for the load generator, the attacks and the tests.

A library refuses to build invalid frames and takes more CPU time; see `http2.py`. Tests read the server's frames with
`h2` and `hyperframe`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from hpack import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterable


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">HBBBI")
"""Frame header: length as 16 + 8 bits, type, flags, stream."""

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITISED = 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 2, 3, 4
WINDOW, LARGEST = 65_535, 2**31 - 1
"""Initial and maximum flow-control window."""

FRAME_BYTES = 16_384


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 255, kind, flags, stream) + payload


def settings(*values: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", *value) for value in values))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def reset(stream: int, code: int = 8) -> bytes:
    """RST_STREAM with CANCEL, or with another code."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def prefixed(message: bytes, *, compressed: bool = False) -> bytes:
    """A gRPC length-prefixed message: compressed flag, length, bytes."""
    return struct.pack(">BI", compressed, len(message)) + message


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """A header block without indexing and Huffman coding: the same bytes on every connection."""
    return Encoder().encode([(*field, True) for field in fields], huffman=False)


def split(data: bytes) -> tuple[list[tuple[int, int, int, bytes]], bytes]:
    """The complete frames in `data` (type, flags, stream, payload), and the remaining bytes."""
    found, at, end = [], 0, len(data)
    while end - at >= _HEAD.size:
        high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        stop = start + (high << 8 | low)
        if stop > end:
            break
        found.append((kind, flags, stream, data[start:stop]))
        at = stop
    return found, data[at:]
