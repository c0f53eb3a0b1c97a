"""Frame by frame: what a peer may do, what it must not, and how much of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, GoAwayFrame, PingFrame, RstStreamFrame
from hypothesis import given
from hypothesis import strategies as st

from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    frame,
    reset,
    settings,
    window_update,
)
from bertserve.serving.grpc.h2 import (
    ConnectionFailed,
    DataReceived,
    DataSent,
    ErrorCode,
    H2Connection,
    H2Phase,
    Limits,
    RequestReceived,
    StreamReset,
    encode_fields,
    encode_status,
)
from tests.support.http2 import REQUEST, START, of_type, request, split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import FrameType

    from _typeshed import TraceFunction
    from hyperframe.frame import Frame

    from bertserve.serving.grpc.h2 import Event, Stream

OK = encode_status(200)
END = encode_fields([("x-end", "yes")])
WINDOW = 65_535


class Server:
    """A connection that has begun, with all its events and all the frames that it sent."""

    def __init__(self, limits: Limits | None = None, start: bytes = START) -> None:
        self.h2 = H2Connection(limits or Limits())
        self.events: list[Event] = []
        self.say(start)

    def say(self, *parts: bytes) -> list[Event]:
        """What some bytes of the peer's bring about; every turn of the loop that they need is taken."""
        events = []
        for part in parts:
            events += self.h2.receive(part)
            while self.h2.pending:
                events += self.h2.receive(b"")
        self.events += events
        return events

    def open(self, data: bytes) -> Stream:
        """The stream that a request opens."""
        (event,) = [event for event in self.say(data) if isinstance(event, RequestReceived)]
        return event.stream

    def said(self) -> list[Frame]:
        """The frames sent since the last time."""
        return split(self.h2.data_to_send())

    def reset(self) -> int:
        """The code of the last stream that it has reset since."""
        return of_type(RstStreamFrame, self.said())[-1].error_code

    def goaway(self) -> int:
        """The code with which the connection ended."""
        (code,) = [said.error_code for said in of_type(GoAwayFrame, self.said())]
        assert self.h2.finished
        assert isinstance(self.events[-1], ConnectionFailed)
        assert self.events[-1].code == code
        return code


def test_a_request_and_its_reply() -> None:
    """Headers, body, end; headers, data, trailers."""
    server = Server()
    head, body = server.say(request(Encoder(), 1, 0) + frame(DATA, END_STREAM, 1, b"hello"))
    assert isinstance(head, RequestReceived)
    assert isinstance(body, DataReceived)
    assert (b":path", b"/") in head.headers.fields
    assert (head.ended, body.data, body.ended) == (False, b"hello", True)
    server.said()
    server.h2.send(head.stream, OK, b"world", END)
    assert server.h2.data_to_send() == (
        frame(HEADERS, END_HEADERS, 1, OK)
        + frame(DATA, 0, 1, b"world")
        + frame(HEADERS, END_HEADERS | END_STREAM, 1, END)
    )
    assert head.stream.closed
    assert server.h2.streams == []


def test_what_the_server_says_first() -> None:
    """SETTINGS with its limits, a wide window, and the acknowledgement of the peer's wire.SETTINGS."""
    first = Server(Limits(streams=7, header_bytes=1000)).h2.data_to_send()
    assert first == settings((3, 7), (6, 1000)) + window_update(0, 2**30 - WINDOW) + frame(wire.SETTINGS, wire.ACK)


@pytest.mark.parametrize(
    ("fields", "flags"), [([("x-late", "")], 0), ([(":path", "/")], END_STREAM)], ids=["no end", "pseudo-field"]
)
def test_trailers_that_are_none(fields: list[tuple[str, str]], flags: int) -> None:
    """They reset the stream."""
    server, encoder = Server(), Encoder()
    server.say(request(encoder, 1, 0))
    (event,) = server.say(frame(HEADERS, END_HEADERS | flags, 1, encoder.encode(fields)))
    assert isinstance(event, StreamReset)
    assert event.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize(("length", "kind"), [("5", DataReceived), ("4", StreamReset), ("6", StreamReset)])
def test_a_body_of_another_length_than_was_said(length: str, kind: type[Event]) -> None:
    """It is malformed (RFC 9113, 8.1.1)."""
    server = Server()
    server.say(request(Encoder(), 1, 0, ("content-length", length)))
    server.say(frame(DATA, 0, 1, b"hel"))
    assert type(server.say(frame(DATA, END_STREAM, 1, b"lo"))[-1]) is kind


