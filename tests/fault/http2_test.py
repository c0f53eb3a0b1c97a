"""What a client of HTTP/2 may do on one connection, what it must not, and how much of it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.errors import ErrorCodes
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from tritonclient.grpc import service_pb2 as pb

from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.frames import DATA, END_HEADERS, END_STREAM, HEADERS, frame, prefixed, reset, settings
from tests.support.certificates import open_channel
from tests.support.clients import MODEL_INFER, Grpc, RawConnection, bytes_tensor, metric
from tests.support.engines import stopped_engine
from tests.support.expected import fake_answers
from tests.support.http2 import BREACHES, RawHttp2, request_fields
from tests.support.models import NAME
from tests.support.server import FAKE, elapsed
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.server import Server

LIVE = "/inference.GRPCInferenceService/ServerLive"
BODY_LIMIT = 4 << 20
WINDOW = 65_535
INVALID_ARGUMENT, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL = 3, 4, 8, 12, 13


def infer(texts: list[str]) -> bytes:
    request = pb.ModelInferRequest(model_name=NAME)
    request.inputs.add(name="text", datatype="BYTES", shape=[len(texts), 1])
    request.raw_input_contents.append(bytes_tensor(texts))
    return bytes(request.SerializeToString())


def vectors(message: bytes) -> np.ndarray:
    reply = pb.ModelInferResponse.FromString(message)
    return np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(reply.outputs[0].shape)


def headers(connection: RawHttp2, stream: int, path: str = MODEL_INFER, **changes: str | None) -> bytes:
    return frame(HEADERS, END_HEADERS, stream, connection.block(request_fields(path, **changes)))


def serves(server: Server) -> bool:
    with RawHttp2(server.grpc) as connection:
        connection.call(1, b"", LIVE)
        return connection.reply(1).status == 0


def assert_lives(connection: RawHttp2) -> None:
    """A call on the same connection is answered, whatever came of those before."""
    connection.call(3, b"", LIVE)
    assert connection.reply(3).status == 0


@pytest.fixture
def connection(fake_server: Server) -> Iterator[RawHttp2]:
    with RawHttp2(fake_server.grpc) as opened:
        yield opened


@pytest.fixture
def hurried(impatient_server: Server) -> Iterator[RawHttp2]:
    with RawHttp2(impatient_server.grpc) as opened:
        yield opened


# What every client does.


def test_a_call(connection: RawHttp2, models: Path) -> None:
    """Headers, message, trailers: status 200, one message, status 0 and the stage times."""
    connection.call(1, infer(["plain"]))
    reply = connection.reply(1)
    assert (reply.fields[":status"], reply.fields["content-type"], reply.status) == ("200", "application/grpc", 0)
    assert int(reply.fields["bertserve-total-us"]) > 0
    np.testing.assert_allclose(vectors(reply.message), fake_answers(models, ["plain"]), atol=1e-5)


def test_the_server_says_what_it_takes(connection: RawHttp2) -> None:
    """SETTINGS: streams at a time, and the size of headers."""
    assert connection.await_frame(SettingsFrame).settings == {3: 256, 6: 16_384}


def test_many_calls_on_one_connection(connection: RawHttp2) -> None:
    """A block that comes again means the same, whatever came between."""
    for number in range(1, 200, 2):
        connection.call(number, infer(["again"]), x_number=str(number % 7))
        assert connection.reply(number).status == 0


def test_calls_side_by_side(fake_server: Server, models: Path) -> None:
    """64 at once on one channel are each answered with their own."""
    texts = [f"text {number}" for number in range(64)]
    with Grpc(fake_server) as client:
        calls = [client.infer.future(client.request([text])) for text in texts]
        found = [vectors(call.result().SerializeToString())[0] for call in calls]
    np.testing.assert_allclose(found, fake_answers(models, texts), atol=1e-5)


def test_large_calls_side_by_side(fake_server: Server) -> None:
    """More messages of nearly 4 MiB than the server grants at a time: all are read, one after another."""
    with Grpc(fake_server) as client:
        request = client.request(["small"])
        request.parameters["padding"].string_param = "x" * (BODY_LIMIT - 1000)
        calls = [client.infer.future(request) for _ in range(12)]
        assert all(call.result().outputs for call in calls)


def padded(connection: RawHttp2) -> Iterator[bytes]:
    """Padding and priority are no part of what is said."""
    flags = END_HEADERS | wire.PADDED | wire.PRIORITISED
    yield frame(HEADERS, flags, 1, b"\x07\0\0\0\0\x10" + connection.block() + b"\0" * 7)
    message = prefixed(infer(["padded " * 20]))
    for at in range(0, len(message), 10):
        yield frame(DATA, wire.PADDED, 1, b"\xff" + message[at : at + 10] + b"\0" * 255)
    yield frame(DATA, END_STREAM | wire.PADDED, 1, b"\x02\0\0")


def headers_in_pieces(connection: RawHttp2) -> Iterator[bytes]:
    """A header block may go on in CONTINUATION frames."""
    block = connection.block()
    yield frame(HEADERS, 0, 1, block[:5]) + frame(wire.CONTINUATION, 0, 1, block[5:6])
    yield frame(wire.CONTINUATION, END_HEADERS, 1, block[6:]) + frame(DATA, END_STREAM, 1, prefixed(infer(["x"])))


def trailers(connection: RawHttp2) -> Iterator[bytes]:
    """Headers behind the message are its end, and change nothing."""
    yield headers(connection, 1) + frame(DATA, 0, 1, prefixed(infer(["x"])))
    yield frame(HEADERS, END_HEADERS | END_STREAM, 1, connection.block([("x-late", "yes")]))


def unknown_frames(connection: RawHttp2) -> Iterator[bytes]:
    """Unknown types, PRIORITY, unknown settings and a GOAWAY of the client's are ignored."""
    yield frame(0xFA, 0xFF, 77, b"grease") + frame(wire.PRIORITY, 0, 5, b"\0\0\0\0\x10")
    yield settings((0xFABA, 7)) + frame(wire.GOAWAY, 0, 0, b"\0" * 8)
    yield headers(connection, 1) + frame(DATA, END_STREAM, 1, prefixed(infer(["x"])))


