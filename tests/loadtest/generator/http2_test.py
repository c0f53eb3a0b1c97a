from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hpack import Encoder

from loadtest.errors import BenchError
from loadtest.generator.closed_loop import Lane, connect
from loadtest.generator.http2 import FieldReader, GrpcWire, header_block, prefixed
from tests.support.grpc_server import grpc_server
from tests.support.http2 import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    setting,
    split,
)

if TYPE_CHECKING:
    from tests.support.http2 import Frame

METHOD = "/inference.GRPCInferenceService/ModelInfer"
HEAD = header_block([(":status", "200"), ("content-type", "application/grpc")])
TAIL = header_block([("grpc-status", "0"), ("bertserve-tokens", "8"), ("bertserve-queue-us", "12")])
CREDIT = 65_535


def wire() -> GrpcWire:
    return GrpcWire("test:1", METHOD)


def reply(stream: int, message: bytes = b"answer", tail: bytes = TAIL) -> bytes:
    return (
        frame(HEADERS, END_HEADERS, stream, HEAD)
        + frame(DATA, 0, stream, prefixed(message))
        + frame(HEADERS, END_HEADERS | END_STREAM, stream, tail)
    )


def sent(data: bytes) -> list[Frame]:
    frames, rest = split(data)
    assert not rest
    return frames


@pytest.mark.parametrize("huffman", [False, True])
@pytest.mark.parametrize("value", ["", "0", "x" * 126, "y" * 127, "z" * 128, "a b%" * 5000])
def test_fields_are_read_as_they_were_written(value: str, *, huffman: bool) -> None:
    """Whatever form an encoder without a dynamic table chooses, the fields come out as they went in."""
    encoder = Encoder()
    encoder.header_table_size = 0
    fields = [(":status", "200"), ("grpc-status", value), ("content-type", "application/grpc"), ("own", value)]
    reader = FieldReader()
    expected = [(name.encode(), text.encode()) for name, text in fields]
    for _ in range(2):  # the first block begins with the new size of the table
        assert list(reader.fields(encoder.encode(fields, huffman=huffman))) == expected
    assert list(reader.fields(header_block(fields))) == expected


@pytest.mark.parametrize("block", ["00", "0005", "ff", "be", "0003616263", "00ff"])
def test_a_broken_header_block_is_an_error(block: str) -> None:
    """A block that ends early, or that points into a dynamic table, is refused in a sentence."""
    with pytest.raises(BenchError, match="header"):
        list(FieldReader().fields(bytes.fromhex(block)))


def test_a_connection_opens_as_the_protocol_says() -> None:
    """The preface comes first, then settings that forbid a dynamic table and pushes."""
    opening = wire().opening()
    assert opening.startswith(PREFACE)
    settings, window = sent(opening.removeprefix(PREFACE))
    assert (settings.kind, window.kind) == (SETTINGS, WINDOW_UPDATE)
    values = dict(struct.iter_unpack(">HI", settings.payload))
    assert (values[1], values[2]) == (0, 0)


def test_replies_find_their_requests_in_any_order_and_any_pieces() -> None:
    """Calls side by side get their own replies, also when these come byte by byte and the last one first."""
    client = wire()
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
    client = wire()
    client.request(prefixed(b"question"), None)
    padded = b"\x03" + prefixed(b"answer") + bytes(3)
    data = (
        frame(HEADERS, END_HEADERS, 1, HEAD)
        + frame(DATA, PADDED, 1, padded)
        + frame(HEADERS, END_STREAM, 1, TAIL[:5])
        + frame(CONTINUATION, END_HEADERS, 1, TAIL[5:])
    )
    [found] = client.feed(data)
    assert (found.fault, found.body) == ("", b"answer")


def refusal(**fields: str) -> bytes:
    block = header_block([(name.replace("_", "-"), value) for name, value in fields.items()])
    return frame(HEADERS, END_HEADERS | END_STREAM, 1, block)


