"""HTTP/2 on the wire (RFC 9113): frame types, error codes, and frames as bytes."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">HBBBI")
"""A frame's header: length as 16 + 8 bits, type, flags, stream."""

FRAME_BYTES = 16_384
"""The largest payload of a frame, both ways: what every peer takes unless it asks for more."""

LARGEST = 2**31 - 1
"""Of windows and of stream numbers."""

DEFAULT_WINDOW = 65_535

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITISED = 0x20

_SETTING = struct.Struct(">HI")
_NUMBER = struct.Struct(">I")
_TWO_NUMBERS = struct.Struct(">II")


class Code(IntEnum):
    """Why a stream or a connection ends (section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class Setting(IntEnum):
    """What an endpoint tells of itself (section 6.5.2)."""

    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class StreamFault(Exception):
    """The client broke a rule on one stream, which is reset; the connection lives on."""

    def __init__(self, code: Code) -> None:
        super().__init__(code.name)
        self.code = code


class ConnectionFault(Exception):
    """The client broke a rule that the connection does not survive."""

    def __init__(self, code: Code, words: str) -> None:
        super().__init__(words)
        self.code = code
        self.words = words


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    """A whole frame."""
    return head(kind, flags, stream, len(payload)) + payload


def head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """What stands before a payload of that size."""
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream)


def settings(values: dict[Setting, int]) -> bytes:
    """SETTINGS."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """The values of SETTINGS; of a setting that comes twice, the last.

    Raises:
        ConnectionFault: The payload is no list of settings.
    """
    if len(payload) % _SETTING.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "SETTINGS of a broken size")
    return dict(_SETTING.iter_unpack(payload))


def window_update(stream: int, size: int) -> bytes:
    """WINDOW_UPDATE."""
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(size))


def rst_stream(stream: int, code: Code) -> bytes:
    """RST_STREAM."""
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def goaway(last_stream: int, code: Code, words: str = "") -> bytes:
    """GOAWAY."""
    return frame(GOAWAY, 0, 0, _TWO_NUMBERS.pack(last_stream, code) + words.encode())


def number(payload: bytes) -> int:
    """The payload of WINDOW_UPDATE or RST_STREAM.

    Raises:
        ConnectionFault: It is not 32 bits.
    """
    if len(payload) != _NUMBER.size:
        raise ConnectionFault(Code.FRAME_SIZE_ERROR, "a frame of a broken size")
    value: int = _NUMBER.unpack(payload)[0]
    return value


def unpadded(payload: bytes, flags: int) -> bytes:
    """The payload of DATA or HEADERS without padding and priority.

    Raises:
        ConnectionFault: They are longer than the payload.
    """
    start, stop = 0, len(payload)
    if flags & PADDED:
        start, stop = 1, stop - payload[0] if payload else -1
    if flags & PRIORITISED:
        start += 5
    if start > stop:
        raise ConnectionFault(Code.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[start:stop]
