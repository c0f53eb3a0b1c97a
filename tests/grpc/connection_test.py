"""Calls without a network: bytes in, bytes out, however they are cut."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, cast

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import Overloaded
from serving.grpc.calls import Method
from serving.grpc.connection import GrpcConnection
from serving.grpc.dispatch import CallDispatch
from serving.net.ports import lifetime_s
from serving.settings import Settings
from tests.support import http2
from tests.support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, Replies, Reply, frame, prefixed, request_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.errors import BertserveError
    from serving.grpc.calls import Call

START = http2.PREFACE + frame(http2.SETTINGS, 0, 0)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Keeps it."""
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        """As TCP."""
        return True

    def write_eof(self) -> None:
        """The end of what is written."""

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.closed

    def close(self) -> None:
        """Closes it."""
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        """Not asked for here."""

    resume_reading = pause_reading


async def echo(request: BytesValue, call: Call, _: object = None) -> BytesValue:
    """Answers what it is asked, with the deadline behind it."""
    remaining_s = call.time_remaining()
    call.set_trailing_metadata((("x-deadline", "" if remaining_s is None else f"{remaining_s:.0f}"),))
    if request.value == b"refuse":
        raise Overloaded("too much: 100% — ünd\n", retry_after_s=1.5)
    if request.value == b"fail":
        raise RuntimeError("a secret")
    return request