@pytest.mark.parametrize(
    ("data", "fault", "body"),
    [
        (refusal(grpc_status="8"), "RESOURCE_EXHAUSTED", ""),
        (refusal(grpc_status="77"), "grpc-status 77", ""),
        # The server's words are read with their percent signs undone.
        (refusal(grpc_status="3", grpc_message="zu %C3%BCppig"), "INVALID_ARGUMENT", "zu üppig"),
        (frame(HEADERS, END_HEADERS | END_STREAM, 1, header_block([(":status", "502")])), "no reply of gRPC (502)", ""),
        (frame(RST_STREAM, 0, 1, struct.pack(">I", 7)), "reset with code 7", ""),
        (frame(GOAWAY, 0, 0, struct.pack(">II", 0, 0)), "refused: the server goes away", ""),
        (
            frame(DATA, 0, 1, b"\1" + prefixed(b"x")[1:]) + frame(HEADERS, END_HEADERS | END_STREAM, 1, TAIL),
            "not one plain message",
            None,
        ),
    ],
)
def test_a_call_that_fails_says_why(data: bytes, fault: str, body: str | None) -> None:
    """Every way in which a server may refuse one call becomes a reply with its reason."""
    client = wire()
    client.request(prefixed(b"question"), "tag")
    [found] = client.feed(data)
    assert (found.tag, found.fault) == ("tag", fault)
    assert body in {found.body.decode(errors="replace"), None}


def test_a_connection_that_ends_in_anger_is_an_error() -> None:
    """GOAWAY with a code stops everything on the connection, in the server's words."""
    with pytest.raises(BenchError, match="code 11 too many pings"):
        wire().feed(frame(GOAWAY, 0, 0, struct.pack(">II", 0, 11) + b"too many pings"))
    with pytest.raises(BenchError, match="closed a connection"):
        wire().feed(b"")


def test_a_server_that_leaves_gets_no_more_calls() -> None:
    """After a friendly GOAWAY what is under way ends well, and there is room for nothing more."""
    client = wire()
    client.request(prefixed(b"question"), None)
    [found] = client.feed(frame(GOAWAY, 0, 0, struct.pack(">II", 1, 0)) + reply(1))
    assert not found.fault
    assert client.room() == 0


def test_pings_and_settings_are_acknowledged() -> None:
    """A ping comes back with its bytes, settings are confirmed; acknowledgements themselves are not answered."""
    client = wire()
    assert not client.feed(frame(PING, 0, 0, b"12345678") + setting(3, 2) + frame(PING, ACK, 0, bytes(8)))
    ping, settings = sent(client.owed())
    assert (ping.kind, ping.flags, ping.payload) == (PING, ACK, b"12345678")
    assert (settings.kind, settings.flags) == (SETTINGS, ACK)
    assert not client.owed()
    assert client.room() == 2


def test_no_more_is_sent_than_the_windows_allow() -> None:
    """A large message stops at the windows, goes on when they open, and arrives whole and in order."""
    client = wire()
    message = prefixed(bytes(range(256)) * 500)
    frames = sent(client.request(message, None))[1:]
    assert sum(len(part.payload) for part in frames) == CREDIT
    client.feed(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 20)))
    assert not client.owed()  # the stream's own window is still closed
    client.feed(setting(INITIAL_WINDOW_SIZE, CREDIT + 100))
    client.feed(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1 << 20)))
    frames += [part for part in sent(client.owed()) if part.kind == DATA]
    assert b"".join(part.payload for part in frames) == message
    assert [part.flags for part in frames] == [0] * (len(frames) - 1) + [END_STREAM]


def test_a_message_waits_behind_one_that_is_held_back() -> None:
    """The connection's window is used in order, so a small call cannot starve a large one."""
    client = wire()
    client.request(prefixed(bytes(2 * CREDIT)), "large")
    [head] = sent(client.request(prefixed(b"small"), "small"))
    assert head.kind == HEADERS


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