def single_bytes(connection: RawHttp2) -> Iterator[bytes]:
    """However the network cuts it."""
    data = headers(connection, 1) + frame(DATA, END_STREAM, 1, prefixed(infer(["slow"])))
    yield from (data[at : at + 1] for at in range(len(data)))


@pytest.mark.parametrize("sent", [padded, headers_in_pieces, trailers, unknown_frames, single_bytes])
def test_ways_to_send_a_call(connection: RawHttp2, sent: Callable[[RawHttp2], Iterator[bytes]]) -> None:
    for part in sent(connection):
        connection.send(part)
    assert connection.reply(1).status == 0
    assert_lives(connection)


def test_a_ping_is_answered(connection: RawHttp2) -> None:
    connection.send(frame(wire.PING, 0, 0, b"12345678"))
    answer = connection.await_frame(PingFrame)
    assert (set(answer.flags), answer.opaque_data) == ({"ACK"}, b"12345678")


# Flow control.


def test_a_window_of_zero_that_opens(fake_server: Server, models: Path) -> None:
    """The reply waits for its window and comes in pieces of it; its headers do not wait."""
    with RawHttp2(fake_server.grpc, first=settings((wire.INITIAL_WINDOW_SIZE, 0))) as connection:
        connection.call(1, infer(["patient"]))
        connection.await_frame(HeadersFrame)
        for size in (1, 100, 1000):
            connection.send(wire.window_update(1, size))
            assert len(connection.await_frame(DataFrame).data) == size
        connection.send(settings((wire.INITIAL_WINDOW_SIZE, 1 << 20)))
        reply = connection.reply(1)
    assert reply.status == 0
    np.testing.assert_allclose(vectors(reply.message), fake_answers(models, ["patient"]), atol=1e-5)