def test_a_body_longer_than_was_said_is_refused_where_it_is() -> None:
    """Not at its end, which may never come."""
    server = Server()
    server.open(request(Encoder(), 1, 0, ("content-length", "4")))
    (event,) = server.say(frame(DATA, 0, 1, b"hello"))
    assert isinstance(event, StreamReset)
    assert server.reset() == ErrorCode.PROTOCOL_ERROR


def test_no_body_where_one_was_said() -> None:
    """The request is never seen."""
    server = Server()
    assert server.say(request(Encoder(), 1, END_STREAM, ("content-length", "1"))) == []
    assert server.reset() == ErrorCode.PROTOCOL_ERROR


# Rules.


def test_a_connection_that_fails_takes_its_streams_along() -> None:
    """Each is reset, then the connection says that it has failed."""
    server, encoder = Server(), Encoder()
    streams = [server.open(request(encoder, number, 0)) for number in (1, 3)]
    *resets, failed = server.say(frame(wire.PING, 0, 0, b"short"))
    assert [event.stream for event in resets if isinstance(event, StreamReset)] == streams
    assert isinstance(failed, ConnectionFailed)
    assert all(stream.closed for stream in streams)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(wire.PRIORITY, 0, 1, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
        (window_update(1, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(DATA, wire.PADDED, 1, b"\xff" + b"\0" * 255) * 300, ErrorCode.FLOW_CONTROL_ERROR),
        (reset(1), ErrorCode.CANCEL),
    ],
)
def test_what_ends_a_stream(data: bytes, code: ErrorCode) -> None:
    """The stream alone: the next one is answered."""
    server, encoder = Server(), Encoder()
    stream = server.open(request(encoder, 1, 0))
    resets = [event for event in server.say(data) if isinstance(event, StreamReset)]
    assert [(event.stream, event.code) for event in resets] == [(stream, code)]
    assert server.open(request(encoder, 3)).number == 3


def test_headers_of_a_closed_stream() -> None:
    """STREAM_CLOSED if the stream was open once (RFC 9113, 5.1), PROTOCOL_ERROR if it was passed over (5.1.1)."""
    for number, code in ((7, ErrorCode.STREAM_CLOSED), (5, ErrorCode.PROTOCOL_ERROR), (1, ErrorCode.STREAM_CLOSED)):
        server, encoder = Server(), Encoder()
        for opened in (1, 3, 7, 9):
            server.h2.send(server.open(request(encoder, opened)), OK, b"", END)
        server.said()
        server.say(request(encoder, number))
        assert server.goaway() == code


@pytest.mark.parametrize(("number", "kinds"), [(1, [wire.RST_STREAM]), (3, [])], ids=["over", "to come"])
def test_priority_of_a_wrong_size_spoils_no_other_call(number: int, kinds: list[int]) -> None:
    """A stream that is to come cannot be reset; one that is over is, whenever its end was sent (RFC 9113, 6.3)."""
    server, encoder = Server(), Encoder()
    server.h2.send(server.open(request(encoder, 1)), OK, b"", END)
    server.said()
    server.say(frame(wire.PRIORITY, 0, number, b"1234"))
    stream = server.open(request(encoder, 3, 0))
    (event,) = server.say(frame(DATA, END_STREAM, 3, b"hello"))
    assert isinstance(event, DataReceived)
    server.h2.send(stream, OK, event.data, END)
    assert [said.type for said in server.said()] == [*kinds, HEADERS, DATA, HEADERS]


@given(st.binary(max_size=200))
def test_any_bytes_at_the_start(data: bytes) -> None:
    """What is not HTTP/2 ends the connection without a word."""
    server = Server(start=data)
    if not wire.PREFACE.startswith(data[:24]):
        assert server.h2.finished
        assert not server.h2.begun
        assert server.said() == []


frames_of_any_kind = st.builds(
    frame, st.integers(0, 11), st.integers(0, 255), st.sampled_from([0, 1, 3, 5, 7, 2**31 - 1]), st.binary(max_size=40)
)