class Peer:
    """A server's connection and the client's view of it; made inside an event loop."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.errors: list[BertserveError] = []
        methods = {"/echo": Method(BytesValue, unary=echo), "/talk": Method(BytesValue, duplex=echo)}
        calls = CallDispatch(methods, settings or Settings(), lambda error, _: self.errors.append(error))
        self.connection = GrpcConnection(calls)
        self.wire = Wire()
        self.connection.connection_made(self.wire)

    async def say(self, *parts: bytes) -> None:
        """Hands bytes to the connection, and lets it work."""
        for part in parts:
            self.connection.data_received(part)
        for _ in range(5):
            await asyncio.sleep(0)

    def frames(self) -> list[http2.Frame]:
        """What the server wrote."""
        found, rest = http2.split(self.wire.written)
        assert rest == b""
        return found

    def replies(self) -> dict[int, Reply]:
        """The replies among that, by stream."""
        replies = Replies()
        for arrived in self.frames():
            if arrived.stream:
                replies.take(arrived)
        return replies.streams


def call(encoder: Encoder, stream: int, value: bytes, **changes: str | None) -> bytes:
    """A call of `echo`."""
    fields = encoder.encode(request_fields("/echo", **changes))
    data = prefixed(BytesValue(value=value).SerializeToString())
    return frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, END_STREAM, stream, data)


def exchange(*parts: bytes) -> Peer:
    """What comes of some bytes."""

    async def run() -> Peer:
        peer = Peer()
        await peer.say(*parts)
        return peer

    return asyncio.run(run())


values = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


@given(values, st.lists(st.integers(0, 2000), max_size=12), st.booleans())
def test_calls_however_the_bytes_are_cut(asked: list[bytes], cuts: list[int], huffman: bool) -> None:  # noqa: FBT001
    """Any cutting of the stream gives the same answers, one for each call."""
    encoder = Encoder()
    data = START + b"".join(call(encoder, 2 * place + 1, value) for place, value in enumerate(asked))
    if huffman:
        data += frame(HEADERS, END_HEADERS | END_STREAM, 99, encoder.encode(request_fields("/nothing"), huffman=True))
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    peer = exchange(*[data[start:stop] for start, stop in itertools.pairwise(places)])
    replies = peer.replies()
    assert [BytesValue.FromString(replies[2 * at + 1].message).value for at in range(len(asked))] == asked
    assert all(replies[2 * at + 1].status == 0 for at in range(len(asked)))


@given(st.binary(max_size=200))
def test_any_bytes_at_the_start(data: bytes) -> None:
    """Bytes that are not HTTP/2 close the connection without a word."""
    peer = exchange(data)
    if not http2.PREFACE.startswith(data[:24]):
        assert peer.wire.closed
        assert peer.wire.written == b""


@pytest.mark.parametrize(
    ("given_timeout", "seconds"),
    [("1H", "3600"), ("2M", "120"), ("3S", "3"), ("4000m", "4"), ("5000000u", "5"), (None, "")],
)
def test_timeouts(given_timeout: str | None, seconds: str) -> None:
    """Every unit of `grpc-timeout` reaches the method; without it there is no deadline."""
    peer = exchange(START, call(Encoder(), 1, b"", grpc_timeout=given_timeout))
    assert peer.replies()[1].fields["x-deadline"] == seconds


def test_an_error_of_the_table() -> None:
    """Its code, its message percent-encoded, its reason and when to try again, in one block."""
    peer = exchange(START, call(Encoder(), 1, b"refuse"))
    reply = peer.replies()[1]
    assert reply.status == 8
    assert reply.fields["grpc-message"] == "too much: 100%25 %E2%80%94 %C3%BCnd%0A"
    assert reply.fields["bertserve-reason"] == "overloaded"
    assert reply.fields["retry-after-ms"] == "1500"
    assert len([arrived for arrived in peer.frames() if arrived.stream == 1]) == 1
    assert [error.reason for error in peer.errors] == ["overloaded"]


def test_a_bug_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    """INTERNAL, without a word of what happened, which the log has."""
    reply = exchange(START, call(Encoder(), 1, b"fail")).replies()[1]
    assert reply.status == 13
    assert "secret" not in reply.fields["grpc-message"]
    assert "a secret" in caplog.text


def test_an_answer_is_one_write() -> None:
    """Headers, message and trailers leave together."""

    async def run() -> list[bytes]:
        peer = Peer()
        writes: list[bytes] = []
        await peer.say(START)
        write: Callable[[bytes], None] = writes.append
        peer.wire.write = cast("Callable[..., None]", write)  # type: ignore[method-assign]
        await peer.say(call(Encoder(), 1, b"one"))
        return writes

    (written,) = asyncio.run(run())
    found, _ = http2.split(written)
    assert [arrived.kind for arrived in found] == [HEADERS, DATA, HEADERS]


def test_a_lost_connection_cancels_its_calls() -> None:
    """Each is counted once."""

    async def run() -> Peer:
        peer = Peer()
        peer.connection.data_received(START + call(Encoder(), 1, b"one"))
        peer.connection.connection_lost(None)
        await peer.say()
        return peer

    peer = asyncio.run(run())
    assert [error.reason for error in peer.errors] == ["client_gone"]
    assert peer.replies() == {}


def talk(encoder: Encoder, stream: int, *values: bytes, flags: int = 0) -> bytes:
    """A bidirectional call with some messages in one frame."""
    fields = encoder.encode(request_fields("/talk"))
    data = b"".join(prefixed(BytesValue(value=value).SerializeToString()) for value in values)
    return frame(HEADERS, END_HEADERS, stream, fields) + frame(DATA, flags, stream, data)


def test_a_bidirectional_call_answers_message_by_message() -> None:
    """Each when it is whole, in their order; the call ends when its client has said all."""

    async def run() -> Peer:
        peer = Peer()
        encoder = Encoder()
        first = talk(encoder, 1, b"one", b"two")
        third = prefixed(BytesValue(value=b"three").SerializeToString())
        await peer.say(START, first, frame(DATA, 0, 1, third[:4]))
        assert not peer.replies()[1].ended
        await peer.say(frame(DATA, END_STREAM, 1, third[4:]))
        return peer

    reply = asyncio.run(run()).replies()[1]
    messages = b"".join(prefixed(BytesValue(value=value).SerializeToString()) for value in (b"one", b"two", b"three"))
    assert reply.data == messages
    assert reply.ended


def test_an_error_ends_a_bidirectional_call() -> None:
    """What came before it is answered, what comes behind it is not."""
    encoder = Encoder()
    peer = exchange(START, talk(encoder, 1, b"one", b"refuse", b"three", flags=END_STREAM))
    reply = peer.replies()[1]
    assert reply.data == prefixed(BytesValue(value=b"one").SerializeToString())
    assert reply.ended
    assert [error.reason for error in peer.errors] == ["overloaded"]


def test_a_bidirectional_call_that_ends_inside_a_message() -> None:
    """It is malformed."""
    encoder = Encoder()
    fields = encoder.encode(request_fields("/talk"))
    opened = frame(HEADERS, END_HEADERS, 1, fields) + frame(DATA, END_STREAM, 1, b"\0\0\0\0\5abc")
    peer = exchange(START, opened)
    assert peer.replies()[1].ended
    assert [error.reason for error in peer.errors] == ["malformed_request"]


def test_a_quiet_bidirectional_call_is_not_taken_for_a_slow_one() -> None:
    """Between messages it may last; inside a message it has as long as a body."""

    async def run(rest: bytes) -> list[str]:
        peer = Peer()
        await peer.say(START, talk(Encoder(), 1, b"one"), *([frame(DATA, 0, 1, rest)] if rest else []))
        for _ in range(30):
            peer.connection.tick(1.0)
        return [error.reason for error in peer.errors]

    assert asyncio.run(run(b"")) == []
    assert asyncio.run(run(b"\0\0")) == ["slow_request"]


def test_a_drain_ends_quiet_bidirectional_calls() -> None:
    """Nobody would else: their clients wait for the server, and it for them."""

    async def run() -> Peer:
        peer = Peer()
        await peer.say(START, talk(Encoder(), 1, b"one"))
        peer.connection.drain()
        return peer

    peer = asyncio.run(run())
    assert peer.replies()[1].ended
    assert [error.reason for error in peer.errors] == ["not_ready"]


def test_a_connection_too_old_lets_bidirectional_calls_go_on() -> None:
    """Its client is told to open another; a call that is there ends with its client, or with the server."""

    async def run() -> None:
        peer = Peer()
        encoder = Encoder()
        await peer.say(START, frame(HEADERS, END_HEADERS, 1, encoder.encode(request_fields("/talk"))))
        peer.connection.tick(2 * Settings().max_connection_age_s)
        assert [arrived.kind for arrived in peer.frames()].count(http2.GOAWAY) == 1
        await peer.say(frame(DATA, 0, 1, prefixed(BytesValue(value=b"still here").SerializeToString())))
        assert BytesValue.FromString(peer.replies()[1].message).value == b"still here"
        assert not peer.replies()[1].ended
        peer.connection.drain()
        assert peer.replies()[1].ended

    asyncio.run(run())


def test_connections_that_never_grow_old() -> None:
    """An age of 0 is none."""

    async def run() -> None:
        peer = Peer(Settings(max_connection_age_s=0))
        await peer.say(START)
        peer.connection.tick(1e9)
        assert http2.GOAWAY not in [arrived.kind for arrived in peer.frames()]

    asyncio.run(run())


def test_connections_do_not_end_together() -> None:
    """Of those opened at one moment each has a time of its own, a tenth around the setting."""
    ages = [lifetime_s(Settings(max_connection_age_s=100)) for _ in range(200)]
    assert 90 <= min(ages) < 95
    assert 105 < max(ages) <= 110
