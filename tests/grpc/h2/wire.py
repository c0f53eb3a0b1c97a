"""Frames made and read by hand, so that these tests need nothing of the code under test."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hpack import Encoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
ACK = END_STREAM = 1
END_HEADERS = 4
PADDED = 8
INITIAL_WINDOW_SIZE = 4
REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "test")]


class Frame(NamedTuple):
    """A frame as it came."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def number(self) -> int:
        """The code of GOAWAY or RST_STREAM, or the size of WINDOW_UPDATE."""
        return int.from_bytes(self.payload[4:8] if self.kind == GOAWAY else self.payload[:4], "big")


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """A frame."""
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def setting(key: int, value: int) -> bytes:
    """SETTINGS with one value."""
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def window_update(stream: int, size: int) -> bytes:
    """WINDOW_UPDATE."""
    return frame(WINDOW_UPDATE, 0, stream, size.to_bytes(4, "big"))


def request(encoder: Encoder, stream: int, flags: int = END_STREAM, *fields: tuple[str, str]) -> bytes:
    """The headers of a request."""
    return frame(HEADERS, END_HEADERS | flags, stream, encoder.encode([*REQUEST, *fields]))


START = PREFACE + frame(SETTINGS)


def split(data: bytes) -> list[Frame]:
    """Whole frames."""
    frames = []
    while data:
        size = int.from_bytes(data[:3], "big")
        assert len(data) >= 9 + size
        frames.append(Frame(*struct.unpack_from(">BBI", data, 3), data[9 : 9 + size]))
        data = data[9 + size :]
    return frames
