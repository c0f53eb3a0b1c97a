from __future__ import annotations

import struct

import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame, WindowUpdateFrame

from bertserve.loadtest.errors import BenchError
from bertserve.loadtest.generator import frames as wire
from bertserve.loadtest.generator.closed_loop import Lane, connect
from bertserve.loadtest.generator.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    frame,
    header_block,
    prefixed,
)
from bertserve.loadtest.generator.http2 import GrpcWire, fields_of
from tests.support.grpc_server import grpc_server
from tests.support.http2 import of_type, split

METHOD = "/inference.GRPCInferenceService/ModelInfer"
HEAD = header_block([(":status", "200"), ("content-type", "application/grpc")])
TAIL = header_block([("grpc-status", "0"), ("bertserve-tokens", "8"), ("bertserve-queue-us", "12")])
CREDIT = 65_535


def connection() -> GrpcWire:
    """A new connection of a client."""
    return GrpcWire("test:1", METHOD)


def reply(stream: int, message: bytes = b"answer", tail: bytes = TAIL) -> bytes:
    """A whole reply."""
    return (
        frame(HEADERS, END_HEADERS, stream, HEAD)
        + frame(DATA, 0, stream, prefixed(message))
        + frame(HEADERS, END_HEADERS | END_STREAM, stream, tail)
    )


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("value", ["", "0", "x" * 126, "y" * 127, "z" * 128, "a b%" * 5000])
def test_fields_are_read_as_they_were_written(value: str, *, huffman: bool) -> None:
    """Whatever form an encoder without a dynamic table chooses, the fields come out as they went in."""
    encoder = Encoder()
    encoder.header_table_size = 0
    fields = [(":status", "200"), ("grpc-status", value), ("content-type", "application/grpc"), ("own", value)]
    expected = [(name.encode(), text.encode()) for name, text in fields]
    for _ in range(2):  # the first block begins with the new size of the table
        assert list(fields_of(encoder.encode(fields, huffman=huffman))) == expected
    assert list(fields_of(header_block(fields))) == expected


@pytest.mark.parametrize("block", ["00", "0005", "ff", "be", "0003616263", "00ff"])
def test_a_broken_header_block_is_an_error(block: str) -> None:
    """A block that ends early, or that points into a dynamic table, is refused in a sentence."""
    with pytest.raises(BenchError, match="header"):
        list(fields_of(bytes.fromhex(block)))


def test_a_connection_opens_as_the_protocol_says() -> None:
    """The preface comes first, then wire.settings that forbid a dynamic table and pushes."""
    opening = connection().opening()
    assert opening.startswith(PREFACE)
    first, window = split(opening.removeprefix(PREFACE))
    assert isinstance(first, SettingsFrame)
    assert isinstance(window, WindowUpdateFrame)
    assert (first.settings[1], first.settings[2]) == (0, 0)


def test_replies_find_their_requests_in_any_order_and_any_pieces() -> None:
    """Calls side by side get their own replies, also when these come byte by byte and the last one first."""
    client = connection()
    for tag in ("first", "second"):
        client.request(prefixed(b"question"), tag)
    data = reply(3, b"two") + reply(1, b"one")
    replies = [found for byte in data for found in client.feed(bytes([byte]))]
    assert [(found.tag, found.fault, found.body) for found in replies] == [
        ("second", "", b"two"),
        ("first", "", b"one"),
    ]
    served = client.served(replies[0].head)
    assert (served.tokens, served.queue_us, served.compute_us) == (8, 12.0, -1.0)


def test_padding_and_continued_headers_are_read() -> None:
    """Frames may be padded, and a header block may come in several."""
    client = connection()
    client.request(prefixed(b"question"), None)
    padded = b"\x03" + prefixed(b"answer") + bytes(3)
    data = (
        frame(HEADERS, END_HEADERS, 1, HEAD)
        + frame(DATA, wire.PADDED, 1, padded)
        + frame(HEADERS, END_STREAM, 1, TAIL[:5])
        + frame(wire.CONTINUATION, END_HEADERS, 1, TAIL[5:])
    )
    [found] = client.feed(data)
    assert (found.fault, found.body) == ("", b"answer")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block([("grpc-status", "8")])), "RESOURCE_EXHAUSTED"),
        (frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block([("grpc-status", "77")])), "grpc-status 77"),
        (frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block([(":status", "502")])), "not a gRPC reply (502)"),
        (wire.reset(1, 7), "reset with code 7"),
        (frame(wire.GOAWAY, 0, 0, struct.pack(">II", 0, 0)), "rejected: the server is shutting down"),
        (
            frame(DATA, 0, 1, b"\1" + prefixed(b"x")[1:]) + frame(HEADERS, END_HEADERS | END_STREAM, 1, TAIL),
            "not one uncompressed message",
        ),
    ],
)
def test_a_call_that_fails_says_why(data: bytes, fault: str) -> None:
    """Every way in which a server may refuse one call becomes a reply with its reason."""
    client = connection()
    client.request(prefixed(b"question"), "tag")
    [found] = client.feed(data)
    assert (found.tag, found.fault) == ("tag", fault)