def test_a_reply_larger_than_the_window(fake_server: Server, models: Path) -> None:
    """No more than the window comes before it is opened, then the rest, in frames of at most 16 KiB."""
    texts = [f"text {number}" for number in range(100)]
    with RawHttp2(fake_server.grpc, window=0) as connection:
        connection.call(1, infer(texts))
        received = 0
        while received < WINDOW:
            size = len(connection.await_frame(DataFrame).data)
            assert size <= 16_384
            received += size
        assert received == WINDOW
        update = (1 << 20).to_bytes(4, "big")
        connection.send(frame(wire.WINDOW_UPDATE, 0, 1, update) + frame(wire.WINDOW_UPDATE, 0, 0, update))
        reply = connection.reply(1)
    np.testing.assert_allclose(vectors(reply.message), fake_answers(models, texts), atol=1e-5)


def test_a_reply_that_is_never_taken(impatient_server: Server) -> None:
    """A client that never opens its window loses the call after `body_timeout_s`, not the connection."""
    started = time.monotonic()
    with RawHttp2(impatient_server.grpc, first=settings((wire.INITIAL_WINDOW_SIZE, 10))) as connection:
        connection.call(1, infer(["x"]))
        assert connection.reply(1).reset == ErrorCodes.CANCEL
        connection.send(settings((wire.INITIAL_WINDOW_SIZE, WINDOW)))
        connection.call(3, infer(["x"]))
        assert connection.reply(3).status == 0
    assert elapsed(started) < 20


@pytest.mark.slow
def test_a_client_that_does_not_read(serve: Callable[..., Server]) -> None:
    """Once the buffers are full it is not read either, and is cut off after `body_timeout_s`."""
    server = serve(*FAKE)
    message = infer(["x"] * 128)
    with RawHttp2(server.grpc, first=settings((wire.INITIAL_WINDOW_SIZE, 2**31 - 1))) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(1, 2 * 200, 2):
            connection.call(number, message)

        def cut_off() -> bool:
            try:
                connection.socket.sendall(frame(wire.PING, 0, 0, b"12345678"))
            except (ConnectionError, ssl.SSLError):
                return True
            return False

        wait_for(cut_off, "the connection to be cut off", 30)
    wait_for(lambda: metric(server, "bertserve_admitted_tokens") == 0, "an idle server")
    assert serves(server)


def test_a_message_needs_no_more_than_its_grant(connection: RawHttp2) -> None:
    """A stream may send 64 KiB; a larger message is granted exactly what it lacks."""
    message = prefixed(infer(["x"]) + b"\x7a\xa0\x8d\x06" + b"\0" * 100_000)  # an unknown field of 100,000 bytes
    connection.send(headers(connection, 1) + frame(DATA, 0, 1, message[:10_000]))
    connection.send(frame(wire.PING, 0, 0, b"........"))
    updates = []
    for arrived in connection.frames():
        updates += [arrived] if isinstance(arrived, WindowUpdateFrame) and arrived.stream_id else []
        if isinstance(arrived, PingFrame):
            break
    assert [(update.stream_id, update.window_increment) for update in updates] == [(1, len(message) - WINDOW)]
    for at in range(10_000, len(message), 16_384):
        part = message[at : at + 16_384]
        connection.send(frame(DATA, END_STREAM if at + len(part) == len(message) else 0, 1, part))
    assert connection.reply(1).status == 0


def test_data_beyond_the_window(connection: RawHttp2) -> None:
    """What the window does not allow resets the stream."""
    connection.send(headers(connection, 1) + frame(DATA, 0, 1, struct.pack(">BI", 0, 100)[:3]))
    connection.send(frame(DATA, wire.PADDED, 1, b"\xff" + b"\0" * 255) * 300)
    assert connection.reply(1).reset == ErrorCodes.FLOW_CONTROL_ERROR


