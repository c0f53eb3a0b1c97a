"""Frames (RFC 9113, sections 4, 6 and 7): types, flags, error codes, encoding, and limits."""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">IBI")
"""A frame's header: length and type as 24 + 8 bits, flags, stream number."""

FRAME_HEADER_BYTES = FRAME.size

FRAME_BYTES = 16_384
"""Maximum payload of a frame in bytes, both ways. Every peer accepts it, and the server never asks for larger ones."""

LARGEST = 2**31 - 1
"""The maximum of windows and of stream numbers."""

DEFAULT_WINDOW = 65_535
PING_BYTES = 8
PRIORITY_BYTES = 5
GOAWAY_BYTES = 8
"""Without the optional debug data."""

SETTING_BYTES = 6

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20

_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_TWO_NUMBERS = struct.Struct(">II")


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(IntEnum):
    """The settings that are sent or read (section 6.5.2)."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


_ALLOWED: dict[int, tuple[range, ErrorCode]] = {
    Setting.ENABLE_PUSH: (range(2), ErrorCode.PROTOCOL_ERROR),
    Setting.INITIAL_WINDOW_SIZE: (range(LARGEST + 1), ErrorCode.FLOW_CONTROL_ERROR),
    Setting.MAX_FRAME_SIZE: (range(FRAME_BYTES, 1 << 24), ErrorCode.PROTOCOL_ERROR),
}


class StreamFault(Exception):
    """The peer broke a rule on one stream. The stream is reset, and the connection continues."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class ConnectionFault(Exception):
    """The peer broke a rule, and the connection ends."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frame_header(kind, flags, stream, len(payload)) + payload


def frame_header(kind: int, flags: int, stream: int, size: int) -> bytes:
    return FRAME.pack(size << 8 | kind, flags, stream)


def header_frames(flags: int, stream: int, block: bytes) -> bytes:
    """A header block as HEADERS, followed by CONTINUATION frames if it is larger than a frame."""
    first, *rest = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    continued = [frame(CONTINUATION, END_HEADERS if piece is rest[-1] else 0, stream, piece) for piece in rest]
    return frame(HEADERS, flags if rest else flags | END_HEADERS, stream, first) + b"".join(continued)


def settings(values: dict[Setting, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """The values of SETTINGS. The last value of a repeated setting counts, but all must be allowed."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of an invalid size")
    values = {}
    for setting, value in _SETTING.iter_unpack(payload):
        if setting in _ALLOWED and value not in _ALLOWED[setting][0]:
            raise ConnectionFault(_ALLOWED[setting][1], f"{Setting(setting).name} out of range")
        values[setting] = value
    return values


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


def rst_stream(stream: int, code: ErrorCode) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: ErrorCode, reason: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _TWO_NUMBERS.pack(last_stream, code) + reason.encode())


def read_number(payload: bytes) -> int:
    if len(payload) != _NUMBER.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a frame of an invalid size")
    return int.from_bytes(payload, "big")


def strip_padding(payload: bytes, flags: int) -> bytes:
    """The payload of DATA or HEADERS without padding and priority."""
    start, stop = 0, len(payload)
    if flags & PADDED:
        start, stop = 1, stop - payload[0] if payload else -1
    if flags & PRIORITISED:
        start += PRIORITY_BYTES
    if start > stop:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[start:stop]


WINDOW_WORK = 3
"""Work for a WINDOW_UPDATE, besides its frame."""

SMALL_DATA_WORK = 3
"""Work for a small DATA frame that is not the last, besides its frame."""

CONTINUATION_BYTES = 256
"""Bytes that a CONTINUATION counts besides its own: many small ones are refused like a few large ones."""

REQUEST_WORK = 30
"""Work for a request that is passed to the caller."""

RESET_WORK = 20
"""Work for resetting an open stream: the caller has to stop what it began."""

REPLY_CREDIT = 100
"""Credit for an answer beyond the cost of its request. It pays for pings, window updates and a reset request."""


class Limits(msgspec.Struct, frozen=True):
    """The limits of one connection.

    Attributes:
        streams: Maximum concurrent streams; announced to the peer. Further ones are refused.
        header_bytes: Maximum size of a request's header list; announced to the peer. Fields beyond it are not kept.
        header_fields: Maximum fields of a request. Fields beyond it are not kept.
        granted_bytes: Maximum bytes granted to all streams beyond their initial windows (`H2Connection.expect`).
        turn_work: Maximum work in one `H2Connection.receive`. The rest waits for the next call.
        credit: Maximum work for the peer beyond what its answered requests were worth. All work is taken from it. Each
            answer, each larger piece of a body and each second give some back. A peer that overdraws it is
            disconnected.
        credit_per_s: Credit that each second gives back.
        settings: Maximum settings in one frame. A peer that sends more is disconnected, as nghttp2 does.
    """

    streams: int = 256
    header_bytes: int = 16_384
    header_fields: int = 100
    granted_bytes: int = 16 << 20
    turn_work: int = 1000
    credit: int = 30_000
    credit_per_s: int = 30_000
    settings: int = 32

    @property
    def decoded_header_bytes(self) -> int:
        """Size of a header list, or of its encoded block, beyond which decoding stops and the connection ends."""
        return 4 * self.header_bytes

    @property
    def decoded_header_fields(self) -> int:
        """Number of fields beyond which decoding stops and the connection ends."""
        return 4 * self.header_fields