@given(st.lists(st.one_of(frames_of_any_kind, st.binary(max_size=20)), max_size=12))
def test_any_frames(parts: list[bytes]) -> None:
    """Whatever comes is answered with whole frames, or ends the connection; nothing is raised."""
    server = Server()
    server.say(request(Encoder(), 1), *parts)
    assert len(of_type(GoAwayFrame, server.said())) == server.h2.finished


# Flow control.


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.sampled_from([0, 1]), st.integers(1, 60_000)), max_size=20),
    st.binary(max_size=10).map(lambda piece: piece * 15_000),
)
def test_data_within_both_windows(initial: int, updates: list[tuple[int, int]], data: bytes) -> None:
    """Never more than both allow, and with time as much; once they are wide, all of it, and then the trailers."""
    server = Server()
    server.say(settings((wire.INITIAL_WINDOW_SIZE, initial)))
    stream = server.open(request(Encoder(), 1))
    server.said()
    server.h2.send(stream, OK, data, END)
    windows, frames = [WINDOW, initial], server.said()
    wide = 1 << 20
    for number, more in [*updates, (0, wide), (1, wide)]:
        assert data.startswith(body(frames))
        assert len(body(frames)) <= min(windows)
        server.h2.renew(1)
        frames += server.said()
        assert body(frames) == data[: min(windows)]
        assert stream.closed == (body(frames) == data)
        windows[number] += more
        server.say(window_update(number, more))
        frames += server.said()
    assert [said.type for said in frames if said.type != DATA] == [HEADERS, HEADERS]
    assert stream.closed


def test_data_keeps_its_order() -> None:
    """A part that fits a window does not overtake one that is held back until the window is wider."""
    server = Server()
    stream = server.open(request(Encoder(), 1))
    server.say(window_update(0, 1 << 20))
    first, second = b"1" * (WINDOW + 1000), b"2" * 50
    server.h2.send(stream, OK, first)
    server.say(window_update(1, 100))
    server.h2.send(stream, None, second, END)
    server.say(window_update(1, 1 << 20))
    assert body(server.said()) == first + second
    assert stream.closed


def sizes(frames: Iterable[Frame]) -> list[int]:
    return [len(said.data) for said in of_type(DataFrame, frames)]


def body(frames: Iterable[Frame]) -> bytes:
    return b"".join(said.data for said in of_type(DataFrame, frames))


def test_windows_opened_byte_by_byte_do_not_make_frames_of_a_byte() -> None:
    """Small grants are put together; what is left of them goes out with time, and what ends the data at once."""
    server = Server()
    stream = server.open(request(Encoder(), 1))
    server.h2.send(stream, OK, b"x" * (WINDOW + 2100), END)
    server.say(window_update(0, 1 << 20))
    server.said()
    server.say(window_update(1, 1) * 2000)
    assert sizes(server.said()) == [512, 512, 512]
    assert server.h2.renew(1) == []
    assert sizes(server.said()) == [2000 - 3 * 512]
    server.say(window_update(1, 1) * 99)
    assert server.said() == []
    server.say(window_update(1, 1))
    data, trailers = server.said()
    assert (sizes([data, trailers]), trailers.type) == ([100], HEADERS)