# Calls that gRPC refuses.


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", UNIMPLEMENTED),
        (b"\0\0\0", UNIMPLEMENTED),
        (prefixed(b"abc")[:-1], UNIMPLEMENTED),
        (prefixed(b"") * 2, UNIMPLEMENTED),
        (prefixed(b"\xff\xff"), INVALID_ARGUMENT),
        (prefixed(b"", compressed=True), INTERNAL),
        (struct.pack(">BI", 0, BODY_LIMIT + 1), RESOURCE_EXHAUSTED),
    ],
    ids=["none", "half a prefix", "cut", "two", "no protobuf", "compressed", "too large"],
)
def test_messages_that_are_refused(connection: RawHttp2, data: bytes, status: int) -> None:
    connection.send(headers(connection, 1) + frame(DATA, END_STREAM, 1, data))
    reply = connection.reply(1)
    assert (reply.status, reply.data) == (status, b"")
    assert reply.fields["bertserve-reason"]
    assert_lives(connection)


def test_row_05_a_message_too_large_is_refused_before_it_is_sent(connection: RawHttp2) -> None:
    """Its length is enough: no window is granted, and the client is told to stop."""
    connection.send(headers(connection, 1) + frame(DATA, 0, 1, struct.pack(">BI", 0, BODY_LIMIT + 1) + b"\0" * 1000))
    assert connection.reply(1).status == RESOURCE_EXHAUSTED
    stop = connection.await_frame(RstStreamFrame)
    assert (stop.stream_id, stop.error_code) == (1, ErrorCodes.NO_ERROR)
    connection.send(frame(DATA, 0, 1, b"\0" * 1000) * 5)  # what was on its way
    assert_lives(connection)


def test_row_08_a_message_that_does_not_arrive(hurried: RawHttp2) -> None:
    """Half a message and then silence is DEADLINE_EXCEEDED."""
    started = time.monotonic()
    hurried.send(headers(hurried, 1) + frame(DATA, 0, 1, prefixed(b"abc")[:-1]))
    assert hurried.reply(1).status == DEADLINE_EXCEEDED
    assert elapsed(started) < 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("said", [b"", wire.PREFACE[:10], wire.PREFACE], ids=["nothing", "half", "preface"])
def test_row_08_a_connection_that_does_not_begin(impatient_server: Server, said: bytes) -> None:
    """Silence in place of the preface or SETTINGS is closed."""
    with RawConnection(impatient_server.grpc) as connection:
        connection.send(said)
        connection.read_to_end()


def test_row_08_a_frame_that_does_not_end(hurried: RawHttp2) -> None:
    """Half a frame and then silence ends the connection; an idle connection stays."""
    hurried.send(headers(hurried, 1)[:-3])
    assert hurried.goaway() == ErrorCodes.PROTOCOL_ERROR