def test_a_failing_call_brings_the_server_s_words() -> None:
    """The message is read with its percent signs undone."""
    client = connection()
    client.request(prefixed(b"question"), None)
    tail = header_block([("grpc-status", "3"), ("grpc-message", "zu %C3%BCppig")])
    [found] = client.feed(frame(HEADERS, END_HEADERS | END_STREAM, 1, tail))
    assert found.body.decode() == "zu üppig"


def test_a_connection_that_ends_in_anger_is_an_error() -> None:
    """GOAWAY with a code stops everything on the connection, in the server's words."""
    with pytest.raises(BenchError, match="code 11 too many pings"):
        connection().feed(frame(wire.GOAWAY, 0, 0, struct.pack(">II", 0, 11) + b"too many pings"))
    with pytest.raises(BenchError, match="closed the gRPC connection"):
        connection().feed(b"")


def test_a_server_that_leaves_gets_no_more_calls() -> None:
    """After a friendly wire.GOAWAY what is under way ends well, and there is room for nothing more."""
    client = connection()
    client.request(prefixed(b"question"), None)
    [found] = client.feed(frame(wire.GOAWAY, 0, 0, struct.pack(">II", 1, 0)) + reply(1))
    assert not found.fault
    assert client.room() == 0


def test_pings_and_settings_are_acknowledged() -> None:
    """A ping comes back with its bytes, wire.settings are confirmed; acknowledgements themselves are not answered."""
    client = connection()
    assert not client.feed(
        frame(wire.PING, 0, 0, b"12345678") + wire.settings((3, 2)) + frame(wire.PING, wire.ACK, 0, bytes(8))
    )
    assert client.owed() == frame(wire.PING, wire.ACK, 0, b"12345678") + frame(wire.SETTINGS, wire.ACK)
    assert not client.owed()
    assert client.room() == 2


def test_no_more_is_sent_than_the_windows_allow() -> None:
    """A large message stops at the windows, goes on when they open, and arrives whole and in order."""
    client = connection()
    message = prefixed(bytes(range(256)) * 500)
    frames = of_type(DataFrame, split(client.request(message, None)))
    assert sum(len(part.data) for part in frames) == CREDIT
    client.feed(wire.window_update(0, 1 << 20))
    assert not client.owed()  # the stream's own window is still closed
    client.feed(wire.settings((wire.INITIAL_WINDOW_SIZE, CREDIT + 100)))
    client.feed(wire.window_update(1, 1 << 20))
    frames += of_type(DataFrame, split(client.owed()))
    assert b"".join(part.data for part in frames) == message
    assert [part for part in frames if "END_STREAM" in part.flags] == [frames[-1]]


def test_a_message_waits_behind_one_that_is_held_back() -> None:
    """The connection's window is used in order, so a small call cannot starve a large one."""
    client = connection()
    client.request(prefixed(bytes(2 * CREDIT)), "large")
    [head] = split(client.request(prefixed(b"small"), "small"))
    assert isinstance(head, HeadersFrame)


@pytest.mark.parametrize("size", [0, 20_000, 3_000_000])
def test_a_message_of_any_size_reaches_a_server_of_grpc_s_own(size: int) -> None:
    """Messages beyond every frame and window go through, both ways, again and again on one connection."""

    def check(found: object) -> None:
        assert getattr(found, "fault", None) == ""

    with grpc_server(lambda request, _: request) as target:
        host, _, port = target.rpartition(":")
        with connect(host, int(port)) as connection:
            lane = Lane(connection, GrpcWire(target, METHOD), check)
            for number in range(3):
                message = bytes([number]) * size
                assert lane.exchange(prefixed(message)).body == message