@pytest.mark.parametrize("initial", [0, 1, 100, 3000])
def test_a_peer_with_small_windows_is_never_kept_waiting(initial: int) -> None:
    """It gives back each part when it has come: no step waits for the next second."""
    server = Server(Limits(credit=1 << 30))
    server.say(settings((wire.INITIAL_WINDOW_SIZE, initial)))
    stream = server.open(request(Encoder(), 1))
    server.said()
    server.h2.send(stream, OK, b"x" * 10_000, END)
    taken = body(server.said())
    if not initial:
        server.say(window_update(1, 10))
        taken += body(server.said())
    while not stream.closed:
        before = len(taken)
        server.say(window_update(1, max(1, initial // 4)))
        taken += body(server.said())
        assert len(taken) > before
    assert len(taken) == 10_000


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of the package a call runs: work that no clock and no other process disturbs."""
    lines, tracing = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction | None:
        nonlocal lines
        lines += event == "line"
        return trace if "/grpc/h2/" in frame.f_code.co_filename else None

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(tracing)
    return lines


def blocked(streams: int, *, by_connection: bool) -> H2Connection:
    """A connection with replies that wait for a window: the connection's, or their own."""
    server, encoder = Server(), Encoder()
    server.say(settings((wire.INITIAL_WINDOW_SIZE, (1 << 20) if by_connection else 0)))
    for number in range(1, 2 * streams, 2):
        server.h2.send(server.open(request(encoder, number)), OK, b"x" * 100_000, END)
    server.said()
    return server.h2


@pytest.mark.parametrize("by_connection", [True, False], ids=["of the connection", "of a stream"])
@pytest.mark.parametrize("size", [1, 600, 40_000])
def test_a_window_costs_what_it_lets_out(size: int, *, by_connection: bool) -> None:
    """However many streams wait for it, or for another."""
    update = window_update(0 if by_connection else 1, size)
    few, many = (blocked(streams, by_connection=by_connection) for streams in (3, 250))
    assert lines_of(lambda: many.receive(update)) == lines_of(lambda: few.receive(update))
    assert many.data_to_send() == few.data_to_send()


def test_streams_take_turns() -> None:
    """A reply that is large leaves room for others in a window that they share."""
    h2 = blocked(4, by_connection=True)
    h2.receive(window_update(0, 8 * 16_384))
    assert [said.stream_id for said in split(h2.data_to_send())] == [1, 3, 5, 7, 1, 3, 5, 7]


def test_a_wide_window_lets_out_so_much_in_a_turn() -> None:
    """The rest follows in the next, and all of it in the end."""
    h2 = blocked(250, by_connection=True)
    h2.receive(window_update(0, 1 << 30))
    assert h2.pending
    sent = [len(h2.data_to_send())]
    while h2.pending:
        h2.receive(b"")
        sent.append(len(h2.data_to_send()))
    assert max(sent) < 1.1 * (1 << 20)
    assert sum(sent) > 250 * 100_000 - WINDOW
    assert h2.streams == []


def test_data_that_was_held_back_is_reported() -> None:
    """The caller hears when it may go on; data of other streams is not in the way."""
    server, encoder = Server(), Encoder()
    server.say(settings((wire.INITIAL_WINDOW_SIZE, 3)))
    one, other = server.open(request(encoder, 1)), server.open(request(encoder, 3))
    server.h2.send(one, OK, b"hello")
    server.h2.send(other, OK, b"abc", END)
    assert bytes(one.unsent or b"") == b"lo"
    assert other.closed
    assert server.say(window_update(1, 1)) == []
    (event,) = server.say(window_update(1, 1))
    assert isinstance(event, DataSent)
    assert event.stream is one
    assert one.unsent is None


def test_a_transport_that_is_full_holds_data_back() -> None:
    """Headers go out, data waits for `resume`."""
    server = Server()
    stream = server.open(request(Encoder(), 1))
    server.said()
    server.h2.pause()
    server.h2.send(stream, OK, b"hello", END)
    assert [said.type for said in server.said()] == [HEADERS]
    assert server.h2.resume() == []
    assert [said.type for said in server.said()] == [DATA, HEADERS]


def test_a_body_beyond_the_first_window_is_granted_what_it_lacks() -> None:
    """Padding counts in the window, not in the body."""
    server = Server()
    stream = server.open(request(Encoder(), 1, 0))
    server.say(frame(DATA, wire.PADDED, 1, b"\x09" + b"x" * 1000 + b"\0" * 9))
    server.said()
    server.h2.expect(stream, 100_000)
    server.h2.expect(stream, 100_000)
    assert server.h2.data_to_send() == window_update(1, 100_000 - 1000 - (WINDOW - 1010))


def test_grants_of_all_streams_are_bounded() -> None:
    """A stream that asks for more than is left waits until another has ended."""
    server, encoder = Server(Limits(granted_bytes=100_000)), Encoder()
    one, other = server.open(request(encoder, 1, 0)), server.open(request(encoder, 3, 0))
    server.said()
    for stream in (one, other):
        server.h2.expect(stream, 150_000)
    assert [said.stream_id for said in server.said()] == [1]
    assert other.wanted == 150_000 - WINDOW
    server.h2.reset(one, ErrorCode.CANCEL)
    assert [(said.type, said.stream_id) for said in server.said()] == [(wire.RST_STREAM, 1), (wire.WINDOW_UPDATE, 3)]


def test_a_window_opens_again_with_what_is_consumed() -> None:
    """A stream of messages goes on for ever, and never has more than a window unread."""
    server = Server()
    stream = server.open(request(Encoder(), 1, 0))
    for _ in range(20):
        server.say(frame(DATA, 0, 1, b"x" * 16_384) * 3)
        server.h2.consume(stream, stream.delivered)
    assert stream.delivered == 20 * 3 * 16_384
    assert not stream.closed


# Floods.


@pytest.mark.parametrize(
    "data",
    [
        frame(wire.PING, 0, 0, b"12345678"),
        frame(wire.PING, wire.ACK, 0, b"12345678"),
        settings(),
        frame(wire.SETTINGS, wire.ACK),
        settings((wire.INITIAL_WINDOW_SIZE, WINDOW)),
        frame(wire.GOAWAY, 0, 0, b"\0" * 8),
        frame(wire.PRIORITY, 0, 1, b"12345"),
        frame(wire.PRIORITY, 0, 1001, b"1234"),
        frame(0x20, 0, 0, b"unknown"),
        window_update(0, 1),
        window_update(101, 1),
        window_update(99, 1),
        frame(DATA, 0, 101),
        frame(DATA, 0, 101, b"x"),
        frame(DATA, wire.PADDED, 101, b"\0"),
        frame(DATA, 0, 99),
        reset(99),
    ],
    ids=lambda data: f"{data[3]}-{data[4]}-{int.from_bytes(data[5:9], 'big')}-{len(data) - 9}",
)
def test_floods(data: bytes) -> None:
    """Frames that ask for work and bring none end the connection; those that come slowly are served."""
    for seconds, goes_on in ((0.1, True), (0.001, False)):
        server, encoder = Server(Limits(credit=1000, credit_per_s=10_000)), Encoder()
        server.h2.reset(server.open(request(encoder, 99, 0)), ErrorCode.CANCEL)
        server.open(request(encoder, 101, 0))
        server.said()
        for _ in range(100):
            server.say(data * 100)
            server.h2.renew(seconds)
        if goes_on:
            assert not server.h2.finished
        else:
            assert server.goaway() == ErrorCode.ENHANCE_YOUR_CALM


def test_settings_are_counted() -> None:
    """Each is work, however few are in a frame."""
    server = Server(Limits(credit=1000))
    for _ in range(30):
        assert not server.h2.finished
        server.say(frame(wire.SETTINGS, 0, 0, b"\0\x09\0\0\0\1" * 32))
    server.say(frame(wire.SETTINGS, 0, 0, b"\0\x09\0\0\0\1" * 32))
    assert server.goaway() == ErrorCode.ENHANCE_YOUR_CALM


def test_a_frame_of_many_settings_ends_the_connection() -> None:
    """It would hold up others for as long as it is read; its peer is taken to have used up all its credit."""
    server = Server()
    server.say(frame(wire.SETTINGS, 0, 0, b"\0\x09\0\0\0\1" * 33))
    assert server.goaway() == ErrorCode.ENHANCE_YOUR_CALM
    assert server.h2.spent >= Limits().credit


def test_a_connection_may_begin_with_less_credit() -> None:
    """What it spends is counted from there."""
    h2 = H2Connection(Limits(credit=1000), 100)
    h2.receive(START + frame(wire.PING, 0, 0, b"12345678") * 50)
    assert not h2.finished
    assert 50 <= h2.spent <= 60
    h2.receive(frame(wire.PING, 0, 0, b"12345678") * 50)
    assert h2.finished


def unary(encoder: Encoder, number: int, *fields: tuple[str, str]) -> bytes:
    """A small request with a body."""
    return request(encoder, number, 0, *fields) + frame(DATA, END_STREAM, number, b"x" * 60)


def test_cancels_at_a_sane_rate() -> None:
    """400 a second for a minute, and 250 at a time, leave the neighbours on the connection alone."""
    server, encoder = Server(), Encoder()
    neighbour = server.open(request(encoder, 1, 0))
    for second in range(60):
        for number in range(3 + 800 * second, 803 + 800 * second, 2):
            server.say(unary(encoder, number))
            server.say(reset(number))
        server.h2.renew(1)
    server.say(*[unary(encoder, number) for number in range(48_005, 48_505, 2)])
    server.say(*[reset(number) for number in range(48_005, 48_505, 2)])
    assert server.h2.streams == [neighbour]


def test_an_answer_pays_for_a_cancel() -> None:
    """A peer that asks twice, and gives up the slower, may do so at any rate."""
    server, encoder = Server(), Encoder()
    for number in range(1, 40_001, 4):
        stream = server.open(unary(encoder, number))
        stream.context = "a handler"
        server.say(unary(encoder, number + 2))
        server.h2.send(stream, OK, b"answer", END)
        server.say(reset(number + 2))
    assert not server.h2.finished


def test_a_refused_request_gives_no_credit_back() -> None:
    """Many fields are decoded before they are refused: who sends nothing else is sent away, whatever is answered."""
    last = 4001
    for refused in (True, False):
        server, encoder = Server(), Encoder()
        for number in range(1, last, 2):
            fields = [(f"x-{number}-{index}", "") for index in range(60)]
            events = server.say(unary(encoder, number, *fields))
            if server.h2.finished:
                last = 2 * number  # so many are answered where they are not refused
                break
            assert isinstance(events[0], RequestReceived)
            events[0].stream.context = None if refused else "a handler"
            server.h2.send(events[0].stream, OK, b"answer" if not refused else b"", END)
        assert server.h2.finished == refused


@pytest.mark.parametrize("size", [300, 5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_busy_peer_never_runs_out_of_credit(size: int) -> None:
    """No second passes: answers alone pay for pings, windows, new header fields, and bodies of any size."""
    server, encoder = Server(), Encoder()
    ping = frame(wire.PING, 0, 0, b"12345678")
    server.say(settings((wire.INITIAL_WINDOW_SIZE, 1 << 20)))
    for number in range(1, 6001, 2):
        trace = (("traceparent", f"00-{number:032x}-00f067aa0ba902b7-01"), ("x-number", str(number)))
        stream = server.open(request(encoder, number, 0, *trace) + ping)
        stream.context = "a handler"
        server.h2.expect(stream, size)
        server.say(*[frame(DATA, 0, number, b"x" * min(16_384, size - at)) for at in range(0, size, 16_384)])
        server.say(frame(DATA, END_STREAM, number))
        server.h2.send(stream, OK, b"y" * size, END)
        server.say(*[window_update(number, 1024) + window_update(0, 1024)] * (size // 1024), window_update(0, 1024))
        assert stream.closed
    assert not server.h2.finished


# Work in one turn.


def turns(h2: H2Connection, data: bytes) -> list[list[Event]]:
    """The events of each turn that some bytes need."""
    events = [h2.receive(data)]
    while h2.pending:
        events.append(h2.receive(b""))
    return events


@pytest.mark.parametrize(
    ("data", "least"),
    [
        (frame(wire.PING, 0, 0, b"12345678") * 100, 10),
        (frame(wire.PRIORITY, 0, 1, b"12345") * 100, 10),
        (frame(DATA, 0, 1, b"x" * 9000) * 7, 4),
        (b"".join(request(Encoder(), number) for number in range(3, 43, 2)), 10),
    ],
    ids=["frames", "frames without a cost", "bytes", "requests"],
)
def test_a_turn_has_so_much_work(data: bytes, least: int) -> None:
    """The rest waits for the next turn, and comes to the same as in one."""
    opened = START + request(Encoder(), 1, 0)
    pieces, whole = (H2Connection(Limits(turn_work=work)) for work in (10, 1 << 30))
    for h2 in (pieces, whole):
        turns(h2, opened)
    events = turns(pieces, data)
    assert len(events) >= least
    assert all(len(each) <= 10 for each in events)
    (at_once,) = turns(whole, data)
    assert [type(event) for each in events for event in each] == [type(event) for event in at_once]
    assert pieces.data_to_send() == whole.data_to_send()


def test_headers_that_are_decoded_are_work() -> None:
    """The frame behind a large header block waits; behind the same block again, which is not decoded, it does not."""
    h2, encoder = H2Connection(Limits(turn_work=60)), Encoder()
    fields = [(f"x-{number}", "") for number in range(30)]
    turns(h2, START + request(encoder, 1, END_STREAM, *fields))
    block = encoder.encode([*REQUEST, *fields])
    requests = [frame(HEADERS, END_HEADERS | END_STREAM, number, block) for number in (3, 5)]
    ping = frame(wire.PING, 0, 0, b"12345678")
    assert [len(turns(h2, data + ping)) for data in requests] == [2, 1]


def test_a_frame_that_takes_far_more_than_a_turn_is_said() -> None:
    """What comes next can wait for another turn then; a turn full of small frames is none of that."""
    h2, encoder = H2Connection(Limits(turn_work=60)), Encoder()
    turns(h2, START + request(encoder, 1) + frame(wire.PING, 0, 0, b"12345678") * 200)
    assert not h2.overdrawn
    turns(h2, request(encoder, 3, END_STREAM, *[(f"x-{number}", "") for number in range(30)]))
    assert h2.overdrawn
    turns(h2, frame(wire.PING, 0, 0, b"12345678"))
    assert not h2.overdrawn


def test_more_bytes_may_come_before_the_next_turn() -> None:
    """They are read behind those that wait."""
    h2 = H2Connection(Limits(turn_work=1))
    h2.receive(START + frame(wire.PING, 0, 0, b"first..."))
    h2.receive(frame(wire.PING, 0, 0, b"second.."))
    while h2.pending:
        h2.receive(b"")
    pongs = of_type(PingFrame, split(h2.data_to_send()))
    assert [pong.opaque_data for pong in pongs] == [b"first...", b"second.."]


def test_what_timers_need() -> None:
    """Whether something has begun and not ended, and whether anything has ended since."""
    h2 = H2Connection(Limits())
    assert not h2.partial
    h2.receive(START[:30])
    assert (h2.partial, h2.begun, h2.phase, h2.progress) == (True, True, H2Phase.GREETING, 0)
    h2.receive(START[30:])
    assert (h2.partial, h2.phase, h2.progress) == (False, H2Phase.OPEN, 1)
    h2.receive(frame(HEADERS, 0, 1))
    h2.receive(frame(wire.CONTINUATION, 0, 1, b"\x82"))
    assert (h2.partial, h2.progress) == (True, 1)


def test_a_connection_that_is_over_has_nothing_to_go_on_with() -> None:
    """Its caller would call it for ever, turn after turn."""
    pings = frame(wire.PING, 0, 0, b"12345678") * 1000
    overdrawn, ended = (H2Connection(Limits(turn_work=10, credit=100)) for _ in range(2))
    overdrawn.receive(START + pings)
    for _ in range(20):
        overdrawn.receive(b"")
    assert overdrawn.finished
    assert not overdrawn.pending
    ended.receive(START + pings)
    assert ended.pending
    ended.terminate()
    assert not ended.pending


# The end.


def test_a_shutdown_in_two_steps() -> None:
    """First all streams are welcome; once the peer has answered twice, the last is named, and it is still answered."""
    server, encoder = Server(), Encoder()
    stream = server.open(request(encoder, 1))
    server.said()
    server.h2.begin_drain()
    first, ping = server.said()
    assert isinstance(first, GoAwayFrame)
    assert isinstance(ping, PingFrame)
    assert (first.last_stream_id, first.error_code) == (2**31 - 1, ErrorCode.NO_ERROR)
    other = server.open(request(encoder, 3))
    (begun,) = server.say(frame(wire.PING, wire.ACK, 0, ping.opaque_data) + request(encoder, 5))
    assert isinstance(begun, RequestReceived)
    (again,) = server.said()
    assert isinstance(again, PingFrame)
    server.say(frame(wire.PING, wire.ACK, 0, again.opaque_data))
    assert server.h2.data_to_send() == frame(wire.GOAWAY, 0, 0, (5).to_bytes(4, "big") + bytes(4))
    assert server.say(request(encoder, 7)) == []
    assert server.reset() == ErrorCode.REFUSED_STREAM
    for open_stream in (stream, other, begun.stream):
        assert not server.h2.finished
        server.h2.send(open_stream, None, b"", OK)
    assert server.h2.finished


def test_a_shutdown_of_a_peer_that_does_not_answer() -> None:
    """The second step can be taken without it."""
    server = Server()
    server.h2.begin_drain()
    server.h2.end_drain()
    assert server.h2.finished
    assert len(of_type(GoAwayFrame, server.said())) == 2


def test_an_end_at_once() -> None:
    """Its streams are given up, and nothing more is sent on them."""
    server = Server()
    stream = server.open(request(Encoder(), 1, 0))
    reset, failed = server.h2.terminate(reason="the server ends")
    assert isinstance(reset, StreamReset)
    assert isinstance(failed, ConnectionFailed)
    assert (failed.code, failed.reason) == (ErrorCode.NO_ERROR, "the server ends")
    server.said()
    server.h2.send(stream, OK, b"late", END)
    assert server.said() == []