@pytest.mark.parametrize(
    ("changes", "http_status", "status"),
    [
        ({"content_type": "application/json"}, "415", UNIMPLEMENTED),
        ({"content_type": None}, "415", UNIMPLEMENTED),
        ({"method": "GET"}, "405", UNIMPLEMENTED),
        ({"path": "/nothing"}, "200", UNIMPLEMENTED),
        ({"grpc_timeout": "1"}, "200", INVALID_ARGUMENT),
        ({"grpc_timeout": "123456789S"}, "200", INVALID_ARGUMENT),
        ({"x_padding": "x" * 16_384}, "200", RESOURCE_EXHAUSTED),
        ({f"x_{number}": "" for number in range(100)}, "200", RESOURCE_EXHAUSTED),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_headers_that_are_refused(
    connection: RawHttp2, changes: dict[str, str | None], http_status: str, status: int
) -> None:
    """Each with its status, without waiting for the message; the connection lives on."""
    path = changes.get("path") or MODEL_INFER
    others = {name: value for name, value in changes.items() if name != "path"}  # the table is another test's as well
    block = connection.block(request_fields(path, **others))
    parts = [block[at : at + 16_384] for at in range(0, len(block), 16_384)]
    kinds = [HEADERS, *[wire.CONTINUATION] * (len(parts) - 1)]
    for kind, part in zip(kinds, parts, strict=True):
        connection.send(frame(kind, END_HEADERS if part is parts[-1] else 0, 1, part))
    reply = connection.reply(1)
    assert (reply.fields[":status"], reply.status) == (http_status, status)
    assert_lives(connection)


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;charset=utf-8"])
def test_content_types_of_grpc(connection: RawHttp2, kind: str) -> None:
    connection.call(1, b"", LIVE, content_type=kind)
    assert connection.reply(1).status == 0


def test_a_deadline_in_the_headers(connection: RawHttp2) -> None:
    """`grpc-timeout` is the call's deadline: one that has passed gets DEADLINE_EXCEEDED."""
    connection.call(1, infer(["late"]), grpc_timeout="1n")
    assert connection.reply(1).status == DEADLINE_EXCEEDED
    connection.call(3, infer(["in time"]), grpc_timeout="10S")
    assert connection.reply(3).status == 0


@pytest.mark.parametrize(
    "fields",
    [
        request_fields(method=None),
        request_fields(path=None),  # type: ignore[arg-type]
        request_fields(connection="close"),
        [*request_fields(), (":path", LIVE)],
        [*request_fields(), ("X-Capital", "yes")],
        [*request_fields(), ("x-line", "a\r\nb")],
        [("x-early", "yes"), *request_fields()],
        [*request_fields(), (":late", "yes")],
    ],
)
def test_malformed_headers(connection: RawHttp2, fields: list[tuple[str, str]]) -> None:
    """What RFC 9113 calls malformed resets the stream; the connection lives on."""
    connection.send(frame(HEADERS, END_HEADERS, 1, connection.block(fields)))
    assert connection.reply(1).reset == ErrorCodes.PROTOCOL_ERROR
    assert_lives(connection)


# Connections that break the rules.


@pytest.mark.parametrize(("data", "code"), BREACHES)
def test_frames_that_end_the_connection(fake_server: Server, connection: RawHttp2, data: bytes, code: int) -> None:
    """Each with GOAWAY and the code that RFC 9113 gives it; other connections do not notice."""
    connection.send(data)
    assert connection.goaway() == code
    assert serves(fake_server)


def test_a_first_frame_that_is_not_settings(fake_server: Server) -> None:
    """The preface is followed by SETTINGS or by the end."""
    with RawHttp2(fake_server.grpc, first=frame(wire.PING, 0, 0, b"12345678")) as connection:
        assert connection.goaway() == ErrorCodes.PROTOCOL_ERROR


def test_a_stream_number_that_goes_backwards(connection: RawHttp2) -> None:
    connection.call(5, b"", LIVE)
    connection.reply(5)
    connection.call(3, b"", LIVE)
    assert connection.goaway() == ErrorCodes.PROTOCOL_ERROR


def test_data_on_a_closed_stream(connection: RawHttp2) -> None:
    """Data behind the end of a call resets that stream alone."""
    connection.call(1, b"", LIVE)
    assert connection.reply(1).status == 0
    connection.send(frame(DATA, 0, 1, b"late"))
    reset = connection.await_frame(RstStreamFrame)
    assert (reset.stream_id, reset.error_code) == (1, ErrorCodes.STREAM_CLOSED)
    assert_lives(connection)


# Floods.


def flood(connection: RawHttp2, data: bytes, times: int) -> int:
    """Sends something many times; the code with which the server closes, if it does."""
    for sent in range(0, times, 1000):
        connection.send(data * min(1000, times - sent))
    return connection.goaway()


@pytest.mark.parametrize(
    "data",
    [
        frame(wire.PING, 0, 0, b"12345678"),
        settings((wire.INITIAL_WINDOW_SIZE, WINDOW)),
        frame(wire.GOAWAY, 0, 0, b"\0" * 8),
        frame(wire.WINDOW_UPDATE, 0, 0, b"\0\0\0\1"),
        frame(wire.PRIORITY, 0, 1, b"\0\0\0\0\x10"),
        frame(wire.SETTINGS, wire.ACK, 0),
        frame(0xFA, 0, 0, b"grease"),
        frame(DATA, 0, 1),
        frame(DATA, 0, 1, b"\0"),
    ],
    ids=["ping", "settings", "goaway", "window", "priority", "acknowledgement", "unknown", "no data", "single bytes"],
)
def test_row_12_flood(fake_server: Server, connection: RawHttp2, data: bytes) -> None:
    """Frames that ask for work and bring none, or next to no data, end the connection."""
    connection.send(headers(connection, 1) + frame(DATA, 0, 1, struct.pack(">BI", 0, 300_000)))
    assert flood(connection, data, 200_000) == ErrorCodes.ENHANCE_YOUR_CALM
    assert serves(fake_server)


def test_row_12_who_floods_and_comes_back_waits(serve: Callable[..., Server]) -> None:
    """A new connection brings its peer no fresh credit; those that are open are served, and the new one is, too."""
    server = serve(*FAKE)
    with contextlib.ExitStack() as opened:
        honest, *hostile = (opened.enter_context(RawHttp2(server.grpc)) for _ in range(13))
        # A flood in one frame: it uses all credit up, and on no host does so much time pass that the debt is forgotten.
        flooding = frame(wire.SETTINGS, 0, 0, struct.pack(">HI", wire.INITIAL_WINDOW_SIZE, WINDOW) * 2_000)
        for connection in hostile:
            assert flood(connection, flooding, 1) == ErrorCodes.ENHANCE_YOUR_CALM
        honest.call(1, b"", LIVE)
        assert honest.reply(1).status == 0
        begun = time.monotonic()
        again = opened.enter_context(RawHttp2(server.grpc))
        again.call(1, b"", LIVE)
        assert again.reply(1).status == 0
        assert time.monotonic() - begun >= 0.5


def test_row_12_pings_beside_calls(connection: RawHttp2) -> None:
    """A client that measures its round trip with a ping for each call, as gRPC's own do, is no flood."""
    for number in range(1, 3000, 2):
        connection.send(frame(wire.PING, 0, 0, b"12345678"))
        connection.call(number, b"", LIVE)
        assert connection.reply(number).status == 0


@pytest.mark.parametrize("size", [0, 1, 16_000], ids=["empty", "single bytes", "full"])
def test_row_04_continuation_flood(fake_server: Server, connection: RawHttp2, size: int) -> None:
    """A header block that goes on and on is cut off, not collected."""
    connection.send(frame(HEADERS, 0, 1))
    piece = frame(wire.CONTINUATION, 0, 1, b"\0" * size)
    for _ in range(1000):
        connection.send(piece)
    assert connection.goaway() == ErrorCodes.ENHANCE_YOUR_CALM
    assert serves(fake_server)


def test_row_04_header_bomb(fake_server: Server, connection: RawHttp2) -> None:
    """A small block that decodes to a huge list (one entry of the table, many times) is not decoded to its end."""
    entry = b"\x40" + b"\x01x" + b"\x7f\x91\x1e" + b"y" * 4000
    connection.send(frame(HEADERS, END_HEADERS, 1, entry + b"\xbe" * 10_000))
    assert connection.goaway() == ErrorCodes.ENHANCE_YOUR_CALM
    assert serves(fake_server)


def test_row_11_rapid_reset(fake_server: Server) -> None:
    """10,000 calls that are cancelled as soon as they are made: the connection ends, every permit is free."""
    message = infer(["never mind"])
    with RawHttp2(fake_server.grpc) as connection:
        connection.call(1, message)
        connection.reply(1)
        block = connection.block()
        for number in range(3, 20_003, 2):
            connection.send(
                frame(HEADERS, END_HEADERS, number, block)
                + frame(DATA, END_STREAM, number, prefixed(message))
                + reset(number)
            )
        assert connection.goaway() == ErrorCodes.ENHANCE_YOUR_CALM
    wait_for(lambda: metric(fake_server, "bertserve_admitted_tokens") == 0, "every permit to be free")
    assert metric(fake_server, "bertserve_queue_texts") == 0
    assert serves(fake_server)


def test_row_11_streams_at_a_time(connection: RawHttp2) -> None:
    """Beyond 256 open calls a further one is refused, so that it can be tried elsewhere; the others go on."""
    for number in range(1, 2 * 256, 2):
        connection.send(headers(connection, number, path=LIVE))
    connection.call(2 * 256 + 1, b"", LIVE)
    assert connection.reply(2 * 256 + 1).reset == ErrorCodes.REFUSED_STREAM
    connection.send(frame(DATA, END_STREAM, 1, prefixed(b"")))
    assert connection.reply(1).status == 0
    connection.call(2 * 256 + 3, b"", LIVE)
    assert connection.reply(2 * 256 + 3).status == 0


def test_row_13_a_reset_in_mid_call(serve: Callable[..., Server]) -> None:
    """A call that is cancelled while it is computed frees its permit at once and is counted."""
    server = serve(*FAKE)
    with stopped_engine(server), RawHttp2(server.grpc) as connection:
        connection.call(1, infer(["cancelled"]))
        wait_for(lambda: metric(server, "bertserve_admitted_tokens") > 0, "the call to be admitted")
        connection.send(reset(1))
        wait_for(lambda: metric(server, "bertserve_admitted_tokens") == 0, "its permit to be free")
        assert metric(server, "bertserve_requests_total", reason="client_gone") == 1
        connection.call(3, b"", LIVE)
        assert connection.reply(3).status == 0
    assert "Traceback" not in server.log


# The end.


def test_row_55_goaway_in_two_steps(serve: Callable[..., Server]) -> None:
    """First all streams are welcome; once the client has heard, the last is named, and it is still answered."""
    server = serve(*FAKE)
    with RawHttp2(server.grpc) as connection:
        with stopped_engine(server):
            connection.call(1, infer(["under way"]))
            wait_for(lambda: metric(server, "bertserve_admitted_tokens") > 0, "the call to be admitted")
            server.signal(2)
            first = connection.await_frame(GoAwayFrame)
            assert (first.last_stream_id, first.error_code) == (2**31 - 1, ErrorCodes.NO_ERROR)
            for number, text in ((3, "on its way"), (5, "behind the answer to the first ping")):
                ping = connection.await_frame(PingFrame)
                connection.call(number, infer([text]))
                connection.send(frame(wire.PING, wire.ACK, 0, ping.opaque_data))
            second = connection.await_frame(GoAwayFrame)
            assert (second.last_stream_id, second.error_code) == (5, ErrorCodes.NO_ERROR)
            connection.call(7, infer(["too late"]))
            assert connection.reply(7).reset == ErrorCodes.REFUSED_STREAM
        assert connection.reply(5).status == 0
        assert connection.reply(3).status == 0
        assert connection.reply(1).status == 0
    assert server.wait(5) == 0


def test_watchers_hear_of_the_end(serve: Callable[..., Server]) -> None:
    """Whoever watches the health is told each state, and does not hold up the end."""
    server = serve(*FAKE, "--lame-duck-s", "1")
    seen = []
    with open_channel(server.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        seen.append(next(watch).status)
        server.signal(15)
        seen.append(next(watch).status)
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
    response = health_pb2.HealthCheckResponse
    assert seen == [response.SERVING, response.NOT_SERVING]
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert server.wait(5) == 0


def test_watching_a_service_that_does_not_exist(fake_server: Server) -> None:
    """It is SERVICE_UNKNOWN, and the watch goes on until the client ends it."""
    with open_channel(fake_server.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


def test_clients_in_parallel(fake_server: Server, models: Path) -> None:
    """Several channels at once, each with calls one after another."""

    def ask(number: int) -> list[np.ndarray]:
        with Grpc(fake_server) as client:
            return [client.embed([f"client {number}, call {call}"]).vectors[0] for call in range(20)]

    with ThreadPoolExecutor(8) as pool:
        found = [row for rows in pool.map(ask, range(8)) for row in rows]
    texts = [f"client {number}, call {call}" for number in range(8) for call in range(20)]
    np.testing.assert_allclose(found, fake_answers(models, texts), atol=1e-5)
